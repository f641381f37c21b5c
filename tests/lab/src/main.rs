//! `cargo lab`: the machines that hvprobe is developed and tested on, with or without KVM.
//!
//! Most commands begin with [`mod@setup`]. A command describes what is to run as a [`job`] and gives it to a
//! [`rig`], which runs the steps of the job on an emulated machine or on this one. A command ends its processes and
//! removes its temporary files even after an error or a signal.

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

/// Run and test hvprobe, in emulated machines or on this one
///
/// hvprobe needs KVM that can run Linux guests. If this machine has none, the lab emulates a whole PC in software,
/// boots a stock Debian kernel with its own KVM in it, and runs hvprobe there. The machine that hvprobe runs on,
/// emulated or not, is called a rig. The lab installs a few Debian packages (as root) and keeps kernels in
/// ~/.cache/hvprobe (HVPROBE_CACHE overrides that).
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install packages, download the guest kernel, and build the guest image
    ///
    /// Does only what is missing. Other commands run it first if they need it.
    Setup(SetupOptions),
    /// Run a program in a rig and exit with its status
    ///
    /// Builds hvprobe, boots the machine, streams the program's output to stdout, and ends the machine. Exits with
    /// the program's status, with 124 if the time limit was exceeded, or with 125 if the lab itself failed. The
    /// serial log is kept unless the status is 0.
    ///
    /// Example: cargo lab run -- hvprobe doctor
    Run(run::Options),
    /// Boot a stock Debian kernel under hvprobe and print the hits of three probes
    Demo(demo::Options),
    /// Run all tests, on this machine and in a rig
    ///
    /// Builds all tests once. Unit tests run on this machine, end-to-end tests (tests/tests) in the rig. A test
    /// that cannot run on its machine prints a line that starts with `skipped:`. The last line has the total. The
    /// exit status is 0 only if nothing failed.
    ///
    /// An emulated machine sometimes crashes or hangs through no fault of the tests. So a test that fails there, or
    /// does not end, runs again in a fresh machine. A test that passes then is listed as `flaky:` before the last
    /// line. A test that fails in every try has failed.
    Test(test::Options),
    /// Run the tests that must pass on every kernel, on one Debian kernel after another, and print a table
    ///
    /// Downloads the kernels once, half a gigabyte in all. The exit status is 0 only if all kernels were available
    /// and no test failed on any of them.
    Matrix(matrix::Options),
    /// Compare hvprobe with the kernel on lines from the kernel's own selftests and documentation
    ///
    /// Gives their probe definitions, filters and histograms to a guest's kernel and to hvprobe, and compares which
    /// lines each of them accepts, and where it finds errors. Prints a table, and the differences with their
    /// reasons. Downloads the linux-source package of that kernel once, 130 MB, and keeps only the files it needs.
    /// The exit status is 0 only if every difference has a known reason.
    Conformance(conformance::Options),
    /// Run the tests that take too long for every change, and print a table
    ///
    /// Includes tests on all kernels, longer churn and stress tests, a soak, and the instructions of a hit on
    /// bochs. Takes two to three hours, or much longer with --long. The exit status is 0 only if every part passed.
    Nightly(nightly::Options),
    /// Add and remove probes of all kinds in one guest for a long time
    ///
    /// Prints the resources that the probes use. Fails if these grow, because removed probes must free all of them.
    Soak(soak::Options),
    /// Benchmark hvprobe, with QEMU, gdb and the guest's own kprobes as references
    Bench(bench::Options),
    /// Fuzz every decoder with libFuzzer, guided by coverage
    ///
    /// Installs cargo-fuzz if it is missing. Keeps failing inputs in target/fuzz/artifacts. The exit status is 0
    /// only if no target failed.
    Fuzz(fuzz::Options),
    /// Show how much of a kernel's text can be probed
    ///
    /// Counts the instructions that the kernel itself allows to be probed: by mechanism if hvprobe can probe them,
    /// otherwise by the reason of the refusal. Needs no KVM.
    Coverage(coverage::Options),
}

#[derive(Args, Debug)]
struct SetupOptions {
    /// Rig to set up for
    #[arg(long, value_enum, default_value = "tcg")]
    rig: Kind,
    /// Look for newer versions of the cached kernel and QEMU
    #[arg(long)]
    update: bool,
    /// Prepare guests with another kernel: a name such as 6.12-cloud, or a file
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
