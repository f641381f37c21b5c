//! `cargo lab run`: runs one program in a rig. The program's output goes to stdout, and its exit status becomes
//! that of the lab.

use std::ffi::OsString;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::files::{self, Given};
use crate::job::{Job, Stdio, Step};
use crate::kernel::Choice;
use crate::kind::Kind;
use crate::outcome::{Finish, Listener, Outcome};
use crate::progress;
use crate::rig;
use crate::setup::Ready;
use crate::size;

/// Targets of cargo that build the programs of a rig.
pub(crate) const PROGRAMS: [&str; 2] = ["--bin=hvprobe", "--bin=workload"];
/// Exit status if the time limit has passed, as of timeout(1).
const TIMED_OUT: u8 = 124;
/// Exit status if the lab itself failed, so that PROGRAM has no status.
pub(crate) const LAB_FAILED: u8 = 125;

/// What is to run, and where.
#[derive(Args, Clone, Debug)]
#[command(override_usage = "cargo lab run [OPTIONS] -- PROGRAM [ARGUMENTS]...")]
pub(crate) struct Options {
    /// Machine to run on
    #[arg(long, value_enum, default_value = "tcg")]
    rig: Kind,
    #[command(flatten)]
    machine: MachineOptions,
    /// Run PROGRAM on a terminal, with stdin as its input; Ctrl-] quits (not on bochs)
    #[arg(long, short)]
    interactive: bool,
    /// Kernel of the guests, a name such as 6.12-cloud or a file [default: the stock kernel]
    ///
    /// Names of Debian kernels are 5.10-cloud, 6.1, 6.1-rt, 6.1-cloud, 6.12-cloud, 6.12-rt, 7.2-cloud and 7.2-rt.
    /// The lab builds the kernel 6.1-stripped itself.
    #[arg(long, value_name = "NAME|FILE", value_parser = Choice::parse)]
    guest_kernel: Option<Choice>,
    /// Copy the file HOST into the emulated machine, as RIG or into the program's working folder; repeatable
    #[arg(long = "file", value_name = "HOST[:RIG]", value_parser = Given::parse)]
    files: Vec<Given>,
    /// Forward a TCP port of this machine's 127.0.0.1 to the same port of the emulated machine (tcg only)
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    forward: Option<u16>,
    /// Build hvprobe in release mode
    #[arg(long)]
    release: bool,
    /// Use the programs of the last build instead of building them
    #[arg(long)]
    no_build: bool,
    /// Program to run and its arguments: hvprobe, workload, a path that contains a slash, or a busybox applet
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_names = ["PROGRAM", "ARGUMENTS"])]
    words: Vec<OsString>,
}

/// Options of the machine, the same wherever one is started.
#[derive(Args, Clone, Debug)]
pub(crate) struct MachineOptions {
    /// Number of CPUs of an emulated machine [default: tcg 2, bochs 1, `bench hits` 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: Option<u32>,
    /// Memory of an emulated machine, such as 1536M or 3G [default: tcg 3G, bochs 2G]
    #[arg(long, value_name = "SIZE", value_parser = size::mebibytes)]
    memory: Option<u32>,
    /// Time limit, including the boots of machines [default: run and demo 600, others 2700, 7200 on bochs, 1800 on
    /// direct]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: Option<u64>,
    /// Keep the serial log and the images even if nothing fails
    #[arg(long)]
    keep: bool,
}

impl MachineOptions {
    /// Returns the time limit, or `default` seconds if none was given.
    pub(crate) fn timeout(&self, default: u64) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(default))
    }

    /// Copies the options into `job`.
    pub(crate) fn apply(&self, job: &mut Job) {
        job.cpus = self.cpus;
        job.memory = self.memory;
        job.keep = self.keep;
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let files = files::by_name(&options.files)?;
    if !files.is_empty() && !options.rig.is_emulated() {
        bail!("--file is for emulated machines: on this one a program finds files where they are");
    }
    let ready = Ready::make_with(
        options.rig,
        false,
        !options.no_build,
        options.guest_kernel.as_ref(),
    )?;
    let mut job = job(&ready, options)?;
    job.files = files;
    job.forward = options.forward;
    run_job(options.rig, &ready, &job)
}

