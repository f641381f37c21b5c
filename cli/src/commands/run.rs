//! `hvprobe run`: boots a guest, plants probes, streams their events and ends the guest, all in one process.
//!
//! Every run ends in the same order, whether the guest, enough hits, Ctrl-C, a closed pipe or an error ends it: the
//! probes are disabled, their counters are read, the results are printed (except after an error or a closed pipe),
//! and the guest is ended.

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use hvprobe_proto::v1::{
    BootRequest, DisableRequest, EndReason, Ending, Machine, MachineState, Probe, ProbeState,
    SubscribeResponse, WatchRequest,
};
use tokio::task::JoinHandle;
use tonic::Streaming;

use super::{doctor, trace};
use crate::client::clock::now;
use crate::client::{Client, InProcess};
use crate::definitions::events_file::FileHistogram;
use crate::definitions::{guest, kernels};
use crate::failure::{DONE, FAILED, INTERRUPTED, Origins, Refused, answered, as_sent};
use crate::follow::console::{Console, Step, Tail};
use crate::follow::histograms::{self, Histograms};
use crate::follow::optional_future::or_never;
use crate::follow::printer::{Batch, Format, Printer};
use crate::options::command_line::Run;
use crate::options::events::WantedArgs;
use crate::options::histograms::HistogramArgs;
use crate::options::probes::hits::HoldArgs;
use crate::output::{self, size, skipped, table, waiting};
use crate::script::{Running, Script};
use crate::terminal::progress::Progress;
use crate::terminal::signals::Interrupt;

/// Maximum wait for the remaining console output of a guest that has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Number of lines from the end of the console that are shown if the guest did not end well.
const TAIL_LINES: usize = 20;
/// Text before the reason for a panic (Linux, kernel/panic.c).
const PANIC: &str = "Kernel panic - not syncing: ";

pub(crate) async fn run(mut args: Run, started: Instant) -> anyhow::Result<ExitCode> {
    InProcess::check()?;
    let script = Script::read(&args.script)?;
    args.histograms.check()?;
    let (are_counted, by_stack) = (args.histograms.is_given(), args.histograms.need_stacks());
    args.guest.hit.acts.count(are_counted, by_stack);
    let format = match (args.json, args.console) {
        (true, _) => Format::Json,
        (false, true) => Format::Aside,
        (false, false) => Format::Text,
    };
    // Opening a named pipe waits for its reader; Ctrl-C still has its default effect here and ends that wait.
    let printer = Printer::new(format, args.hits, &args.output)?;
    let interrupt = Interrupt::install()?;
    let with_command = !args.guest.command.is_empty();
    let hold = HoldArgs::default();
    let of_script = script.as_ref().map(|it| it.specs(&args.guest.hit, &hold));
    let guest = guest::request(None, Vec::new(), args.guest, &hold)?;
    let (mut request, in_files) = (guest.request, guest.histograms);
    if let Some(specs) = of_script {
        request.probes = specs?;
        request.skip_refused |= script.as_ref().is_some_and(Script::has_patterns);
    }
    args.histograms.check_shown(!in_files.is_empty())?;
    let options = Options {
        format,
        with_command,
        histograms: args.histograms,
        in_files,
        origins: guest.origins,
        script,
    };
    let mut timings = Timings::new(started);
    let (server, mut client) = InProcess::start().await?;
    client.lines = guest.lines.map(Arc::new);
    let outcome = boot_and_follow(client, request, options, printer, interrupt, &mut timings).await;
    let stopped = server.stop().await;
    if args.timings {
        timings.print();
    }
    let status = outcome?;
    stopped?;
    Ok(status)
}

#[derive(Clone, Debug)]
struct Options {
    format: Format,
    /// Whether the guest runs a command, whose exit status is expected.
    with_command: bool,
    /// Histograms that replace the printed events.
    histograms: HistogramArgs,
    /// Histograms from files of definitions.
    in_files: Vec<FileHistogram>,
    /// What the user typed for the probes.
    origins: Origins,
    /// Script that replaces the printed hits.
    script: Option<Script>,
}

/// Reason for the end of a run.
#[derive(Debug)]
enum Over {
    /// The requested number of hits was printed, or the script called `exit()`.
    Enough,
    /// The guest ended.
    Ended(Ending),
    /// Ctrl-C, or Ctrl-] on the console.
    Interrupted,
}

