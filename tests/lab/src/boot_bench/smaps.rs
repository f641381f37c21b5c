//! Memory of a VMM beyond its guest's RAM, from `/proc/PID/smaps`.

use std::fs;

use anyhow::{Context, Result};

/// Returns the resident KiB of process `pid`, without the mappings that are large enough to be the guest's RAM of
/// `ram` MiB.
pub(crate) fn resident_beyond(pid: u32, ram: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(sum(&text, u64::from(ram) * 1024))
}

/// Sums the `Rss` of all mappings with a `Size` below `ram` KiB.
fn sum(smaps: &str, ram: u64) -> u64 {
    let mut total = 0;
    let mut size = 0;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (field, value) = (words.next(), words.next());
        let Some(kib) = value.and_then(|value| value.parse::<u64>().ok()) else {
            continue;
        };
        match field {
            Some("Size:") => size = kib,
            Some("Rss:") if size < ram => total += kib,
            _ => {}
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_ram_is_left_out_of_the_sum() {
        let smaps = "\
55d0-55d1 r-xp 00000000 fd:00 12 /bin/vmm
Size:                100 kB
Rss:                  40 kB
Pss:                  40 kB
7f00-8f00 rw-p 00000000 00:00 0
Size:             262144 kB
Rss:               90000 kB
7ffd-7ffe rw-p 00000000 00:00 0 [stack]
Size:                132 kB
Rss:                  12 kB
";
        assert_eq!(sum(smaps, 262_144), 52);
    }
}
