"use strict";

// A client of hvprobe: boots guests, plants probes, and reads what they see. What is in messages is
// documented in the .proto files; its types, and this, in index.d.ts.

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

// In the package, or in the repository.
const PROTOS = [path.join(__dirname, "proto"), path.join(__dirname, "../../../proto")];
const FILES = ["error", "events", "machines", "probes"].map((name) => `hvprobe/v1/${name}.proto`);
const definition = loader.loadSync(FILES, {
  includeDirs: PROTOS.filter((folder) => fs.existsSync(path.join(folder, FILES[0]))),
  defaults: true,
  enums: String,
  // Numbers of 64 bits: registers do not fit JavaScript's own.
  longs: String,
});

// A list with more pages does not end: a page has an item, and a machine has at most
// this many probes.
const PAGES = 65536;

/** The server would not, or could not, do what it was asked for. */
class Refused extends Error {
  constructor(error) {
    super(error.details || error.message);
    this.name = "Refused";
    this.code = grpc.status[error.code];
  }
}

/** Events of a machine, in the order they come. */
class Events {
  constructor(call) {
    this.call = call;
    this.batches = call[Symbol.asyncIterator]();
    this.probes = new Map();
    this.dropped = 0;
    this.ended = undefined;
  }

  /** The events of the next message, or nothing when there will be none. */
  async receive() {
    try {
      const { done, value } = await this.batches.next();
      if (done) return undefined;
      for (const probe of value.probes) this.probes.set(probe.id, probe);
      this.dropped += Number(value.dropped);
      this.ended = value.ended ?? undefined;
      return value.events;
    } catch (error) {
      if (error.code === grpc.status.CANCELLED) return undefined;
      throw new Refused(error);
    }
  }

  async *[Symbol.asyncIterator]() {
    for (let events = await this.receive(); events; events = await this.receive()) yield* events;
  }

  close() {
    this.call.cancel();
  }
}

/** A connection to a server. */
class Client {
  constructor(target, { token, seconds = 30 } = {}) {
    this.seconds = seconds;
    this.metadata = new grpc.Metadata();
    if (token) this.metadata.set("authorization", `Bearer ${token}`);
    const service = (name) => {
      const Service = grpc.makeClientConstructor(definition[`hvprobe.v1.${name}`], name);
      return new Service(target, grpc.credentials.createInsecure());
    };
    this.services = { Machines: service("Machines"), Probes: service("Probes"), Events: service("Events") };
  }

  call(service, method, request) {
    const deadline = Date.now() + this.seconds * 1000;
    return new Promise((resolve, reject) => {
      this.services[service][method](request, this.metadata, { deadline }, (error, answer) =>
        error ? reject(new Refused(error)) : resolve(answer),
      );
    });
  }

  async machines() {
    const machines = [];
    let pageToken = "";
    for (let pages = 0; pages < PAGES; pages++) {
      const page = await this.call("Machines", "ListMachines", { pageToken });
      machines.push(...page.machines);
      if (!page.nextPageToken) return machines;
      if (page.nextPageToken === pageToken) break;
      pageToken = page.nextPageToken;
    }
    throw new Error("the server's list of machines does not end");
  }

  boot(kernel, more = {}) {
    return this.call("Machines", "Boot", { ...more, kernel: path.resolve(kernel) });
  }

  stop(machine) {
    return this.call("Machines", "Stop", { machine });
  }

  async plant(machine, ...definitions) {
    const probes = definitions.map((definition) => ({ definition }));
    return (await this.call("Probes", "Register", { machine, probes })).ids;
  }

  async remove(machine, ...ids) {
    await this.call("Probes", "Unregister", { machine, ids });
  }

  async events(machine, ...probes) {
    const events = new Events(this.services.Events.Subscribe({ machine, probes }, this.metadata));
    // The first message says that the subscription is in force.
    await events.receive();
    return events;
  }

  close() {
    for (const service of Object.values(this.services)) service.close();
  }
}

module.exports = { Client, Events, Refused };
