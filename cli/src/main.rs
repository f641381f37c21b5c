//! `hvprobe`: boots Linux guests and probes their kernels from outside.
//!
//! The program is only a client of the gRPC interface. `serve` offers that interface on a socket; `run` and
//! `doctor` start it in the same process.

mod args;
mod budget;
mod client;
mod clock;
mod config;
mod console;
mod decide;
mod definition;
mod doctor;
mod event_args;
mod events_file;
mod explain;
mod explain_args;
mod failure;
mod flame;
mod follow;
mod guest;
mod histogram;
mod hit_args;
mod in_process;
mod label;
mod log;
mod logs;
mod optional_future;
mod origins;
mod output;
mod perf_probe;
mod plant;
mod probe;
mod progress;
mod run;
mod script;
mod serve;
mod server_args;
mod session;
mod signals;
mod size;
mod sources;
mod sources_args;
mod symbolize;
mod syms;
mod terminal;
mod trace;
mod typed;
mod types;
mod unpack;
mod upload;
mod versions;
mod vm;
mod vm_args;
mod watch;

use std::process::ExitCode;
use std::time::Instant;

use clap::CommandFactory as _;

use args::{Cli, Command};
use log::Log;

fn main() -> ExitCode {
    let started = Instant::now();
    let cli = args::parse();
    let log = Log::start(cli.log);
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return failure::report(&anyhow::Error::from(error)),
    };
    let outcome = runtime.block_on(dispatch(cli.command, started));
    // Everything that has to end in order has ended. A thread that reads the terminal would never end.
    runtime.shutdown_background();
    let status = outcome.unwrap_or_else(|error| failure::report(&error));
    log.finish();
    status
}

async fn dispatch(command: Command, started: Instant) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => run::run(*args, started).await,
        Command::Serve(args) => serve::serve(args).await,
        Command::Vm(command) => vm::vm(command).await,
        Command::Probe(command) => probe::probe(command).await,
        Command::Trace(args) => trace::trace(*args).await,
        Command::Decide(args) => decide::decide(args).await,
        Command::Syms(args) => syms::syms(args).await,
        Command::Types(args) => types::types(args).await,
        Command::Explain(args) => explain::run(*args),
        Command::Lines(args) => sources::lines(args).await,
        Command::Vars(args) => sources::vars(args).await,
        Command::Doctor(args) => doctor::doctor(args).await,
        Command::Unpack(args) => unpack::unpack(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "hvprobe", &mut script);
            output::print(String::from_utf8(script)?.trim_end())?;
            Ok(failure::DONE)
        }
    }
}