async fn boot_and_follow(
    mut client: Client,
    request: BootRequest,
    options: Options,
    mut printer: Printer,
    mut interrupt: Interrupt,
    timings: &mut Timings,
) -> anyhow::Result<ExitCode> {
    let plain = options.format == Format::Aside;
    let progress = Progress::begin(what_boots(&request), plain);
    let definitions = as_sent(&request.probes, &options.origins);
    let booted = tokio::select! {
        booted = client.machines.boot(request) => booted.map_err(|status| match &options.script {
            Some(script) => script.refused(status),
            None => Refused::of_probes(status, &definitions).into(),
        })?.into_inner(),
        () = interrupt.asked() => return Ok(ExitCode::from(INTERRUPTED)),
    };
    timings.mark("machine booted");
    if let Some(skipped) = skipped::text(&booted.skipped) {
        progress.print(&skipped);
    }
    tokio::select! {
        doubt = doctor::doubt(&mut client, &booted) => {
            // Such a guest would never reach user space.
            if let Some(doubt) = doubt {
                anyhow::bail!(
                    "{doubt}, and `cargo lab run -- hvprobe run ...` boots one in an emulated machine"
                );
            }
        }
        // Checked again below, where the machine is ended in order.
        () = interrupt.asked() => {}
    }
    let script = match options.script.clone() {
        Some(script) => {
            let positions = script.positions(&booted.probe_ids, &booted.probe_entries)?;
            Some((script, positions))
        }
        None => None,
    };
    let machine = booted.name;

    let session = Session::open(client, &machine, &options, script, &mut printer, progress);
    let mut session = session.await?;
    let over = session.follow(&mut printer, &mut interrupt, timings).await;
    session.progress = None;
    if let Ok(Over::Ended(_)) = over {
        session.print_last_words().await;
    }
    timings.mark("run over");
    if let Some(ns) = session.first_entry_ns().await {
        timings.mark_at("first instruction of the guest", ns);
    }

    let probes = session.finish(&over).await;
    let counted = match (&probes, &over) {
        (Ok(_), Ok(_)) => session.print_counted().await,
        _ => Ok(()),
    };
    drop(session.console);
    let probes = match probes {
        Ok(probes) => probes,
        Err(error) => return Err(over.err().unwrap_or(error)),
    };
    let over = over?;
    counted?;
    if options.script.is_none() {
        trace::close(&mut printer, &probes)?;
    }
    match over {
        Over::Enough => Ok(DONE),
        Over::Interrupted => Ok(ExitCode::from(INTERRUPTED)),
        Over::Ended(ending) => Ok(verdict(&ending, session.tail, &options).await),
    }
}

/// Machine that the run follows.
#[derive(Debug)]
struct Session {
    client: Client,
    machine: String,
    /// Events; `None` if all probes are only counted.
    events: Option<Streaming<SubscribeResponse>>,
    histograms: Option<Histograms>,
    script: Option<Running>,
    states: Streaming<Machine>,
    console: Option<Console>,
    /// Task that collects the end of the console output, while nothing displays the console.
    tail: Option<JoinHandle<Tail>>,
    /// Progress of the boot, until the guest is up.
    progress: Option<Progress>,
    /// Whether the message that the guest runs another kernel has been printed.
    replaced: bool,
}

impl Session {
    /// Begins to follow `machine`. If there is a `script`, its output replaces the printed hits; the map contains
    /// the positions of its probes in the script, by probe id.
    async fn open(
        mut client: Client,
        machine: &str,
        options: &Options,
        script: Option<(Script, HashMap<u32, usize>)>,
        printer: &mut Printer,
        progress: Progress,
    ) -> anyhow::Result<Self> {
        let with_console = options.format == Format::Aside;
        let probes = client.list_probes(machine).await?;
        let (args, in_files, format) = (&options.histograms, &options.in_files, options.format);
        let script = match script {
            Some((script, positions)) => {
                Some(Running::begin(&mut client, machine, &probes, script, positions).await?)
            }
            None => None,
        };
        let printed = match &script {
            Some(script) => Some(script.wanted()).filter(|wanted| !wanted.is_empty()),
            None => histograms::printed(&probes, args, in_files),
        };
        let histograms =
            Histograms::begin(&mut client, machine, &probes, args, in_files, format).await?;
        let events = match printed {
            Some(ids) => {
                let request = WantedArgs::default().request(machine, ids);
                Some(answered(client.events.subscribe(request).await)?)
            }
            None => None,
        };
        let request = WatchRequest {
            machine: machine.to_owned(),
        };
        if events.is_some() {
            printer.prepare(&mut client, machine, &probes).await;
        }
        let states = answered(client.machines.watch(request).await)?;
        let (console, tail) = if with_console {
            (Some(Console::connect(client.clone(), machine).await?), None)
        } else {
            let keep = Tail::keep(client.clone(), machine.to_owned());
            (None, Some(tokio::spawn(keep)))
        };
        Ok(Self {
            client,
            machine: machine.to_owned(),
            events,
            histograms,
            script,
            states,
            console,
            tail,
            progress: Some(progress),
            replaced: false,
        })
    }

