//! One boot of the guest, measured.

use std::fmt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hvprobe_lab::measure::running::Running;
use hvprobe_lab::measure::stream::Lines;

use crate::smaps;
use crate::trace::FirstEntry;
use crate::vmm::{Guest, Vmm};

/// Text that the guest's `/init` prints first.
const MARKER: &str = "hvprobe-guest: init";
/// Name in hvprobe's `--timings` for the moment at which it first enters the guest.
const FIRST_INSTRUCTION: &str = "first instruction of the guest";
/// Time limit for one boot, on the slowest rig.
const PATIENCE: Duration = Duration::from_secs(300);
/// Time limit for a program that was asked to end.
const GRACE: Duration = Duration::from_secs(30);

/// Results of one boot. Times are counted from the start of the VMM's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Boot {
    /// Time until the first entry into the guest, if that could be observed.
    pub(crate) first_instruction: Option<Duration>,
    /// Time until `/init` printed its first line.
    pub(crate) init: Duration,
    /// Resident KiB beyond the guest's RAM, when `/init` printed that line.
    pub(crate) overhead: u64,
}

impl Boot {
    pub(crate) fn measure(vmm: Vmm, guest: &Guest, tracer: Option<&FirstEntry>) -> Result<Self> {
        if let Some(tracer) = tracer {
            tracer.arm()?;
        }
        let started = monotonic()?;
        let clock = Instant::now();
        let child = vmm
            .command(guest)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {vmm}"))?;
        let mut running = Running(child);
        let output = Lines::of(running.0.stdout.take().context("no stdout")?);
        let words = Lines::of(running.0.stderr.take().context("no stderr")?);

        if output.wait_for(MARKER, PATIENCE).is_none() {
            let last = words.last().unwrap_or_default();
            bail!("{vmm} did not come to /init; its last word: {last:?}");
        }
        let init = clock.elapsed();
        let overhead = smaps::resident_beyond(running.0.id(), guest.memory)?;

        let first_instruction = match vmm {
            // hvprobe's self-check enters other guests first, which the trace would show. So hvprobe has to report
            // the time itself.
            Vmm::Hvprobe | Vmm::HvprobeBzImage => {
                interrupt(&running)?;
                words
                    .wait_for(FIRST_INSTRUCTION, GRACE)
                    .as_deref()
                    .and_then(milliseconds)
            }
            Vmm::Microvm | Vmm::Q35 => match tracer {
                Some(tracer) => tracer.seen()?.and_then(|seen| seen.checked_sub(started)),
                None => None,
            },
        };
        Ok(Self {
            first_instruction,
            init,
            overhead,
        })
    }
}

impl fmt::Display for Boot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(time) = self.first_instruction {
            write!(f, "entered after {:.1} ms, ", time.as_secs_f64() * 1e3)?;
        }
        write!(
            f,
            "/init after {:.2} s, {} KiB beyond RAM",
            self.init.as_secs_f64(),
            self.overhead
        )
    }
}

fn interrupt(running: &Running) -> Result<()> {
    let pid = i32::try_from(running.0.id())?;
    // SAFETY: the child is not reaped yet, so its number is not that of another process. kill touches no memory.
    unsafe { libc::kill(pid, libc::SIGINT) };
    Ok(())
}

/// Parses the time in hvprobe's `  12.345 ms  first instruction of the guest`.
fn milliseconds(line: &str) -> Option<Duration> {
    let (before, _) = line.split_once(" ms ")?;
    let number: f64 = before.split_whitespace().next_back()?.parse().ok()?;
    Duration::try_from_secs_f64(number / 1e3).ok()
}

/// Reads `CLOCK_MONOTONIC`, the clock of the timestamps in traces.
fn monotonic() -> Result<Duration> {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a timespec of ours.
    if unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) } != 0 {
        bail!("cannot read the clock");
    }
    Ok(Duration::new(
        u64::try_from(now.tv_sec)?,
        u32::try_from(now.tv_nsec)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hvprobes_timing_line_is_read() {
        let line = "hvprobe:     12.500 ms  first instruction of the guest";
        assert_eq!(milliseconds(line), Some(Duration::from_micros(12_500)));
        assert_eq!(milliseconds("first instruction of the guest"), None);
    }
}
