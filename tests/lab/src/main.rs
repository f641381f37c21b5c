//! `cargo lab`: the machines that hvprobe is developed and tested on, with or without KVM.
//!
//! Every command begins with [`mod@setup`]. It describes what is to run as a [`job`], and gives that to a [`rig`],
//! which runs the steps of the job on an emulated machine or on this one. No process and no temporary file outlives
//! a command, however the command ends.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

mod archive;
mod bench;
mod building;
mod built;
mod cargo;
mod choose;
mod clients;
mod conformance;
mod coverage;
mod demo;
mod estimate;
mod files;
mod fuzz;
mod groups;
mod image;
mod instructions;
mod job;
mod kernel;
mod kind;
mod libtest;
mod matrix;
mod modules;
mod needed;
mod nightly;
mod outcome;
mod overdue;
mod packages;
mod place;
mod prefetch;
mod process;
mod progress;
mod qemu;
mod record;
mod repeat;
mod report;
mod retry;
mod rig;
mod run;
mod seeds;
mod serial;
mod setup;
mod shell;
mod signals;
mod size;
mod soak;
mod stacks;
mod terminal;
mod test;
mod took;
mod tool;
mod total;

use kernel::Choice;
use kind::Kind;
use setup::Ready;

/// Machines to run hvprobe on, and everything they need.
///
/// hvprobe needs KVM that can run Linux guests. Where there is none, the lab emulates a whole PC
/// in software, boots a stock Debian kernel with its own KVM in it, and runs hvprobe there. It
/// installs a few Debian packages (as root) and keeps a kernel in ~/.cache/hvprobe (HVPROBE_CACHE
/// overrides that).
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install the packages, fetch the guest kernel, build the guest image
    ///
    /// Does only what is missing; the other commands start with it.
    Setup(SetupOptions),
    /// Run one program in a rig and exit with its status
    ///
    /// Builds hvprobe, boots the machine, streams the program's output to stdout and ends the
    /// machine. Exits with the program's status; 124 if the time was over; 125 if the lab itself
    /// failed. The serial log is kept unless the status is 0.
    ///
    /// Example: cargo lab run -- hvprobe doctor
    Run(run::Options),
    /// Show hvprobe at work: a stock Debian kernel boots with probes in it
    Demo(demo::Options),
    /// Run all tests, on this machine and in a rig
    ///
    /// Builds every test once. Unit tests run on this machine; end-to-end tests (tests/tests) run
    /// in the rig, one program after another in one boot. Tests that cannot run where they are
    /// print a line that starts with `skipped:`. The last line adds everything up; the exit status
    /// is 0 only if nothing failed.
    ///
    /// An emulated machine dies or stands still now and then through no fault of the tests: what
    /// failed there, or did not end, runs again in a fresh one. What passes then is listed as
    /// `flaky:` before the last line; what fails every time has failed.
    Test(test::Options),
    /// Run the tests that hold on every kernel on one of Debian's after another, and print a table
    ///
    /// The kernels are downloaded once, half a gigabyte in all. The exit status is 0 only if every
    /// promise was kept on each of them.
    Matrix(matrix::Options),
    /// Hold what the kernel's own tests and documentation say against a guest's kernel, and us
    ///
    /// Their definitions, filters and histograms are judged by both; prints a table and what differs, with the
    /// reason. Downloads Debian's package with that kernel's source once, 130 MB, and keeps little of it. The exit
    /// status is 0 only if each difference has a reason.
    Conformance(conformance::Options),
    /// Run what takes too long for every change, and print a table
    ///
    /// All kernels, long runs of properties, churn and stress, instructions of a hit on bochs. Takes
    /// hours; the exit status is 0 only if every part passed.
    Nightly(nightly::Options),
    /// Have probes of all kinds come and go on one guest for a long time
    ///
    /// What they take has to be there again when they have gone; it is printed how much that is.
    Soak(soak::Options),
    /// Measure hvprobe against its references, in one rig and one run
    Bench(bench::Options),
    /// Feed every decoder with inputs that libFuzzer makes up, guided by coverage
    ///
    /// Installs cargo-fuzz if it is missing. Inputs that fail are kept in target/fuzz/artifacts; the
    /// exit status is 0 only if nothing failed.
    Fuzz(fuzz::Options),
    /// Show how much of a kernel's text takes probes
    ///
    /// Counts all instructions that the kernel itself lets be probed, by the mechanism they are
    /// carried out with, and those that are refused, by reason. Needs no KVM.
    Coverage(coverage::Options),
}

