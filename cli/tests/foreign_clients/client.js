// Calls a server as Node's grpc-js does, with what it is told of the interface by the .proto files or
// by the server itself.
//
// Usage: client.js TARGET PROTOS|reflection [TOKEN_FILE [KERNEL INITRD]]. Prints what it found, a line each; ends
// with status 0 if all was as expected. With a kernel it boots a guest, has its hits told and decided, and stops it.
"use strict";

const assert = require("node:assert");
const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const { FileDescriptorProto: File, FileDescriptorSet: FileSet } = require("protobufjs/ext/descriptor");

const SECONDS = 60;
const RUNNING = 2;
const CALLS = "while :; do workload calls getpgid 3; done";
const REFLECTION = "grpc/reflection/v1/reflection.proto";
const FILES = ["decisions", "events", "histograms", "machines", "probes", "sources", "symbols"].map((name) => `hvprobe/v1/${name}.proto`);

/** Shows the token with each call, as credentials go over TLS only. */
function interceptors(token) {
  if (token === undefined) return [];
  const shows = (options, next) =>
    new grpc.InterceptingCall(next(options), {
      start(metadata, listener, begin) {
        metadata.set("authorization", `Bearer ${token}`);
        begin(metadata, listener);
      },
    });
  return [shows];
}

/** Makes clients of the services in `definition`. */
function clients(definition, target, token) {
  const made = [];
  const make = (name) => {
    const Client = grpc.makeClientConstructor(definition[name], name);
    const options = { interceptors: interceptors(token) };
    const client = new Client(target, grpc.credentials.createInsecure(), options);
    made.push(client);
    return client;
  };
  return { make, close: () => made.forEach((client) => client.close()) };
}

const deadline = () => ({ deadline: Date.now() + SECONDS * 1000 });

/** The answer to a call with one. */
function unary(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, new grpc.Metadata(), deadline(), (error, answer) =>
      error ? reject(error) : resolve(answer),
    );
  });
}

/** All answers to a call with many. */
function stream(client, method, request) {
  return new Promise((resolve, reject) => {
    const answers = [];
    const call = client[method](request, new grpc.Metadata(), deadline());
    call.on("data", (answer) => answers.push(answer));
    call.on("error", reject);
    call.on("end", () => resolve(answers));
  });
}

/** All answers to a call that asks once of many times that it can. */
function both(client, method, request) {
  return new Promise((resolve, reject) => {
    const answers = [];
    const call = client[method](new grpc.Metadata(), deadline());
    call.on("data", (answer) => answers.push(answer));
    call.on("error", reject);
    call.on("end", () => resolve(answers));
    call.end(request);
  });
}

/** The answer to a call that is told in parts, of which this is the only one. */
function parts(client, method, request) {
  return new Promise((resolve, reject) => {
    const call = client[method](new grpc.Metadata(), deadline(), (error, answer) =>
      error ? reject(error) : resolve(answer),
    );
    call.end(request);
  });
}

/** What the server tells of its services: the definition of all but those it tells that with. */
async function reflected(target, token) {
  const folder = path.join(require.resolve("@grpc/reflection/package.json"), "../build/proto");
  const definition = loader.loadSync(REFLECTION, { includeDirs: [folder] });
  const { make, close } = clients(definition, target, token);
  const reflection = make("grpc.reflection.v1.ServerReflection");
  // One question a call.
  const ask = (request) =>
    new Promise((resolve, reject) => {
      const call = reflection.ServerReflectionInfo(deadline());
      call.on("data", resolve);
      call.on("error", reject);
      call.end(request);
    });
  const { listServicesResponse } = await ask({ listServices: "*" });
  const services = listServicesResponse.service.map((service) => service.name);
  assert(services.includes("hvprobe.v1.Machines"), services.join());
  const files = new Map();
  const add = async (request) => {
    const { fileDescriptorResponse } = await ask(request);
    for (const file of fileDescriptorResponse.fileDescriptorProto.map((it) => File.decode(it))) {
      if (files.has(file.name)) continue;
      files.set(file.name, file);
      for (const needed of file.dependency) await add({ fileByFilename: needed });
    }
  };
  for (const service of services) {
    if (!service.startsWith("grpc.reflection.")) await add({ fileContainingSymbol: service });
  }
  close();
  const set = FileSet.encode({ file: [...files.values()] }).finish();
  return loader.loadFileDescriptorSetFromBuffer(Buffer.from(set));
}

async function refused(call) {
  try {
    await call();
    return "it was taken";
  } catch (error) {
    const details = error.metadata.get("grpc-status-details-bin");
    const ours = details.some((detail) => detail.includes("hvprobe.v1.ErrorDetail"));
    return `${grpc.status[error.code]} ${ours ? "True" : "False"}`;
  }
}

