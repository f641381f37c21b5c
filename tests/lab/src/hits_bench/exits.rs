//! Counters of KVM and of the rig's kernel, read before and after a loop in the guest.

use std::fs;

use anyhow::{Context, Result};
use hvprobe_lab::measure::tracefs;

const DEBUGFS: &str = "/sys/kernel/debug";
const TRIGGER: &str = "events/syscalls/sys_enter_ioctl/trigger";
const COUNT_BY_REQUEST: &str = "hist:keys=cmd";
/// Second byte of KVM's ioctl requests: their type, `KVMIO`.
const KVM: u64 = 0xae;
const KVM_RUN: u64 = 0xae80;

/// Counts of exits and ioctls: totals at one time, or the differences between two times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Exits of all virtual CPUs, including those that the kernel handled itself.
    pub(crate) exits: u64,
    pub(crate) runs: u64,
    /// KVM's ioctls other than `KVM_RUN`.
    pub(crate) other_ioctls: u64,
}

impl Counts {
    /// Returns the differences from `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            exits: self.exits.saturating_sub(before.exits),
            runs: self.runs.saturating_sub(before.runs),
            other_ioctls: self.other_ioctls.saturating_sub(before.other_ioctls),
        }
    }
}

/// Counts ioctls while it exists, which slows down the programs that make them.
#[derive(Debug)]
pub(crate) struct Counter(());

impl Counter {
    pub(crate) fn start() -> Result<Self> {
        tracefs::mount()?;
        tracefs::mount_kind("debugfs", DEBUGFS, "kvm")?;
        tracefs::set(TRIGGER, COUNT_BY_REQUEST)?;
        Ok(Self(()))
    }

    pub(crate) fn read(&self) -> Result<Counts> {
        let mut counts = ioctls(&tracefs::get("events/syscalls/sys_enter_ioctl/hist")?);
        let path = format!("{DEBUGFS}/kvm/exits");
        let exits = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        counts.exits = exits.trim().parse()?;
        Ok(counts)
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // The machine is a rig; nothing else depends on its tracing.
        let _ = tracefs::set(TRIGGER, &format!("!{COUNT_BY_REQUEST}"));
    }
}

/// Sums lines such as `{ cmd: 44672 } hitcount: 12`. The request is decimal, or hexadecimal with the prefix `0x`.
fn ioctls(histogram: &str) -> Counts {
    let mut counts = Counts::default();
    for line in histogram.lines() {
        let Some((request, count)) = entry(line) else {
            continue;
        };
        if request == KVM_RUN {
            counts.runs += count;
        } else if (request >> 8) & 0xff == KVM {
            counts.other_ioctls += count;
        }
    }
    counts
}

fn entry(line: &str) -> Option<(u64, u64)> {
    let (key, rest) = line.trim().strip_prefix("{ cmd:")?.split_once('}')?;
    let key = key.trim();
    let request = match key.strip_prefix("0x") {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok()?,
        None => key.parse().ok()?,
    };
    let count = rest.trim().strip_prefix("hitcount:")?;
    Some((request, count.split_whitespace().next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_kvm_are_summed_and_others_are_not() {
        // KVM_RUN, KVM_SET_REGS, TCGETS.
        let histogram = "\
# event histogram
#
{ cmd:      44672 } hitcount:        100
{ cmd: 1083223682 } hitcount:          3
{ cmd:      21505 } hitcount:          9

Totals:
    Hits: 112
";
        let expected = Counts {
            exits: 0,
            runs: 100,
            other_ioctls: 3,
        };
        assert_eq!(ioctls(histogram), expected);
        assert_eq!(entry("{ cmd: 0xae80 } hitcount: 7"), Some((KVM_RUN, 7)));
    }
}
