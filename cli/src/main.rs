//! `hvprobe`: boots Linux guests and probes their kernels from outside.
//!
//! The program is only a client of the gRPC interface. `serve` offers that interface on a socket; `run` and
//! `doctor` start a server in the same process. Without the feature `vmm`, the program cannot start a server, and
//! links no code for KVM.
//!
//! Each folder uses only folders below it in this list:
//! - `commands`: one file for each command;
//! - `script`: scripts in the language of bpftrace;
//! - `follow`: events, histograms and consoles, printed as they arrive;
//! - `client`: the connection to a server;
//! - `definitions`: definitions of probes and guests, made into requests;
//! - `terminal`: raw mode, signals, progress, the log;
//! - `options`: the command line;
//! - `failure`: errors and exit statuses;
//! - `output`: results, events and messages as text and as JSON.

mod client;
mod commands;
mod definitions;
mod failure;
mod follow;
mod options;
mod output;
mod script;
mod terminal;

use std::process::ExitCode;
use std::time::Instant;

use clap::CommandFactory as _;

#[cfg(feature = "vmm")]
use commands::serve;
use commands::{
    decide, doctor, explain, image, probe, run, sources, syms, trace, types, unpack, vm,
};
use options::command_line::{self, Cli, Command};
use terminal::log::Log;

fn main() -> ExitCode {
    let started = Instant::now();
    let cli = command_line::parse();
    let log = Log::start(cli.log);
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return failure::report(&anyhow::Error::from(error)),
    };
    let outcome = runtime.block_on(dispatch(cli.command, started));
    // Do not wait for threads: all work that has to end in order has ended, and a thread that reads the terminal
    // never ends.
    runtime.shutdown_background();
    let status = outcome.unwrap_or_else(|error| failure::report(&error));
    log.finish();
    status
}

async fn dispatch(command: Command, started: Instant) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => run::run(*args, started).await,
        #[cfg(feature = "vmm")]
        Command::Serve(args) => serve::serve(args).await,
        #[cfg(not(feature = "vmm"))]
        Command::Serve(_) => client::InProcess::check().map(|()| failure::DONE),
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
        Command::Image(command) => image::image(&command),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "hvprobe", &mut script);
            output::print(String::from_utf8(script)?.trim_end())?;
            Ok(failure::DONE)
        }
    }
}