/** Boots a guest, has its hits told, and decided, and stops it. Fields are called as in the .proto files. */
async function hits(make, machine, kernel, initrd) {
  const machines = make("hvprobe.v1.Machines");
  const probes = make("hvprobe.v1.Probes");
  const plant = (probe) => unary(probes, "Register", { machine, probes: [probe] });
  // Takes messages until `take` has had enough.
  const until = (call, take) =>
    new Promise((resolve, reject) => {
      call.on("data", (message) => {
        if (take(message)) {
          call.removeAllListeners("error");
          call.on("error", () => {});
          call.cancel();
          resolve();
        }
      });
      call.on("error", reject);
      call.on("end", () => reject(new Error("it has ended")));
    });

  await unary(machines, "Boot", { name: machine, kernel, initrd, command: ["sh", "-c", CALLS] });
  const states = machines.Watch({ machine }, new grpc.Metadata(), deadline());
  await until(states, ({ state }) => state === RUNNING);
  console.log("running: True");

  const { ids } = await plant({ definition: "p:plain __x64_sys_getpgid" });
  const events = make("hvprobe.v1.Events");
  let count = 0;
  const names = new Map();
  await until(events.Subscribe({ machine, probes: ids }, new grpc.Metadata(), deadline()), (message) => {
    for (const probe of message.probes ?? []) names.set(probe.id, probe.name);
    for (const event of message.events ?? []) {
      assert.equal(names.get(event.probe), "plain");
      assert.equal(event.task.comm.toString(), "workload");
      count += 1;
    }
    return count >= 3;
  });
  console.log("hits: 3");
  await unary(probes, "Unregister", { machine, ids });

  const ask = { deadline_ms: 60000 };
  const asked = await plant({ definition: "p:asked __x64_sys_getpgid", actions: { ask } });
  const decisions = make("hvprobe.v1.Decisions").Decide(new grpc.Metadata(), deadline());
  let decided = 0;
  decisions.write({ decide_for: { machine, probes: asked.ids } });
  await until(decisions, ({ question }) => {
    if (!question) return false;
    if (decided === 2) return true;
    decisions.write({ answer: { token: question.token, decision: { return_value: 1 } } });
    decided += 1;
    return false;
  });
  console.log("decided:", decided);
  const { ending } = await unary(machines, "Stop", { machine });
  console.log("stopped:", ending.reason);
}

async function main(target, from, file, ...guest) {
  const token = file && fs.readFileSync(file, "utf8").trim();
  const definition =
    from === "reflection"
      ? await reflected(target, token)
      : loader.loadSync(FILES, { includeDirs: [from], keepCase: guest.length > 0 });
  const { make, close } = clients(definition, target, token);
  if (guest.length > 0) {
    await hits(make, from === "reflection" ? "node-reflection" : "node", ...guest);
    close();
    return;
  }
  const machines = make("hvprobe.v1.Machines");
  // On one connection, so that later calls refer to what the first one sent.
  for (let time = 0; time < 3; time++) {
    const answer = await unary(machines, "ListMachines", {});
    console.log("machines:", (answer.machines ?? []).length);
  }
  // Its .proto file is not ours.
  if (from === "reflection") {
    const health = make("grpc.health.v1.Health");
    const { status } = await unary(health, "Check", { service: "hvprobe.v1.Machines" });
    console.log("health:", status);
  }
  const boot = { name: "a", kernel: "/nowhere" };
  console.log("boot:", await refused(() => unary(machines, "Boot", boot)));
  const a = { machine: "a" };
  console.log("get:", await refused(() => unary(machines, "GetMachine", a)));
  const symbols = make("hvprobe.v1.Symbols");
  console.log("symbols:", await refused(() => stream(symbols, "ListSymbols", a)));
  const sources = make("hvprobe.v1.Sources");
  const lines = { machine: "a", function: "vfs_read" };
  console.log("lines:", await refused(() => unary(sources, "ListLines", lines)));
  const part = { machine: "a", data: Buffer.from("ELF") };
  console.log("upload:", await refused(() => parts(sources, "UploadDebugInfo", part)));
  const events = make("hvprobe.v1.Events");
  console.log("events:", await refused(() => stream(events, "Subscribe", a)));
  const histograms = make("hvprobe.v1.Histograms");
  const what = { machine: "a", probes: [1], histogram: "keys=comm" };
  // From a descriptor, proto-loader takes names as they are; from a .proto file, in its own way.
  const wanted = from === "reflection" ? { aggregate_for: what } : { aggregateFor: what };
  console.log("histograms:", await refused(() => both(histograms, "Aggregate", wanted)));
  close();
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
