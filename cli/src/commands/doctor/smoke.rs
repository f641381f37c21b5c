//! The smoke run: boots a guest with a kernel of the host, plants probes of each mechanism in it, and measures
//! the cost of a hit.
//!
//! All probes are on a function that only the guest's program calls. So each probe must have counted exactly
//! the program's calls, and after its removal the function must have its original bytes.

use std::path::Path;
use std::time::{Duration, Instant};

use hvprobe_proto::v1::{
    BootRequest, ConsoleOutput, ConsoleWriteRequest, Mechanism, PauseRequest, Probe, ProbeSpec,
    ReadKernelRequest, RegisterRequest, ResumeRequest, StopRequest, UnregisterRequest,
};
use tokio::time::timeout;

use super::init::{self, CALLS};
use crate::client::Client;
use crate::definitions::kernels;
use crate::failure::{Refused, answered};
use crate::output::words::Word as _;
use crate::output::{harmless, table};

/// Function that the guest's program calls.
const FUNCTION: &str = "__x64_sys_getpgid";
/// Number of the function's bytes that are compared.
const TEXT: u32 = 64;
/// Greatest offset in the function at which a probe is tried. Some mechanisms need a suitable instruction.
const REACH: u64 = 48;
/// Number of batches per measurement. The duration of the fastest one is used.
const BATCHES: u32 = 3;
const MEMORY: u64 = 512 << 20;
/// Timeout of a boot, generous even for an emulated machine.
const BOOT: Duration = Duration::from_secs(300);
/// Timeout of a batch, as generous as that of a boot.
const BATCH: Duration = Duration::from_secs(120);
/// Number of lines from the end of the console that are reported for a guest that failed.
const LINES: usize = 6;

/// Outcome of the run.
#[derive(Debug)]
pub(super) enum Smoke {
    /// The run was not attempted, for this reason.
    NotTried(String),
    /// The run was attempted with this kernel. It may have ended early.
    Tried {
        kernel: String,
        /// Time from the request to the first process.
        up: Option<Duration>,
        /// Duration of a call without a probe, in nanoseconds.
        call_ns: Option<f64>,
        rows: Vec<Row>,
        /// Reason why the run ended early, with the last lines of the guest.
        failure: Option<(String, Vec<String>)>,
    },
}

/// Result of one probe.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) what: &'static str,
    /// Probepoint; empty if no place accepted the probe.
    pub(super) place: String,
    pub(super) outcome: Result<Cost, String>,
}

/// Cost that a hit adds to a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost {
    pub(super) hits: u64,
    pub(super) ns: f64,
    /// Returns of `KVM_RUN` per hit.
    pub(super) exits: f64,
}

/// Probes to try, the cheapest first.
const WAYS: [(&str, char, Mechanism); 6] = [
    ("kprobe, optimized", 'p', Mechanism::Optimized),
    ("kprobe, emulated", 'p', Mechanism::Emulated),
    ("kprobe, boosted", 'p', Mechanism::Boosted),
    ("kprobe, stepped", 'p', Mechanism::Stepped),
    ("return probe, optimized", 'r', Mechanism::Optimized),
    ("return probe, exit at the entry", 'r', Mechanism::Emulated),
];

/// Boots `kernel` and tries all probes in it.
pub(super) async fn run(client: &mut Client, kernel: &Path) -> Smoke {
    let mut tried = Tried {
        up: None,
        call_ns: None,
        rows: Vec::new(),
    };
    let mut printed = Vec::new();
    let outcome = tried.go(client.clone(), kernel, &mut printed).await;
    Smoke::Tried {
        kernel: kernels::shown(kernel).into_owned(),
        up: tried.up,
        call_ns: tried.call_ns,
        rows: tried.rows,
        failure: outcome
            .err()
            .map(|error| (format!("{error:#}"), last_lines(&printed))),
    }
}

/// Returns the last lines of the guest's output, without its command line.
fn last_lines(printed: &[u8]) -> Vec<String> {
    let lines: Vec<String> = printed
        .split(|&byte| byte == b'\n')
        .map(|line| harmless(line.trim_ascii()))
        .filter(|line| !line.is_empty() && !line.to_ascii_lowercase().contains("command line"))
        .collect();
    lines[lines.len().saturating_sub(LINES)..].to_vec()
}

struct Tried {
    up: Option<Duration>,
    call_ns: Option<f64>,
    rows: Vec<Row>,
}

impl Tried {
    async fn go(
        &mut self,
        client: Client,
        kernel: &Path,
        printed: &mut Vec<u8>,
    ) -> anyhow::Result<()> {
        let since = Instant::now();
        let mut guest = Guest::boot(client, kernel, printed).await?;
        let outcome = self.try_all(&mut guest, since).await;
        let stopped = guest.stop().await;
        outcome.and(stopped)
    }

