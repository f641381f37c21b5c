/** Fields of `Machine` (machines.proto). Numbers of 64 bits are texts, as JavaScript's are shorter. */
export interface Machine {
  name: string;
  state: string;
  cpus: number;
  memory: string;
  kernel: string;
  ending: Ending | null;
}

/** How a guest ended. */
export interface Ending {
  reason: string;
  guestStatus?: number;
  report: string;
}

/** Fields of `Probe` (probes.proto). */
export interface Probe {
  id: number;
  name: string;
  definition: string;
  state: string;
}

/** Fields of `Event` (events.proto). */
export interface Event {
  seq: string;
  probe: number;
  vcpu: number;
  hostNs: string;
  guestTsc: string;
  kind: string;
  registers: Record<string, string> | null;
  task: { pid: number; tgid: number; comm: Buffer } | null;
  call: { id: string; durationNs: string; value: string } | null;
  captured: Buffer;
}

/** Fields of `BootRequest`, without the kernel. */
export interface Boot {
  name?: string;
  initrd?: string;
  cmdline?: string;
  cpus?: number;
  memory?: number | string;
  command?: string[];
}

/** The server would not, or could not, do what it was asked for. */
export class Refused extends Error {
  /** gRPC's name of the status: `NOT_FOUND`. */
  code: string;
}

/** Events of a machine, in the order they come; they end with the machine, or by `close`. */
export class Events implements AsyncIterable<Event> {
  [Symbol.asyncIterator](): AsyncIterator<Event>;
  /** Probes that events are of, by their ids. */
  readonly probes: ReadonlyMap<number, Probe>;
  /** How many events this client was too slow for. */
  readonly dropped: number;
  /** How the machine ended, when it has. */
  readonly ended?: Ending;
  close(): void;
}

/** A connection to a server. Any promise may be rejected with `Refused`. */
export class Client {
  /** `unix:/run/hvprobe.sock`, or `127.0.0.1:PORT` with the server's token. */
  constructor(target: string, options?: { token?: string; seconds?: number });
  /** All machines, ended ones too. */
  machines(): Promise<Machine[]>;
  /** Boots a guest. Its kernel is up some seconds later. */
  boot(kernel: string, more?: Boot): Promise<Machine>;
  /** Takes the probes out of a guest and ends it. */
  stop(machine: string): Promise<Machine>;
  /** Plants probes (`p vfs_read`, `r:name vfs_write`), all or none, and tells their ids. */
  plant(machine: string, ...definitions: string[]): Promise<number[]>;
  /** Takes probes out. */
  remove(machine: string, ...ids: number[]): Promise<void>;
  /** Events of these probes, or of all, from now on. */
  events(machine: string, ...ids: number[]): Promise<Events>;
  close(): void;
}