    async fn follow(
        &mut self,
        printer: &mut Printer,
        interrupt: &mut Interrupt,
        timings: &mut Timings,
    ) -> anyhow::Result<Over> {
        loop {
            if self.script.as_ref().is_some_and(Running::is_over) {
                return Ok(Over::Enough);
            }
            tokio::select! {
                () = interrupt.asked() => return Ok(Over::Interrupted),
                batch = or_never(self.events.as_mut().map(Streaming::message)) => {
                    let batch = batch.map_err(Refused::from)?;
                    let batch = batch.ok_or_else(|| anyhow!("the server went away"))?;
                    if !batch.events.is_empty() {
                        self.is_up(timings).await?;
                        timings.mark("first hit");
                    }
                    let shown = match &mut self.script {
                        Some(script) => script.show(&mut self.client, batch).await?,
                        None => printer.show(&mut self.client, batch).await?,
                    };
                    match shown {
                        Batch::More => {}
                        Batch::Enough => return Ok(Over::Enough),
                        Batch::Ended(ending) => return Ok(Over::Ended(ending)),
                    }
                }
                Ok(Some(machine)) = self.states.message() => {
                    if machine.state() == MachineState::Running {
                        self.is_up(timings).await?;
                    }
                    // With events, the stream of events reports the ending.
                    if machine.state() == MachineState::Stopped && self.events.is_none() {
                        return Ok(Over::Ended(machine.ending.unwrap_or_default()));
                    }
                    if machine.kernel_replaced && !std::mem::replace(&mut self.replaced, true) {
                        output::notice(format_args!(
                            "the guest runs another kernel now: all probes are gone"
                        ));
                    }
                }
                () = or_never(self.histograms.as_mut().map(Histograms::tick)) => {
                    self.print_histograms().await?;
                }
                index = or_never(self.script.as_mut().map(Running::tick)) => {
                    if let Some(script) = &mut self.script {
                        script.ticked(&mut self.client, index).await?;
                    }
                }
                step = or_never(self.console.as_mut().map(Console::step)) => match step? {
                    Step::More => {}
                    Step::Leave => return Ok(Over::Interrupted),
                    // The stream of events reports the ending.
                    Step::Ended => self.console = None,
                },
            }
        }
    }

    /// Ends the progress of the boot and reports the states of the probes.
    async fn is_up(&mut self, timings: &mut Timings) -> anyhow::Result<()> {
        let Some(progress) = self.progress.take() else {
            return Ok(());
        };
        timings.mark("probes planted");
        let after = timings.seconds();
        let probes = self.client.list_probes(&self.machine).await?;
        let placed = probes
            .iter()
            .filter(|probe| probe.state() == ProbeState::Placed)
            .count();
        let planted = match probes.len() {
            0 => String::new(),
            all => format!(", {placed} of {all} probes planted"),
        };
        progress.done(&format!("the kernel is up after {after:.2} s{planted}"));
        for probe in &probes {
            if probe.state() == ProbeState::Refused {
                let (definition, why) = (&probe.definition, &probe.refusal);
                output::notice(format_args!("`{definition}` cannot be planted: {why}"));
            }
        }
        for line in waiting::lines(&probes, true) {
            output::notice(format_args!("{line}"));
        }
        Ok(())
    }

    /// Prints the remaining console output.
    async fn print_last_words(&mut self) {
        let last = async {
            while let Some(console) = &mut self.console
                && let Ok(Step::More) = console.step().await
            {}
        };
        // The console stream of an ended machine normally ends; the timeout is for one that does not.
        let _in_time = tokio::time::timeout(LAST_WORDS, last).await;
    }

    /// Prints the final counts.
    async fn print_counted(&mut self) -> anyhow::Result<()> {
        match &mut self.script {
            Some(script) => script.end(&mut self.client).await,
            None => self.print_histograms().await,
        }
    }

    /// Prints the current counts.
    async fn print_histograms(&mut self) -> anyhow::Result<()> {
        histograms::print(&mut self.histograms, &mut self.client).await
    }

    /// Returns the time of the guest's first instruction, if it has run one.
    async fn first_entry_ns(&mut self) -> Option<u64> {
        let machine = self.client.get_machine(self.machine.clone()).await;
        machine.ok()?.first_entry_ns
    }

