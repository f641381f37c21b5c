//! `cargo lab fuzz`: runs the fuzz targets under libFuzzer, guided by coverage.
//!
//! cargo-fuzz builds the targets with the pinned compiler; `RUSTC_BOOTSTRAP` makes the compiler accept unstable
//! options. Each target then runs for the given time. As many targets run at a time as there are processors. No
//! file of the repository is written. Inputs that reach new code are collected in `target/fuzz/corpus`, and are
//! read again in the next run; inputs that fail are collected in `target/fuzz/artifacts`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::cargo::{self, Workspace};
use crate::{outcome, packages, process, progress};

mod log;

use log::Log;

/// What to feed, and for how long.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Minutes for which each target runs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// Number of targets that run in parallel [default: number of processors]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: Option<u16>,
    /// Targets to run, named as in fuzz/fuzz_targets [default: all]
    targets: Vec<String>,
}

/// Time limit for one input; libFuzzer ends a target that takes longer.
const SECONDS_OF_INPUT: u64 = 30;
/// Time that a target may run beyond the given time before it is killed.
const GRACE: Duration = Duration::from_secs(120);
/// Folder in which cargo-fuzz puts programs, below its target folder.
const BUILT: &str = "x86_64-unknown-linux-gnu/release";

/// Folders that the targets read and write.
struct Place {
    root: PathBuf,
    /// Folder for files that are not part of the repository.
    scratch: PathBuf,
}

impl Place {
    fn seeds(&self, target: &str) -> PathBuf {
        self.root.join("fuzz/corpus").join(target)
    }

    fn corpus(&self, target: &str) -> PathBuf {
        self.scratch.join("corpus").join(target)
    }

    fn artifacts(&self, target: &str) -> PathBuf {
        self.scratch.join("artifacts").join(target)
    }

    fn log(&self, target: &str) -> PathBuf {
        self.scratch.join(format!("{target}.log"))
    }

    fn program(&self, target: &str) -> PathBuf {
        self.scratch.join(BUILT).join(target)
    }
}

/// A target that runs.
struct Running {
    target: String,
    child: Child,
    /// Number of inputs in the target's corpus when the target was started.
    before: usize,
    limit: Instant,
}

/// Result of a target.
struct Row {
    target: String,
    log: Log,
    new: usize,
    /// How the target ended, if it failed.
    failed: Option<String>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    let place = Place {
        scratch: workspace.target.join("fuzz"),
        root: workspace.root.clone(),
    };
    let all = targets(&place.root)?;
    if let Some(unknown) = options.targets.iter().find(|name| !all.contains(name)) {
        bail!("no target {unknown}; there are {}", all.join(", "));
    }
    let wanted = match options.targets.is_empty() {
        true => all,
        false => options.targets.clone(),
    };
    build(&workspace, &place, &options.targets)?;

    let jobs = options.jobs.map_or(process::processors(), usize::from);
    let (mut waiting, mut running) = (wanted.into_iter(), Vec::new());
    let mut rows = Vec::new();
    println!("{}", heading());
    loop {
        while running.len() < jobs
            && let Some(target) = waiting.next()
        {
            running.push(start(&place, target, options.minutes)?);
        }
        if running.is_empty() {
            break;
        }
        for mut one in std::mem::take(&mut running) {
            match ended(&mut one)? {
                None => running.push(one),
                Some(failed) => {
                    let row = row(&place, one, failed)?;
                    println!("{}", row.line());
                    rows.push(row);
                }
            }
        }
        thread::sleep(Duration::from_millis(200));
    }
    Ok(report(&place, &rows))
}

/// Prints each failure and how to reproduce it. Returns failure if there is any.
fn report(place: &Place, rows: &[Row]) -> ExitCode {
    let mut found = false;
    for row in rows {
        let Some(failed) = &row.failed else { continue };
        found = true;
        let target = &row.target;
        println!("\n{target}: {failed}");
        for line in &row.log.words {
            println!("  {line}");
        }
        println!("  log: {}", place.log(target).display());
        if let Some(input) = &row.log.input {
            println!("  again: {} {input}", place.program(target).display());
            println!(
                "  once it is mended: cp {input} {}/",
                place.seeds(target).display()
            );
        }
    }
    outcome::status(!found)
}

/// Lists the names of all targets, sorted.
fn targets(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root.join("fuzz/fuzz_targets"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into()));
        }
    }
    names.sort();
    Ok(names)
}

