//! The command: finds the cases, and runs the rig test that judges them.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::cases::Found;
use super::{pages, script, source};
use crate::cargo::{self, Workspace};
use crate::choose::choose;
use crate::job::Input;
use crate::kernel::Choice;
use crate::kind::Kind;
use crate::progress;
use crate::record::Recorder;
use crate::run::MachineOptions;
use crate::setup::Ready;
use crate::test;

/// Build targets that the test needs.
const NEEDED: [&str; 3] = ["--bin=hvprobe", "--bin=workload", "--test=rig"];
/// Module of the test.
const TEST: &str = "conformance::";
/// Name of the row for the result in the table of docs/hosts.md.
const ROW: &str = "conformance";
/// Environment variable with the path of the cases.
const VARIABLE: &str = "HVPROBE_CONFORMANCE";
/// Path of the cases in an emulated rig, without the leading slash.
const IN_RIG: &str = "root/cases";
/// Number of retries, because an emulated machine may fail. A real difference fails in the retry, too.
const RETRIES: u32 = 1;

/// On which kernel, and where.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Name of the Debian kernel to compare with, such as 6.12-cloud [default: the stock kernel]
    #[arg(long, value_name = "NAME", value_parser = Choice::parse)]
    kernel: Option<Choice>,
    /// Machine to run on [default: direct if its KVM can run Linux guests, else tcg]
    #[arg(long, value_enum)]
    rig: Option<Kind>,
    /// Record the result in docs/hosts.md; refused if the tree has changes
    #[arg(long)]
    record: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    let start = || Recorder::start(&workspace, Some(ROW));
    let mut recorder = options.record.then(start).transpose()?;
    let built = workspace.build(&NEEDED)?;
    let rig = choose(options.rig, &cargo::program_named(&built, "hvprobe")?)?;
    let ready = Ready::make(rig, options.kernel.as_ref())?;
    if let Some(recorder) = &mut recorder {
        recorder.with_guests(&ready, options.kernel.as_ref())?;
    }
    let source = source::obtain(&ready.cache, &ready.kernel, options.kernel.as_ref())?;
    let found = find(&source)?;
    if found.cases.is_empty() {
        bail!("nothing to judge in {}", source.display());
    }
    print!("{}", found.left_out());
    progress::note(&format!(
        "{} lines to judge, {} left out",
        found.cases.len(),
        found.left.len()
    ));
    let cases = workspace.target.join("lab").join("conformance");
    write(&found, &cases)?;
    let input = Input {
        variable: VARIABLE,
        in_rig: IN_RIG,
        source: cases,
    };
    let how = test::Options::in_rig(&options.machine, Some(RETRIES), TEST).with_input(input);
    let (_, total) = test::of_rig(&ready, &built, rig, &how, recorder.as_mut())?;
    let status = total.close();
    if let Some(recorder) = recorder {
        recorder.write()?;
    }
    Ok(status)
}

/// Finds the cases in the files below `source`.
fn find(source: &Path) -> Result<Found> {
    let mut found = Found::default();
    for (name, text) in source::files(source, ".tc")? {
        script::read(&name, &text, &mut found);
    }
    for (name, text) in source::files(source, ".rst")? {
        pages::read(&name, &text, &mut found);
    }
    Ok(found)
}

/// Writes the cases in the format that the test reads.
fn write(found: &Found, file: &Path) -> Result<()> {
    let folder = file.parent().context("no folder for the cases")?;
    fs::create_dir_all(folder)?;
    let lines = found.cases.iter().map(|case| format!("{case}\n"));
    fs::write(file, lines.collect::<String>())
        .with_context(|| format!("cannot write {}", file.display()))
}
