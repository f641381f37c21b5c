//! Counts the instructions that hvprobe's engine executes for a hit, on this machine, under callgrind.
//!
//! The counted program is the example `hit_cost` of the engine's package. It runs the handler of a hit on a
//! synthetic guest, without the entries into the guest and the ioctls around a hit. The numbers are the same in
//! every run on every machine.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::cargo::{self, Executable};
use crate::{packages, process, progress, tool};

/// Kinds of hits that the example can count.
const KINDS: [&str; 9] = [
    "emulated",
    "emulated-post",
    "emulated-read",
    "boosted",
    "stepped",
    "followed",
    "returned",
    "both",
    "foreign",
];
/// Number of hits that are counted together.
const HITS: u64 = 1000;

/// Counts the instructions of a hit, for each kind of hit, by running the example `hit_cost`, which must be in
/// `built`. Returns one `KIND=NUMBER` for each kind, as `hits-bench --instructions` takes it. If there is no
/// valgrind and it cannot be installed, prints a note and counts nothing.
pub(crate) fn count(built: &[Executable]) -> Result<Vec<String>> {
    if let Err(error) = packages::ensure(&["valgrind"]) {
        progress::note(&format!("instructions are not counted: {error:#}"));
        return Ok(Vec::new());
    }
    let program = cargo::program_named(built, "hit_cost")?;
    progress::step("counting the instructions of hits", || {
        KINDS
            .iter()
            .map(|kind| Ok(format!("{kind}={}", of(&program, kind)?)))
            .collect()
    })
}

/// Returns the number of instructions of one hit, rounded.
fn of(program: &Path, kind: &str) -> Result<u64> {
    let mut command = Command::new("valgrind");
    process::end_with_us(&mut command);
    command
        .args([
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            "--collect-atstart=no",
            "--toggle-collect=*hit_cost::hits*",
        ])
        .arg(program)
        .args([kind, &HITS.to_string()]);
    let output = tool::run(&mut command).with_context(|| format!("hit_cost {kind} failed"))?;
    collected(&String::from_utf8_lossy(&output.stderr))
        .map(|collected| (collected + HITS / 2) / HITS)
        .with_context(|| format!("valgrind did not count hit_cost {kind}"))
}

/// Parses the number in `==7== Collected : 12345`. Returns `None` if nothing was counted.
fn collected(words: &str) -> Option<u64> {
    words
        .lines()
        .find_map(|line| line.split_once("Collected : "))
        .and_then(|(_, number)| number.trim().parse().ok())
        .filter(|number| *number > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collected_instructions_are_read() {
        let words = "==7== Events    : Ir\n==7== Collected : 3210000\n==7== \n==7== I   refs: 9\n";
        assert_eq!(collected(words), Some(3_210_000));
        assert_eq!(collected("==7== Collected : 0\n"), None);
        assert_eq!(collected("valgrind: no such file\n"), None);
    }
}