    /// Disables the probes of a machine that still runs, and reads their final counters.
    async fn finish(&mut self, over: &anyhow::Result<Over>) -> anyhow::Result<Vec<Probe>> {
        let probes = self.client.list_probes(&self.machine).await?;
        if matches!(over, Ok(Over::Ended(_))) {
            return Ok(probes);
        }
        let request = DisableRequest {
            machine: self.machine.clone(),
            ids: probes.iter().map(|probe| probe.id).collect(),
        };
        match self.client.probes.disable(request).await {
            Ok(_) => Ok(self.client.list_probes(&self.machine).await?),
            // The guest has just ended on its own.
            Err(_) => Ok(probes),
        }
    }
}

fn what_boots(request: &BootRequest) -> String {
    format!(
        "booting {} ({} {}, {})",
        kernels::shown(Path::new(&request.kernel)),
        request.cpus,
        if request.cpus == 1 { "CPU" } else { "CPUs" },
        size::text(request.memory),
    )
}

/// Returns the exit status for a guest's end, and prints an explanation if the guest did not succeed.
async fn verdict(ending: &Ending, tail: Option<JoinHandle<Tail>>, options: &Options) -> ExitCode {
    let reason = ending.reason();
    let ended_well = match reason {
        EndReason::Shutdown | EndReason::Stopped => !options.with_command,
        // A guest resets after a panic, or because the user rebooted it on its console.
        EndReason::Reset => !options.with_command && options.format == Format::Aside,
        EndReason::TripleFault | EndReason::Crash | EndReason::Unspecified => false,
    };
    match ending.guest_status {
        // A guest that has reported a status may end in any way except a crash. A crash means that hvprobe could
        // not continue.
        Some(status) if reason != EndReason::Crash => {
            return ExitCode::from(u8::try_from(status).unwrap_or(FAILED));
        }
        None if ended_well => return DONE,
        _ => {}
    }
    output::notice(format_args!(
        "the guest did not end well: {}",
        table::ending_text(ending)
    ));
    if !ending.report.is_empty() {
        output::eprint(format_args!("{}", ending.report.trim_end()));
    }
    if let Some(tail) = tail
        && let Ok(tail) = tail.await
    {
        let lines = tail.lines();
        // The registers and the call trace that follow the reason push it out of the lines shown below.
        if let Some(why) = panic_reason(&lines) {
            output::eprint(format_args!("its kernel panicked: {why}"));
        }
        let end = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        if !end.is_empty() {
            output::eprint(format_args!("its console ended with:\n{}", end.join("\n")));
        }
    }
    ExitCode::from(FAILED)
}

/// Returns the reason for a panic of the guest's kernel, if its console contains one.
fn panic_reason(console: &[String]) -> Option<&str> {
    let (_, why) = console.iter().find_map(|line| line.split_once(PANIC))?;
    Some(why)
}

/// Times of the phases of a run.
#[derive(Debug)]
struct Timings {
    /// Start of the program, in nanoseconds of `CLOCK_MONOTONIC`.
    started: u64,
    marks: Vec<(&'static str, u64)>,
}

impl Timings {
    fn new(started: Instant) -> Self {
        let ago = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Self {
            started: now().saturating_sub(ago),
            marks: Vec::new(),
        }
    }

    /// Records that `what` happened now, unless it is already recorded.
    fn mark(&mut self, what: &'static str) {
        self.mark_at(what, now());
    }

    /// Records that `what` happened at `ns`, unless it is already recorded.
    fn mark_at(&mut self, what: &'static str, ns: u64) {
        if self.marks.iter().all(|(marked, _)| *marked != what) {
            self.marks.push((what, ns));
        }
    }

    /// Returns the seconds since the start.
    fn seconds(&self) -> f64 {
        Duration::from_nanos(now().saturating_sub(self.started)).as_secs_f64()
    }

    fn print(&mut self) {
        self.marks.sort_by_key(|(_, ns)| *ns);
        for (what, ns) in &self.marks {
            let after = Duration::from_nanos(ns.saturating_sub(self.started));
            output::eprint(format_args!(
                "{:10.3} ms  {what}",
                after.as_secs_f64() * 1e3
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_for_a_panic_is_found_above_what_the_kernel_prints_after_it() {
        let console = [
            "sh: not found",
            "[    1.97] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000b00",
            "[    1.98] Call Trace:",
            "[    1.99] ---[ end Kernel panic - not syncing: Attempted to kill init! ]---",
        ]
        .map(str::to_owned);
        assert_eq!(
            panic_reason(&console),
            Some("Attempted to kill init! exitcode=0x00000b00")
        );
        assert_eq!(panic_reason(&console[..1]), None);
    }
}