/// Runs a job of one step with its output on stdout.
pub(crate) fn run_job(rig: Kind, ready: &Ready, job: &Job) -> Result<ExitCode> {
    let outcome = rig::run(rig, ready, job, &mut Passthrough)?;
    Ok(ExitCode::from(report(&outcome)))
}

fn job(ready: &Ready, options: &Options) -> Result<Job> {
    let mut arguments = PROGRAMS.to_vec();
    if options.release {
        arguments.push("--release");
    }
    let built = if options.no_build {
        ready.workspace.built(options.release)
    } else {
        ready.workspace.build(&arguments)?
    };
    let mut job = Job::new(&built, options.machine.timeout(600));
    options.machine.apply(&mut job);
    let (program, arguments) = options.words.split_first().context("no program given")?;
    let program = program
        .to_str()
        .context("the program's name is not UTF-8")?;
    job.stdio = if options.interactive {
        Stdio::Interactive
    } else {
        Stdio::of_stdout()
    };
    job.environment = environment(options.rig);
    let program = job.resolve(program)?;
    job.steps.push(Step::new(&program, arguments));
    Ok(job)
}

/// Environment variables that the lab passes on to programs in a rig. They change what programs print or what tests
/// try.
const PASSED_ON: [&str; 17] = [
    "TERM",
    "NO_COLOR",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "HVPROBE_DIFFERENTIAL",
    "HVPROBE_DIFFERENTIAL_SEED",
    "HVPROBE_STRESS_SECONDS",
    "HVPROBE_STRESS_SEED",
    "HVPROBE_PAUSE_SECONDS",
    "HVPROBE_CLIENTS",
    "HVPROBE_CHURN_SECONDS",
    "HVPROBE_CHURN_SEED",
    "HVPROBE_STORM",
    "HVPROBE_COUNTED",
    SOAK_MINUTES,
    "HVPROBE_SOAK_SEED",
    SHORT,
];

/// Environment variable with the duration of the soak, in minutes.
pub(crate) const SOAK_MINUTES: &str = "HVPROBE_SOAK_MINUTES";

/// Environment variable that makes tests do only a quarter of their rounds.
pub(crate) const SHORT: &str = "HVPROBE_SHORT";

/// Returns the environment of programs in a rig: the name of the rig, and the variables of [`PASSED_ON`].
pub(crate) fn environment(rig: Kind) -> Vec<(String, OsString)> {
    PASSED_ON
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), std::env::var_os(name)?)))
        .chain([("HVPROBE_RIG".to_owned(), rig.name().into())])
        .collect()
}

/// Converts the exit status of a program on this machine to that of the lab: [`LAB_FAILED`] if a signal ended the
/// program.
pub(crate) fn code(status: ExitStatus) -> u8 {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.unwrap_or(LAB_FAILED)
}

/// Returns the exit status of the lab. If the run was ended from outside, by a limit, a signal or a failure of the
/// rig, prints a note about that.
pub(crate) fn report(outcome: &Outcome) -> u8 {
    let status = match &outcome.finish {
        Finish::Complete => outcome
            .statuses
            .iter()
            .find_map(|status| status.filter(|status| *status != 0))
            .unwrap_or(0),
        Finish::TimedOut => {
            progress::note("the time was over; the machine was ended");
            TIMED_OUT
        }
        Finish::Interrupted(signal) => {
            progress::note("interrupted; the machine was ended");
            u8::try_from(128 + signal).unwrap_or(LAB_FAILED)
        }
        Finish::Broken(reason) => {
            progress::note(reason);
            LAB_FAILED
        }
    };
    if let Some(log) = &outcome.log {
        progress::note(&format!("serial log: {}", log.display()));
    }
    status
}

/// Writes output to stdout as it arrives.
struct Passthrough;

impl Listener for Passthrough {
    fn output(&mut self, bytes: &[u8]) -> Result<()> {
        progress::pass_on(bytes)
    }
}
