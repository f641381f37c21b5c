//! What a server may take in all, of its host and for its clients.

use std::thread::available_parallelism;

use hvprobe_machine::Bounds;

/// Virtual CPUs for each processor of the host.
const CPUS_PER_PROCESSOR: u32 = 64;

/// What a server may take in all. What one request or one client may is fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Machines that boot or live.
    pub machines: usize,
    /// Bytes of guest memory of all of them together.
    pub memory: u64,
    /// Virtual CPUs of all of them together.
    pub cpus: u32,
    /// Ended machines that are remembered.
    pub ended_machines: usize,
    /// Bytes of what they keep: their lists of probes, consoles, reports and last events. The one that ended
    /// last is kept, however much it has.
    pub ended_bytes: usize,
    /// Connections on the unix socket.
    pub connections: usize,
    /// Connections on the TCP port.
    pub tcp_connections: usize,
    /// Calls that one connection may have under way.
    pub calls_per_connection: u32,
    /// Streams to clients, of all calls that answer with more than one message.
    pub streams: usize,
    /// Clients that subscribe to events.
    pub subscribers: usize,
    /// Bytes of events that wait for all of them together.
    pub event_bytes: usize,
    /// Sessions of clients, those that are kept or ending counted.
    pub sessions: usize,
    /// What each machine may have.
    pub each: Bounds,
}

impl Limits {
    /// What is allowed on this host unless something else is said: as much guest memory as the host has,
    /// and 64 virtual CPUs for each of its processors.
    #[must_use]
    pub fn of_host() -> Self {
        let host = rustix::system::sysinfo();
        let processors = available_parallelism().map_or(1, |number| {
            // There are far fewer than this can count.
            u32::try_from(number.get()).unwrap_or(u32::MAX)
        });
        Self {
            machines: 64,
            memory: memory(host.totalram, host.mem_unit),
            cpus: processors.saturating_mul(CPUS_PER_PROCESSOR),
            ended_machines: 64,
            ended_bytes: 64 << 20,
            connections: 512,
            tcp_connections: 256,
            calls_per_connection: 256,
            streams: 4096,
            subscribers: 1024,
            event_bytes: 1 << 30,
            sessions: 1024,
            each: Bounds::default(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::of_host()
    }
}

/// So many units in bytes.
fn memory(total: impl Into<u64>, unit: u32) -> u64 {
    total.into().saturating_mul(unit.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_the_host_has() {
        let told = std::fs::read_to_string("/proc/meminfo").unwrap();
        let total = told.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kibibytes = total.unwrap().split_whitespace().next().unwrap();
        let bytes = kibibytes.parse::<u64>().unwrap() << 10;
        assert_eq!(Limits::of_host().memory, bytes);
    }
}
