//! `cargo lab nightly`: runs the tests that take too long for every change, one part after another, and prints a
//! table at the end.
//!
//! A part is a command of the lab in a separate process, so a part that fails, or does not end, does not affect the
//! others. Each part has a file for its output; the table shows the last line of that output.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use crate::cargo::{self, Workspace};
use crate::kernel::NAMED;
use crate::outcome;
use crate::process::{self, Audience, End, Limits};
use crate::progress;
use crate::record::Recorder;
use crate::run;

/// Which parts.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Run only the parts whose command contains TEXT; repeatable
    #[arg(long, value_name = "TEXT")]
    filter: Vec<String>,
    /// List the parts without running them
    #[arg(long)]
    list: bool,
    /// Record the results of the parts in docs/hosts.md; refused if the tree has changes
    #[arg(long)]
    record: bool,
    /// Duration of each churn and stress test
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    stress: u32,
    /// Also run property tests with many cases, which takes many hours
    ///
    /// Also builds and tests a kernel without data symbols, and runs `cargo lab coverage`.
    #[arg(long)]
    long: bool,
}

/// Maximum time for one part.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Kernels on which all end-to-end tests run, in addition to the kernel that every change is tested on.
const KERNELS: [&str; 3] = ["5.10-cloud", "6.12-cloud", "7.2-cloud"];

/// Benchmarks in guests. Only their short forms are run, which execute all of their code once.
const BENCHES: [&str; 2] = ["boot", "hits"];

/// Number of runs of the tests on this machine, each with another seed. More seeds find more faults, because each
/// property checks a whole machine or server in miniature.
const ROUNDS: &str = "2";

/// Duration of the pause of a large guest, in seconds.
const PAUSE: &str = "60";

/// Memory of the machines in which all tests run: the largest guest has 4 GiB.
const MEMORY: &str = "6G";

/// Packages whose properties are tested with many cases if `--long` is given, which takes hours.
const LONG: [&str; 15] = [
    "hvprobe-arch",
    "hvprobe-cli",
    "hvprobe-devices",
    "hvprobe-engine",
    "hvprobe-hit",
    "hvprobe-lab",
    "hvprobe-linux",
    "hvprobe-machine",
    "hvprobe-proto",
    "hvprobe-server",
    "hvprobe-spec",
    "hvprobe-storage",
    "hvprobe-tests",
    "hvprobe-vm",
    "hvprobe-vmlinux",
];

/// A command of the lab.
#[derive(Debug, PartialEq, Eq)]
struct Part(Vec<String>);

impl Part {
    fn new<'a>(words: impl IntoIterator<Item = &'a str>) -> Self {
        Self(words.into_iter().map(str::to_owned).collect())
    }

    fn command(&self) -> String {
        self.0.join(" ")
    }

    /// Returns whether the results of this part can be recorded. All commands except `coverage` and `test --repeat`
    /// have the option `--record`.
    fn is_recordable(&self) -> bool {
        self.0[0] != "coverage" && !self.0.iter().any(|word| word == "--repeat")
    }

    /// Returns the name of the part's log file, in the folder of all logs.
    fn log(&self) -> String {
        let name = self
            .command()
            .replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
        format!("{name}.log")
    }
}

/// Returns all parts. Those that find most problems come first. With `long`, also returns the parts that take
/// hours.
fn parts(long: bool) -> Vec<Part> {
    let mut parts: Vec<Part> = NAMED
        .iter()
        .map(|kernel| Part::new(["matrix", "--kernel", kernel.name]))
        .collect();
    let whole = ["test", "--memory", MEMORY];
    parts.extend(KERNELS.map(|kernel| Part::new(whole.into_iter().chain(["--kernel", kernel]))));
    parts.push(Part::new(["conformance"]));
    parts.push(Part::new(whole));
    parts.extend(BENCHES.map(|bench| Part::new(["bench", bench, "--smoke"])));
    let alone = ["--rig-only", "--filter", "churn::", "--filter", "stress::"];
    parts.push(Part::new(["test"].into_iter().chain(alone)));
    parts.push(Part::new(["soak", "--minutes", "10"]));
    parts.push(Part::new(["test", "--repeat", ROUNDS]));
    let bochs = "bench hits --rig bochs --calls 4000 --rounds 3 --gdb-hits 0";
    parts.push(Part::new(bochs.split(' ')));
    if long {
        parts.extend(LONG.map(|package| Part::new(["test", "--long", "--package", package])));
        let stripped = "test --rig-only --kernel 6.1-stripped --filter stripped::";
        parts.push(Part::new(stripped.split(' ')));
        parts.push(Part::new(["coverage"]));
    }
    parts
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let is_wanted = |part: &Part| {
        let command = part.command();
        options.filter.is_empty()
            || options
                .filter
                .iter()
                .any(|it| command.contains(it.as_str()))
    };
    let parts = parts(options.long).into_iter();
    let parts: Vec<_> = parts.filter(is_wanted).collect();
    if options.list {
        parts
            .iter()
            .for_each(|part| println!("cargo lab {}", part.command()));
        return Ok(ExitCode::SUCCESS);
    }
    let workspace = Workspace::locate()?;
    if options.record {
        // Each part checks this too, but possibly hours later.
        Recorder::start(&workspace, None)?;
    }
    let built = workspace.build(&cargo::EVERYTHING)?;
    let lab = cargo::program_named(&built, "lab")?;
    let folder = workspace.target.join("lab").join("nightly");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let stress = options.stress.to_string();
    let environment = [
        ("HVPROBE_CHURN_SECONDS", OsString::from(&stress)),
        ("HVPROBE_STRESS_SECONDS", OsString::from(&stress)),
        ("HVPROBE_PAUSE_SECONDS", PAUSE.into()),
    ];
    let mut rows = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        progress::note(&format!(
            "part {} of {}: cargo lab {}",
            number + 1,
            parts.len(),
            part.command()
        ));
        let mut command = Command::new(&lab);
        command.args(&part.0).envs(environment.clone());
        if options.record && part.is_recordable() {
            command.arg("--record");
        }
        if part.0.iter().any(|word| word == "--kernel") {
            command.env(run::SHORT, "1");
        }
        let row = one(part, &mut command, &folder.join(part.log()))?;
        progress::note(&row.line());
        let is_over = row.verdict == Verdict::Interrupted;
        rows.push(row);
        if is_over {
            break;
        }
    }
    print!("{}", table(&rows));
    progress::note(&format!("what they printed: {}", folder.display()));
    let good = rows.len() == parts.len() && rows.iter().all(|row| row.verdict == Verdict::Passed);
    Ok(outcome::status(good))
}