#[derive(Args, Debug)]
struct SetupOptions {
    /// The rig to prepare for
    #[arg(long, value_enum, default_value = "tcg")]
    rig: Kind,
    /// Look for a newer kernel, and QEMU, even if there is one in the cache
    #[arg(long)]
    update: bool,
    /// Fetch another kernel for guests, too, and build its guest image
    #[arg(long, value_name = "NAME|FILE", value_parser = Choice::parse)]
    kernel: Option<Choice>,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Setup(options) => setup(&options),
        Command::Run(options) => run::run(&options),
        Command::Demo(options) => demo::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Matrix(options) => matrix::run(&options),
        Command::Conformance(options) => conformance::run(&options),
        Command::Nightly(options) => nightly::run(&options),
        Command::Soak(options) => soak::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Coverage(options) => coverage::run(&options),
    };
    result.unwrap_or_else(|error| {
        progress::note(&format!("{error:#}"));
        ExitCode::from(run::LAB_FAILED)
    })
}

fn setup(options: &SetupOptions) -> Result<ExitCode> {
    let ready = Ready::make_with(options.rig, options.update, true, options.kernel.as_ref())?;
    progress::note(&format!(
        "ready for rig {}: kernel {}, cache {}",
        options.rig.name(),
        ready.kernel.release(),
        ready.cache.root().display()
    ));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    use clap::CommandFactory as _;
    use clap::error::ErrorKind;
    use hvprobe_lab::documented;

    /// Parses `words` as they would be typed after `cargo lab`.
    pub(crate) fn parse(words: &[String]) -> Result<Cli, clap::Error> {
        let program = ["cargo lab".to_owned()];
        Cli::try_parse_from(program.iter().chain(words))
    }

    #[test]
    fn command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn documented_commands_can_be_typed() {
        let mut seen = 0;
        for name in documented::PAGES {
            let page = documented::page(name).unwrap();
            for shown in documented::commands(&page, "cargo lab") {
                seen += 1;
                // cargo consumes the first word, `cargo`. The second, the alias `lab`, is in the place of the
                // program's name.
                let words = shown.words.iter().skip(1);
                match Cli::try_parse_from(words) {
                    Ok(_) => {}
                    // Prose may leave out words of a command.
                    Err(error)
                        if !shown.example
                            && matches!(
                                error.kind(),
                                ErrorKind::MissingSubcommand | ErrorKind::MissingRequiredArgument
                            ) => {}
                    Err(error) => panic!("{name}:{}: {error}", shown.line),
                }
            }
        }
        assert!(seen > 10, "only {seen} commands");
    }

    #[test]
    fn documented_options_exist() {
        let known: Vec<String> = Cli::command()
            .get_subcommands()
            .flat_map(|command| command.get_arguments())
            .filter_map(|argument| argument.get_long().map(str::to_owned))
            .collect();
        let sections = [
            ("CONTRIBUTING.md", "## A day's work"),
            (documented::PERFORMANCE, "# Performance"),
        ];
        for (name, heading) in sections {
            let page = documented::page(name).unwrap();
            let options = documented::options(&page, heading);
            assert!(!options.is_empty(), "{name}: {heading}");
            for option in options {
                assert!(known.contains(&option), "{name}: --{option}");
            }
        }
    }

    #[test]
    fn documented_paths_exist() {
        let tree = documented::tree().unwrap();
        let top: Vec<String> = tree
            .iter()
            .filter(|path| !path.contains('/'))
            .cloned()
            .collect();
        let exists = |path: &str| {
            let path = path.trim_end_matches('/');
            let first = path.split('/').next().unwrap_or(path);
            // `path` is a path from the root, or only the end of one whose beginning the sentence has named before.
            let is_whole = path.contains('/') && top.iter().any(|name| name == first);
            let ending = format!("/{path}");
            tree.contains(path) || !is_whole && tree.iter().any(|known| known.ends_with(&ending))
        };
        let (mut seen, mut missing) = (0, Vec::new());
        for name in documented::PAGES {
            for (line, path) in documented::paths(&documented::page(name).unwrap(), &top) {
                seen += 1;
                if !exists(path) {
                    missing.push(format!("{name}:{line}: there is no `{path}`"));
                }
            }
        }
        assert!(missing.is_empty(), "{}", missing.join("\n"));
        assert!(seen > 50, "only {seen} paths");
    }

    #[test]
    fn documented_links_lead_somewhere() {
        let mut broken = Vec::new();
        for name in documented::PAGES {
            let page = documented::page(name).unwrap();
            let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
            for (line, link) in documented::links(&page) {
                let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
                let to = match file {
                    "" => page.clone(),
                    file if folder.is_empty() => documented::page(file).unwrap_or_default(),
                    file => documented::page(&format!("{folder}/{file}")).unwrap_or_default(),
                };
                let anchors = documented::anchors(&to);
                if to.is_empty() || !anchor.is_empty() && !anchors.iter().any(|it| it == anchor) {
                    broken.push(format!("{name}:{line}: {link} leads nowhere"));
                }
            }
        }
        assert!(broken.is_empty(), "{}", broken.join("\n"));
    }
}
