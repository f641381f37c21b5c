//! `cargo lab matrix`: tests the promises that hold on every kernel, on one kernel after another.
//!
//! The promises are the tests of `tests/tests/rig/kernels.rs`. In the table each promise is a column, and each
//! kernel a row. A kernel that is not available, for example without a network, counts as failed; the others are
//! tried nevertheless.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::cargo::{self, Workspace};
use crate::choose::choose;
use crate::kernel::{Choice, NAMED};
use crate::kind::Kind;
use crate::outcome;
use crate::progress;
use crate::record::Recorder;
use crate::retry;
use crate::run::MachineOptions;
use crate::setup::Ready;
use crate::test;
use crate::total::Total;

/// Module of the tests.
const PROMISES: &str = "kernels::";

/// Which kernels, and where.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Test only this kernel, a name or a file; repeatable [default: all Debian kernels]
    #[arg(long, value_name = "NAME|FILE", value_parser = Choice::parse)]
    kernel: Vec<Choice>,
    /// Machine to run on [default: direct if its KVM can run Linux guests, else tcg]
    #[arg(long, value_enum)]
    rig: Option<Kind>,
    /// Maximum number of retries of a failed test, in fresh rigs [default: 4 in an emulated rig, else 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=10))]
    retries: Option<u32>,
    /// Record the results in docs/hosts.md; refused if the tree has changes
    #[arg(long)]
    record: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

/// Name of the row for the results in the table of docs/hosts.md.
const ROW: &str = "matrix";

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    let start = || Recorder::start(&workspace, Some(ROW));
    let mut recorder = options.record.then(start).transpose()?;
    let built = workspace.build(&cargo::EVERYTHING)?;
    let rig = choose(options.rig, &cargo::program_named(&built, "hvprobe")?)?;
    let chosen = match options.kernel.is_empty() {
        true => NAMED.iter().map(Choice::Named).collect(),
        false => options.kernel.clone(),
    };
    let mut table = Table::default();
    for choice in &chosen {
        progress::note(&format!("kernel {}", choice.folder_name()));
        let row = Ready::make(rig, Some(choice)).and_then(|ready| {
            if let Some(recorder) = &mut recorder {
                recorder.with_guests(&ready, Some(choice))?;
            }
            let how = test::Options::in_rig(&options.machine, options.retries, PROMISES);
            test::of_rig(&ready, &built, rig, &how, recorder.as_mut())
        });
        if let Err(error) = &row {
            progress::note(&format!("{error:#}"));
        }
        table.add(choice.folder_name(), row.ok());
    }
    print!("{}", table.render());
    if let Some(recorder) = recorder {
        recorder.write()?;
    }
    Ok(outcome::status(table.is_good()))
}

/// Verdict on each promise on each kernel.
#[derive(Debug, Default)]
struct Table {
    /// The promises: the tests that ran with the first available kernel.
    promises: Vec<String>,
    rows: Vec<(String, Vec<&'static str>)>,
}

const KEPT: &str = "yes";
const KEPT_LATER: &str = "flaky";
/// The test says that the promise cannot be kept on this kernel, and why.
const SKIPPED: &str = "skipped";
const BROKEN: &str = "NO";

impl Table {
    /// Adds a row. `came` has the tests and their results, or is `None` for a kernel that is not available, on
    /// which no promise counts as kept.
    fn add(&mut self, kernel: String, came: Option<(Vec<(String, String)>, Total)>) {
        let Some((tests, total)) = came else {
            self.rows.push((kernel, Vec::new()));
            return;
        };
        let is_about = |line: &str, name: &str| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
        };
        let said = |lines: &[String], name: &str| lines.iter().any(|line| is_about(line, name));
        let verdict = |(step, test): &(String, String)| {
            let test = retry::line(step, test);
            if said(&total.failed, &test) || said(&total.failed, step) {
                BROKEN
            } else if said(&total.flaky, &test) || said(&total.flaky, step) {
                KEPT_LATER
            } else if total.skipped.contains(&test) {
                SKIPPED
            } else {
                KEPT
            }
        };
        self.rows
            .push((kernel, tests.iter().map(verdict).collect()));
        if self.promises.is_empty() {
            let name = |test: String| test.strip_prefix(PROMISES).map(str::to_owned);
            let promises = tests.into_iter().filter_map(|(_, test)| name(test));
            self.promises = promises.collect();
        }
    }

    fn is_good(&self) -> bool {
        let is_kept = |verdicts: &Vec<&str>| {
            !verdicts.is_empty()
                && verdicts.len() == self.promises.len()
                && !verdicts.contains(&BROKEN)
        };
        !self.rows.is_empty() && self.rows.iter().all(|(_, verdicts)| is_kept(verdicts))
    }

    fn render(&self) -> String {
        let widest = self.rows.iter().map(|(kernel, _)| kernel.len()).max();
        let first = widest.unwrap_or(0).max("kernel".len());
        let mut text = format!("\n{:first$}", "kernel");
        for promise in &self.promises {
            text.push_str(&format!("  {}", promise.replace('_', " ")));
        }
        for (kernel, verdicts) in &self.rows {
            text.push_str(&format!("\n{kernel:first$}"));
            for (n, promise) in self.promises.iter().enumerate() {
                let verdict = verdicts.get(n).unwrap_or(&BROKEN);
                text.push_str(&format!("  {verdict:<0$}", promise.len()));
            }
            text.truncate(text.trim_end().len());
        }
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn came(failed: &[&str], flaky: &[&str]) -> Option<(Vec<(String, String)>, Total)> {
        came_skipping(failed, flaky, &[])
    }

    fn came_skipping(
        failed: &[&str],
        flaky: &[&str],
        skipped: &[&str],
    ) -> Option<(Vec<(String, String)>, Total)> {
        let tests = ["counts", "returns", "returns_without_exits"];
        let tests = tests.map(|test| (format!("rig-1: {PROMISES}"), format!("{PROMISES}{test}")));
        let own = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect();
        let mut total = Total::default();
        total.failed = own(failed);
        total.flaky = own(flaky);
        total.skipped = own(skipped);
        Some((tests.into(), total))
    }

    #[test]
    fn table_shows_each_promise_on_each_kernel() {
        let mut table = Table::default();
        assert!(!table.is_good());
        table.add("6.1-cloud".to_owned(), came(&[], &[]));
        let flaky = "rig-1: kernels::counts (passed at the second try; first: x)";
        table.add("6.12-rt".to_owned(), came(&[], &[flaky]));
        assert!(table.is_good());
        let skipped = came_skipping(&[], &[], &["rig-1: kernels::returns"]);
        table.add("stripped".to_owned(), skipped);
        assert!(table.is_good());
        let failed = "rig-1: kernels::returns_without_exits (5 tries)";
        table.add("7.2-rt".to_owned(), came(&[failed], &[]));
        assert!(!table.is_good());
        table.add("gone".to_owned(), None);
        expect![[r#"

            kernel     counts  returns  returns without exits
            6.1-cloud  yes     yes      yes
            6.12-rt    flaky   yes      yes
            stripped   yes     skipped  yes
            7.2-rt     yes     yes      NO
            gone       NO      NO       NO
        "#]]
        .assert_eq(&table.render());
    }

    #[test]
    fn kernel_that_cannot_be_had_is_not_good() {
        let mut table = Table::default();
        table.add("6.1-cloud".to_owned(), came(&[], &[]));
        table.add("gone".to_owned(), None);
        assert!(!table.is_good());
    }
}
