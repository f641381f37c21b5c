//! Recorder of results in the table of `docs/hosts.md`, for runs with `--record`.
//!
//! Invariant: a cell describes exactly what ran, at the commit that it names. So a tree with changes is refused,
//! before anything is built and again at the end. A run that was cut short records nothing. If some tests of a
//! group did not run, the cell of the group is not changed. Only the page itself may have changes, because
//! successive runs record in it.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use hvprobe_lab::documented::HOSTS;
use hvprobe_lab::verified::{Cell, Counts, Key, NO_LINUX, Table};

use crate::cargo::Workspace;
use crate::job::{CARGO, Job, Step};
use crate::kernel::{Choice, Kernel};
use crate::kind::Kind;
use crate::libtest;
use crate::place::replace_if_different;
use crate::progress;
use crate::qemu::Qemu;
use crate::setup::Ready;
use crate::tool;

/// Package of the end-to-end tests.
const END_TO_END: &str = "tests";
/// Program of that package with the tests that need Linux guests.
const RIG: &str = "rig";

/// Number of changed files that an error names.
const NAMED: usize = 3;

/// Pathspec that excludes the files that a run itself writes: inputs for which a property failed.
const BY_TESTS: &str = ":(exclude,glob)**/proptest-regressions/**";

/// Results of a run, to be written into the page at its end.
#[derive(Debug)]
pub(crate) struct Recorder {
    root: PathBuf,
    /// File that is locked while the page is changed.
    lock: PathBuf,
    commit: String,
    /// Name of the row, if the whole run has one row. Otherwise each group of tests has its row.
    row: Option<String>,
    /// Name of the guests' kernel.
    kernel: String,
    seen: BTreeMap<Key, Counts>,
}

impl Recorder {
    /// Creates a recorder for results of the present commit.
    ///
    /// # Errors
    ///
    /// If the tree differs from that commit.
    pub(crate) fn start(workspace: &Workspace, row: Option<&str>) -> Result<Self> {
        Self::of(&workspace.root, &workspace.target, row)
    }

    fn of(root: &Path, target: &Path, row: Option<&str>) -> Result<Self> {
        if let Some(row) = row {
            hvprobe_lab::verified::name_is_good(row)?;
        }
        let changes = changes(root, &[BY_TESTS])?;
        if let Some(first) = changes
            .get(..changes.len().min(NAMED))
            .filter(|it| !it.is_empty())
        {
            bail!(
                "--record: the tree has changes ({}{}), so no commit could be named beside the results; commit \
                 or remove them",
                first.join(", "),
                if changes.len() > NAMED { ", ..." } else { "" }
            );
        }
        Ok(Self {
            root: root.to_owned(),
            lock: target.join("record.lock"),
            commit: commit(root)?,
            row: row.map(str::to_owned),
            kernel: String::new(),
            seen: BTreeMap::new(),
        })
    }

    /// Sets the kernel of the guests for the following results: that of `choice`, or the stock kernel without a
    /// choice.
    pub(crate) fn with_guests(&mut self, ready: &Ready, choice: Option<&Choice>) -> Result<()> {
        ensure!(
            ready.qemu.as_ref().is_none_or(Qemu::has_nested_paging),
            "--record: this machine's QEMU emulates another kind of machine than QEMU 10, which others record with"
        );
        let name = ready.kernel.name_of_guests(choice);
        self.kernel = name.context("--record: a result needs a kernel's name beside it")?;
        if let Some(Choice::Named(named)) = choice {
            Kernel::named(&ready.cache, named)?.require(named)?;
        }
        Ok(())
    }

    /// Returns the cell for each step of a job that is about to run on `host`. A step has no cell if it runs no
    /// tests, or if the job leaves out some tests of its group. In the latter case, prints a note.
    pub(crate) fn cells(&self, job: &Job, host: Kind) -> Result<Vec<Option<Key>>> {
        let mut cells = Vec::new();
        // For each cell, the number of tests that the job runs, and the number of all tests of the group.
        let mut numbers: BTreeMap<Key, (usize, usize)> = BTreeMap::new();
        let mut programs = BTreeSet::new();
        let row = self.row.as_deref();
        for step in &job.steps {
            let path = program(job, step).filter(|_| step.is_tests() && step.program != CARGO);
            let Some(path) = path else {
                cells.push(None);
                continue;
            };
            let tests = match &step.group {
                Some(group) => group.tests.clone(),
                None => libtest::list(path, &step.arguments)?,
            };
            for test in &tests {
                let group = self.group(step, test).0;
                ensure!(
                    row != Some(group.as_str()),
                    "--record: {group} is the row of a group of tests; give another name"
                );
            }
            let first = tests.first().map_or("", String::as_str);
            let key = self.key(step, first, host);
            numbers.entry(key.clone()).or_default().0 += tests.len();
            cells.push((!tests.is_empty()).then_some(key));
            if programs.insert(path) {
                for test in libtest::list(path, &[])? {
                    let key = self.key(step, &test, host);
                    numbers.entry(key).or_default().1 += 1;
                }
            }
        }
        if self.row.is_none() {
            let in_part = numbers
                .iter()
                .filter(|(_, (ran, all))| (1..*all).contains(ran));
            for (key, (ran, all)) in in_part {
                let tests = &key.tests;
                progress::note(&format!(
                    "not recorded: {tests}, of which {ran} of {all} tests run"
                ));
                cells
                    .iter_mut()
                    .filter(|it| it.as_ref() == Some(key))
                    .for_each(|it| *it = None);
            }
        }
        Ok(cells)
    }