    async fn try_all(&mut self, guest: &mut Guest<'_>, since: Instant) -> anyhow::Result<()> {
        // The program runs its first batch without a request.
        guest.read_batch(1, BOOT).await?;
        self.up = Some(since.elapsed());
        let plain = guest.measure().await?;
        self.call_ns = Some(plain.ns / f64::from(CALLS));
        let (at, original) = match guest.text_of(FUNCTION).await {
            Ok(found) => found,
            Err(error) => anyhow::bail!("{FUNCTION} cannot be probed: {error:#}"),
        };
        for (what, kind, mechanism) in WAYS {
            let (place, outcome) = guest.try_one(kind, mechanism, &plain).await?;
            let mut outcome = outcome;
            if guest.read(at).await? != original {
                outcome = Err("the function is not as it was once the probe has left".to_owned());
            }
            self.rows.push(Row {
                what,
                place,
                outcome,
            });
        }
        Ok(())
    }
}

/// Measurement of several batches.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// Nanoseconds of the fastest batch.
    ns: f64,
    /// Number of `KVM_RUN` calls in all batches.
    runs: u64,
}

/// The guest with the program.
struct Guest<'a> {
    client: Client,
    machine: String,
    console: tonic::Streaming<ConsoleOutput>,
    printed: &'a mut Vec<u8>,
}

impl<'a> Guest<'a> {
    async fn boot(
        mut client: Client,
        kernel: &Path,
        printed: &'a mut Vec<u8>,
    ) -> anyhow::Result<Self> {
        // The file is deleted on return. The guest has read it when it has started.
        let initrd = tempfile::NamedTempFile::new()?;
        std::fs::write(initrd.path(), init::archive()?)?;
        let request = BootRequest {
            kernel: kernel.display().to_string(),
            initrd: initrd.path().display().to_string(),
            memory: MEMORY,
            ..BootRequest::default()
        };
        let machine = answered(client.machines.boot(request).await)?.name;
        Ok(Self {
            console: client.console(machine.clone(), false).await?,
            client,
            machine,
            printed,
        })
    }

    /// Waits for the end of batch `number`, counted from 1, and returns its duration in nanoseconds.
    async fn read_batch(&mut self, number: usize, limit: Duration) -> anyhow::Result<u64> {
        let wait = async {
            loop {
                if let Some(&ns) = init::batches(self.printed).get(number - 1) {
                    return Ok(ns);
                }
                match self.console.message().await.map_err(Refused::from)? {
                    Some(piece) => self.printed.extend(piece.data),
                    None => return Err(anyhow::anyhow!("the guest ended")),
                }
            }
        };
        match timeout(limit, wait).await {
            Ok(Err(_)) => anyhow::bail!("the guest ended: {}", self.ending().await?),
            Ok(result) => result,
            Err(_) => anyhow::bail!("nothing came from the guest for {} s", limit.as_secs()),
        }
    }

    async fn ending(&mut self) -> anyhow::Result<String> {
        let machine = self.client.get_machine(self.machine.clone()).await?;
        Ok(machine
            .ending
            .as_ref()
            .map_or_else(|| "nobody knows how".to_owned(), table::ending_text))
    }

    /// Requests [`BATCHES`] batches, one after another.
    async fn measure(&mut self) -> anyhow::Result<Measured> {
        let before = self.runs().await?;
        let mut fastest = u64::MAX;
        for _ in 0..BATCHES {
            let number = init::batches(self.printed).len() + 1;
            let request = ConsoleWriteRequest {
                machine: self.machine.clone(),
                data: b"\n".to_vec(),
            };
            // The serial port always has room for one byte.
            answered(self.client.machines.console_write(request).await)?;
            fastest = fastest.min(self.read_batch(number, BATCH).await?);
        }
        Ok(Measured {
            ns: as_f64(fastest),
            runs: self.runs().await? - before,
        })
    }

    /// Returns the number of `KVM_RUN` calls, which a pause reports.
    async fn runs(&mut self) -> anyhow::Result<u64> {
        let request = PauseRequest {
            machine: self.machine.clone(),
            ..Default::default()
        };
        let runs = answered(self.client.machines.pause(request).await)?.runs;
        let machine = self.machine.clone();
        answered(self.client.machines.resume(ResumeRequest { machine }).await)?;
        Ok(runs)
    }

