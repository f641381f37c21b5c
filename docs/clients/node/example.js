// Prints the hits of a probe, in a guest that runs or in one that is booted for it:
//   node example.js unix:/run/hvprobe.sock --machine web
//   node example.js 127.0.0.1:50051 --token-file token --kernel vmlinuz --initrd initrd.cpio
// Ctrl-C takes the probe out, too. If this is killed, the probe stays: one that is to go with its client is
// planted in a session (`Sessions.Hold`).
"use strict";

const fs = require("node:fs");
const { parseArgs } = require("node:util");
const { Client } = require("hvprobe");

const text = { type: "string" };
const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    "token-file": text,
    machine: text,
    kernel: text,
    initrd: { ...text, default: "" },
    probe: { ...text, default: "p vfs_read" },
    seconds: { ...text, default: "60" },
  },
});

async function main() {
  const file = values["token-file"];
  const client = new Client(positionals[0], { token: file && fs.readFileSync(file, "utf8").trim() });
  const { kernel, initrd, probe } = values;
  const machine = values.machine ?? (await client.boot(kernel, { initrd })).name;
  const ids = await client.plant(machine, probe);
  const events = await client.events(machine, ...ids);
  const timer = setTimeout(() => events.close(), Number(values.seconds) * 1000);
  process.once("SIGINT", () => events.close());
  for await (const { task, vcpu, probe } of events) {
    console.log(`${task?.comm}-${task?.pid} [${vcpu}] ${events.probes.get(probe).name}`);
  }
  clearTimeout(timer);
  console.log(`${events.dropped} dropped`);
  if (!events.ended) await (kernel ? client.stop(machine) : client.remove(machine, ...ids));
  if (kernel) console.log("the guest has ended");
  client.close();
}

main();