/// Builds the targets with cargo-fuzz, which is installed if it is missing.
fn build(workspace: &Workspace, place: &Place, targets: &[String]) -> Result<()> {
    packages::ensure(&["g++"])?;
    let there = cargo::cargo(workspace)
        .args(["fuzz", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !there.is_ok_and(|status| status.success()) {
        let mut install = cargo::cargo(workspace);
        install.args(["install", "--quiet", "--locked", "cargo-fuzz"]);
        progress::step("installing cargo-fuzz", || succeed(&mut install))?;
    }
    // cargo-fuzz builds one target or all of them.
    let single = match targets {
        [target] => Some(target),
        _ => None,
    };
    let mut build = cargo::cargo(workspace);
    build
        .args(["fuzz", "build", "--target-dir"])
        .arg(&place.scratch)
        .args(single)
        .env("RUSTC_BOOTSTRAP", "1");
    progress::step("building the fuzz targets", || succeed(&mut build))
}

fn succeed(command: &mut Command) -> Result<()> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

fn start(place: &Place, target: String, minutes: u64) -> Result<Running> {
    let (corpus, artifacts) = (place.corpus(&target), place.artifacts(&target));
    fs::create_dir_all(&corpus)?;
    fs::create_dir_all(&artifacts)?;
    let log = File::create(place.log(&target))?;
    let time = Duration::from_secs(60 * minutes);
    let mut command = Command::new(place.program(&target));
    process::end_with_us(&mut command);
    command
        .arg(format!("-max_total_time={}", time.as_secs()))
        .arg(format!("-timeout={SECONDS_OF_INPUT}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg("-print_final_stats=1")
        .arg(&corpus)
        .arg(place.seeds(&target))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let before = inputs(&corpus)?;
    let child = command
        .spawn()
        .with_context(|| format!("cannot start the target {target}"))?;
    Ok(Running {
        target,
        child,
        before,
        limit: Instant::now() + time + GRACE,
    })
}

/// Returns `None` while a target runs. When it has ended, returns how it failed, or `Some(None)` if it did not.
/// Kills a target that is past its limit.
fn ended(running: &mut Running) -> Result<Option<Option<String>>> {
    if let Some(status) = running.child.try_wait()? {
        return Ok(Some(
            (!status.success()).then(|| format!("ended with {status}")),
        ));
    }
    if Instant::now() < running.limit {
        return Ok(None);
    }
    running.child.kill()?;
    running.child.wait()?;
    Ok(Some(Some("did not end when its time was over".to_owned())))
}

fn row(place: &Place, running: Running, failed: Option<String>) -> Result<Row> {
    let Running { target, before, .. } = running;
    let log = fs::read(place.log(&target))?;
    Ok(Row {
        log: Log::read(&String::from_utf8_lossy(&log)),
        new: inputs(&place.corpus(&target))?.saturating_sub(before),
        failed,
        target,
    })
}

fn inputs(folder: &Path) -> Result<usize> {
    Ok(fs::read_dir(folder)?.count())
}

fn heading() -> String {
    let [a, b, c, d, e, f] = [
        "target",
        "runs",
        "runs/s",
        "coverage",
        "new inputs",
        "found",
    ];
    format!("{a:<12}{b:>12}{c:>10}{d:>10}{e:>12}  {f}")
}

impl Row {
    fn line(&self) -> String {
        let number =
            |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
        let found = match (&self.failed, &self.log.summary) {
            (None, _) => "nothing",
            (Some(_), Some(summary)) => summary,
            (Some(failed), None) => failed,
        };
        format!(
            "{:<12}{:>12}{:>10}{:>10}{:>12}  {found}",
            self.target,
            number(self.log.runs),
            number(self.log.runs_a_second),
            number(self.log.coverage),
            self.new,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use expect_test::expect;

    #[test]
    fn rows_stand_under_their_heading() {
        let row = |log: &str, failed: Option<&str>| Row {
            target: "walk".to_owned(),
            log: Log::read(log),
            new: 12,
            failed: failed.map(str::to_owned),
        };
        let good = row(log::GOOD, None);
        let bad = row(log::BAD, Some("ended with exit status: 77"));
        let silent = row("", Some("did not end when its time was over"));
        expect![[r#"
            target              runs    runs/s  coverage  new inputs  found
            walk              524288     17476       311          12  nothing
            walk                4711         -       298          12  deadly signal
            walk                   -         -         -          12  did not end when its time was over"#]]
        .assert_eq(&[heading(), good.line(), bad.line(), silent.line()].join("\n"));
    }

    #[test]
    fn every_target_has_a_program_and_first_inputs() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let manifest = fs::read_to_string(root.join("fuzz/Cargo.toml")).unwrap();
        let targets = targets(&root).unwrap();
        assert!(targets.len() >= 15, "{targets:?}");
        for target in targets {
            assert!(
                manifest.contains(&format!("name = \"{target}\"")),
                "{target}"
            );
            let seeds = root.join("fuzz/corpus").join(&target);
            assert!(inputs(&seeds).unwrap() > 0, "{target}");
        }
    }
}
