//! Limits of a server: resources of its host, and of its clients.

use std::thread::available_parallelism;

use hvprobe_machine::Bounds;

/// Default number of vCPUs per processor of the host.
const CPUS_PER_PROCESSOR: u32 = 64;

/// Limits for the whole server. The limits for one request or one client are constants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of machines that are booting or live.
    pub machines: usize,
    /// Maximum guest memory of all machines together, in bytes.
    pub memory: u64,
    /// Maximum number of vCPUs of all machines together.
    pub cpus: u32,
    /// Maximum number of ended machines that the server keeps.
    pub ended_machines: usize,
    /// Maximum number of bytes that ended machines keep: lists of probes, consoles, reports and last events. The
    /// machine that ended last is kept even if it exceeds this.
    pub ended_bytes: usize,
    /// Maximum number of connections on the unix socket.
    pub connections: usize,
    /// Maximum number of connections on the TCP port.
    pub tcp_connections: usize,
    /// Maximum number of calls under way per connection.
    pub calls_per_connection: u32,
    /// Maximum number of calls under way whose answer is a stream.
    pub streams: usize,
    /// Maximum number of subscriptions to events.
    pub subscribers: usize,
    /// Maximum number of bytes of the events that wait for subscribers, for all subscribers together.
    pub event_bytes: usize,
    /// Maximum number of large requests that are received and carried out at a time. A request is large if it has
    /// more than 128 KiB, or more than 1 MiB once decoded. Each connection can have one at a time.
    pub large_requests: usize,
    /// Maximum number of unary calls under way whose answers can be longer than 128 KiB. A call counts until its
    /// client has read the answer. Each connection can have one more, which does not count.
    pub large_answers: usize,
    /// Maximum number of sessions, including kept and ending ones.
    pub sessions: usize,
    /// Limits per machine.
    pub each: Bounds,
}

impl Limits {
    /// Returns the default limits for this host: all memory of the host for guests, and 64 vCPUs for each of its
    /// processors.
    #[must_use]
    pub fn of_host() -> Self {
        let host = rustix::system::sysinfo();
        let processors = available_parallelism().map_or(1, |number| {
            // Hosts have far fewer processors than the maximum of this type.
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
            large_requests: 16,
            large_answers: 64,
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

/// Converts `total` units of memory, of `unit` bytes each, to bytes.
fn memory(total: impl Into<u64>, unit: u32) -> u64 {
    total.into().saturating_mul(unit.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_the_host_has() {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"));
        let kibibytes = total.unwrap().split_whitespace().next().unwrap();
        let bytes = kibibytes.parse::<u64>().unwrap() << 10;
        assert_eq!(Limits::of_host().memory, bytes);
    }
}