/// How a part ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    TooLong,
    Interrupted,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::TooLong => "TOO LONG",
            Self::Interrupted => "interrupted",
        }
    }
}

/// A row of the table.
#[derive(Debug)]
struct Row {
    command: String,
    verdict: Verdict,
    took: Duration,
    last: String,
}

impl Row {
    fn line(&self) -> String {
        let (verdict, seconds) = (self.verdict.name(), self.took.as_secs());
        format!("{verdict} after {seconds} s: {}", self.last)
    }
}

/// Runs one part and writes its output into the file `log`.
fn one(part: &Part, command: &mut Command, log: &Path) -> Result<Row> {
    let since = Instant::now();
    let limits = Limits {
        deadline: since + LIMIT,
        silence: None,
    };
    let mut kept = Kept {
        log: File::create(log).with_context(|| format!("cannot create {}", log.display()))?,
        line: Vec::new(),
        last: String::new(),
    };
    let verdict = match process::run(command, true, limits, &mut kept)? {
        End::Exited(status) if status.success() => Verdict::Passed,
        End::Exited(_) | End::Stopped | End::Overdue | End::Silent => Verdict::Failed,
        End::TimedOut => Verdict::TooLong,
        End::Interrupted(_) => Verdict::Interrupted,
    };
    Ok(Row {
        command: part.command(),
        verdict,
        took: since.elapsed(),
        last: kept.last,
    })
}

/// Writes a part's output into its log, and keeps the last line that is neither blank nor a note of the lab.
struct Kept {
    log: File,
    line: Vec<u8>,
    last: String,
}

impl Audience for Kept {
    fn output(&mut self, bytes: &[u8]) -> Result<ControlFlow<()>> {
        self.log.write_all(bytes).context("cannot write the log")?;
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = String::from_utf8_lossy(&line);
            if !line.trim().is_empty() && !line.starts_with("lab: ") {
                line.trim().clone_into(&mut self.last);
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

fn table(rows: &[Row]) -> String {
    let widest = rows.iter().map(|row| row.command.len()).max().unwrap_or(0);
    let mut text = format!("\n{:widest$}  verdict   seconds  last line\n", "cargo lab");
    for row in rows {
        let line = format!(
            "{:widest$}  {:<8}  {:>7}  {}",
            row.command,
            row.verdict.name(),
            row.took.as_secs(),
            row.last
        );
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn parts_are_commands_of_the_lab_each_with_a_file_of_its_own() {
        let parts = parts(true);
        let mut logs: Vec<_> = parts.iter().map(Part::log).collect();
        for part in &parts {
            crate::tests::parse(&part.0).unwrap();
            let recorded = [&part.0[..], &["--record".to_owned()]].concat();
            let is_taken = crate::tests::parse(&recorded).is_ok();
            assert_eq!(is_taken, part.is_recordable(), "{}", part.command());
        }
        logs.sort();
        logs.dedup();
        assert_eq!(logs.len(), parts.len());
    }

    #[test]
    fn every_package_with_properties_has_a_part() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
        let members = manifest.split("members = [").nth(1).unwrap();
        let members = members.split(']').next().unwrap();
        for member in members
            .split('"')
            .filter(|it| it.contains(char::is_alphanumeric))
        {
            let Ok(manifest) = fs::read_to_string(root.join(member).join("Cargo.toml")) else {
                continue;
            };
            let is_tested = manifest.contains("\nproptest.workspace = true");
            let name = manifest.split("name = \"").nth(1).unwrap();
            let name = name.split('"').next().unwrap();
            assert!(!is_tested || LONG.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_part_that_fails_is_a_row_with_its_last_words() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let row = |words: &str| {
            let mut command = Command::new("sh");
            let part = Part::new([words]);
            let mut row = one(&part, command.args(["-c", words]), &log).unwrap();
            row.took = Duration::from_secs(3);
            row
        };
        let rows = [
            row("echo 2 passed; echo lab: bye; echo"),
            row("echo no >&2; exit 3"),
        ];
        expect![[r#"

            cargo lab                           verdict   seconds  last line
            echo 2 passed; echo lab: bye; echo  passed          3  2 passed
            echo no >&2; exit 3                 FAILED          3  no
        "#]]
        .assert_eq(&table(&rows));
        assert_eq!(fs::read_to_string(log).unwrap(), "no\n");
    }
}