    /// Returns the address of `function` and its first bytes.
    async fn text_of(&mut self, function: &str) -> anyhow::Result<(u64, Vec<u8>)> {
        let spec = ProbeSpec {
            definition: format!("p {function}"),
            disabled: true,
            ..ProbeSpec::default()
        };
        let probe = self.register(spec).await.map_err(anyhow::Error::msg)?;
        self.unregister(probe.id).await?;
        let Some(at) = probe.address else {
            anyhow::bail!("it has no address");
        };
        Ok((at, self.read(at).await?))
    }

    async fn read(&mut self, address: u64) -> anyhow::Result<Vec<u8>> {
        let request = ReadKernelRequest {
            machine: self.machine.clone(),
            address,
            length: TEXT,
        };
        Ok(answered(self.client.machines.read_kernel(request).await)?.data)
    }

    /// Registers a probe; on failure returns the reason.
    async fn register(&mut self, spec: ProbeSpec) -> Result<Probe, String> {
        let request = RegisterRequest {
            machine: self.machine.clone(),
            probes: vec![spec],
            ..Default::default()
        };
        let answer = self.client.probes.register(request).await;
        let ids = answer
            .map_err(|status| status.message().to_owned())?
            .into_inner()
            .ids;
        let probes = self.client.list_probes(&self.machine).await;
        probes
            .map_err(|error| format!("{error:#}"))?
            .into_iter()
            .find(|probe| ids.contains(&probe.id))
            .ok_or_else(|| "it is not in the list".to_owned())
    }

    async fn unregister(&mut self, id: u32) -> anyhow::Result<()> {
        let request = UnregisterRequest {
            machine: self.machine.clone(),
            ids: vec![id],
        };
        answered(self.client.probes.unregister(request).await)?;
        Ok(())
    }

    /// Measures a probe of this kind and mechanism at the first place that accepts it. `plain` is the measurement
    /// without a probe. Returns the place, which is empty if no place accepts the probe, and the cost or the reason
    /// why there is none.
    async fn try_one(
        &mut self,
        kind: char,
        mechanism: Mechanism,
        plain: &Measured,
    ) -> anyhow::Result<(String, Result<Cost, String>)> {
        let last = if kind == 'r' { 0 } else { REACH };
        let mut first_reason = None;
        for offset in 0..=last {
            let place = table::at(FUNCTION, offset);
            let spec = ProbeSpec {
                definition: format!("{kind} {place}"),
                mechanism: mechanism.into(),
                ..ProbeSpec::default()
            };
            let reason = match self.register(spec).await {
                Ok(probe) if probe.mechanism() == mechanism => {
                    let outcome = self.measure_probe(probe.id, plain).await?;
                    return Ok((place, outcome));
                }
                Ok(probe) => {
                    self.unregister(probe.id).await?;
                    let name = probe.mechanism().or_unknown();
                    let why = probe.unoptimized;
                    format!(
                        "it is {name} there{}{why}",
                        if why.is_empty() { "" } else { ": " }
                    )
                }
                Err(reason) => reason,
            };
            first_reason.get_or_insert(reason);
        }
        Ok((String::new(), Err(first_reason.unwrap_or_default())))
    }

    /// Measures the probe `id` and unregisters it.
    async fn measure_probe(
        &mut self,
        id: u32,
        plain: &Measured,
    ) -> anyhow::Result<Result<Cost, String>> {
        let probed = self.measure().await?;
        let probes = self.client.list_probes(&self.machine).await?;
        let probe = probes.into_iter().find(|probe| probe.id == id);
        self.unregister(id).await?;
        let Some(probe) = probe else {
            return Ok(Err("it is gone".to_owned()));
        };
        let calls = u64::from(CALLS * BATCHES);
        if (probe.hits, probe.missed) != (calls, 0) {
            let Probe { hits, missed, .. } = probe;
            return Ok(Err(format!(
                "{hits} hits and {missed} missed of {calls} calls"
            )));
        }
        Ok(Ok(Cost {
            hits: calls,
            ns: (probed.ns - plain.ns).max(0.0) / f64::from(CALLS),
            exits: as_f64(probed.runs.saturating_sub(plain.runs)) / as_f64(calls),
        }))
    }

    async fn stop(mut self) -> anyhow::Result<()> {
        let machine = self.machine.clone();
        answered(self.client.machines.stop(StopRequest { machine }).await)?;
        Ok(())
    }
}

/// Converts exactly: the counts and times here are far below 2^53.
#[expect(clippy::cast_precision_loss, reason = "see above")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lines_of_a_guest_are_shown_without_its_command_line() {
        let printed = b"[    0.0] Command line: console=ttyS0 secret=1\r\n\r\none\r\ntwo\x1b[0m";
        assert_eq!(last_lines(printed), ["one", "two?[0m"]);
        let many = b"x\n".repeat(100);
        assert_eq!(last_lines(&many).len(), LINES);
    }
}