    /// Returns the cell for a test of the program of `step`.
    fn key(&self, step: &Step, test: &str, host: Kind) -> Key {
        let (group, has_guests) = self.group(step, test);
        Key {
            host: host.name().to_owned(),
            tests: self.row.clone().unwrap_or(group),
            kernel: if has_guests { &self.kernel } else { NO_LINUX }.to_owned(),
        }
    }

    /// Returns the name of the group to which a test of the program of `step` belongs, and whether the tests of the
    /// group boot Linux guests.
    fn group(&self, step: &Step, test: &str) -> (String, bool) {
        let program = step.program.rsplit_once('-');
        let program = program.map_or(step.program.as_str(), |(name, _)| name);
        let package = step.package.as_deref().unwrap_or(&self.root);
        let package = package.strip_prefix(&self.root).unwrap_or(package);
        let is_rig = package == Path::new(END_TO_END) && program == RIG;
        let group = match test.split_once("::") {
            Some((module, _)) if is_rig => format!("{RIG}::{module}"),
            _ if package == Path::new(END_TO_END) => program.to_owned(),
            _ => package.display().to_string(),
        };
        (group, is_rig)
    }

    /// Adds the results of the steps with these [`cells`](Self::cells). Drops a cell if one of its steps did not
    /// begin.
    pub(crate) fn see(&mut self, cells: Vec<Option<Key>>, results: &[Option<Counts>]) {
        let mut seen: BTreeMap<Key, Option<Counts>> = BTreeMap::new();
        for (key, result) in cells.into_iter().zip(results) {
            let Some(key) = key else { continue };
            let known = seen.entry(key).or_insert(Some(Counts::default()));
            *known = known.zip(*result).map(|(mut known, more)| {
                known += more;
                known
            });
        }
        for (key, counts) in seen {
            match counts {
                Some(counts) => *self.seen.entry(key).or_default() += counts,
                None => {
                    progress::note(&format!("not recorded: {}, which did not begin", key.tests))
                }
            }
        }
    }

    /// Adds the result of a run without tests, such as a bench. The result is only whether the run passed.
    pub(crate) fn see_one(&mut self, host: Kind, has_passed: bool) {
        let has_guest = !self.kernel.is_empty();
        let key = Key {
            host: host.name().to_owned(),
            tests: self.row.clone().unwrap_or_default(),
            kernel: if has_guest { &self.kernel } else { NO_LINUX }.to_owned(),
        };
        let counts = Counts {
            passed: u64::from(has_passed),
            failed: u64::from(!has_passed),
            skipped: 0,
        };
        *self.seen.entry(key).or_default() += counts;
    }

    /// Writes all results into the page, in one step. Refuses if the tree has changed.
    pub(crate) fn write(&self) -> Result<()> {
        let now = commit(&self.root)?;
        let changes = changes(&self.root, &[BY_TESTS])?;
        if now != self.commit || !changes.is_empty() {
            bail!(
                "--record: nothing is recorded, because the tree changed while the tests ran: {}",
                changes.first().unwrap_or(&now)
            );
        }
        let folder = self.lock.parent().context("the lock is in no folder")?;
        fs::create_dir_all(folder)?;
        let lock = File::create(&self.lock)?;
        lock.lock().context("cannot lock the page")?;
        let file = self.root.join(HOSTS);
        let page = fs::read_to_string(&file).with_context(|| format!("cannot read {HOSTS}"))?;
        let mut table = Table::of_page(&page).with_context(|| HOSTS.to_owned())?;
        for (key, counts) in &self.seen {
            let cell = Cell {
                counts: *counts,
                commit: self.commit.clone(),
            };
            table.set(key, cell)?;
        }
        replace_if_different(&file, table.written_into(&page)?.as_bytes())?;
        progress::note(&format!(
            "recorded in {HOSTS}: {} results at {}",
            self.seen.len(),
            self.commit
        ));
        Ok(())
    }
}

/// Returns the path of a step's program.
fn program<'j>(job: &'j Job, step: &Step) -> Option<&'j Path> {
    let mut programs = job.programs.iter();
    programs.find_map(|(name, path)| (*name == step.program).then_some(path.as_path()))
}

/// Returns the files that differ from the present commit, or are not in it, except the page and the files that the
/// pathspecs in `except` exclude.
fn changes(root: &Path, except: &[&str]) -> Result<Vec<String>> {
    let page = format!(":(exclude){HOSTS}");
    let mut arguments = vec!["status", "--porcelain", "--untracked-files=all", "--", ":/"];
    arguments.push(&page);
    arguments.extend(except);
    let lines = git(root, &arguments)?;
    let file = |line: &str| line.get(3..).unwrap_or(line).to_owned();
    Ok(lines.lines().map(file).collect())
}

/// Returns the hash of the present commit, shortened.
fn commit(root: &Path) -> Result<String> {
    let hash = git(root, &["rev-parse", "--short=8", "HEAD"])?;
    Ok(hash.trim().to_owned())
}

fn git(root: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    // git sets these variables in hooks, where they name the repository of the hook.
    for (name, _) in env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"GIT_") {
            command.env_remove(name);
        }
    }
    let output = tool::run(command.arg("-C").arg(root).args(arguments));
    let output = output.context("--record: cannot find out the commit")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests;
