//! Stacks of processes that hang, read by gdb.

use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::{packages, process};

/// Time limit for reading one process, in seconds. The threads of the process are stopped meanwhile.
const PATIENCE: &str = "60";
/// gdb's command, which limits the number of frames that are shown of a thread.
const FRAMES: &str = "thread apply all backtrace 50";
/// Maximum number of processes that are shown.
const PROCESSES: usize = 8;
/// Maximum number of lines that are shown of a process.
const LINES: usize = 1000;

/// Makes sure that there is a gdb. Installs `gdb-minimal` if no gdb starts.
pub(crate) fn ensure() -> Result<()> {
    let there = Command::new("gdb")
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    match there {
        Ok(status) if status.success() => Ok(()),
        _ => packages::ensure(&["gdb-minimal"]),
    }
}

/// Returns the stacks of all threads of the processes of `group`, as text.
pub(crate) fn of_group(group: u32) -> String {
    let mut text = String::new();
    let members = match members(group) {
        Ok(members) => members,
        Err(error) => return format!("no stacks: {error:#}\n"),
    };
    for (process, name) in members.iter().take(PROCESSES) {
        let _ = writeln!(text, "process {process} ({name}):");
        match of_process(*process) {
            Ok(stacks) => text.push_str(&stacks),
            Err(error) => {
                let _ = writeln!(text, "no stacks: {error:#}");
            }
        }
    }
    let more = members.len().saturating_sub(PROCESSES);
    if more > 0 {
        let _ = writeln!(text, "and {more} more processes");
    }
    text
}

/// Returns the processes of `group` and their names.
fn members(group: u32) -> Result<Vec<(u32, String)>> {
    let mut members = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Ok(process) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        // The process may have ended meanwhile.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        if let Some((name, of)) = name_and_group(&stat)
            && of == group
        {
            members.push((process, name.to_owned()));
        }
    }
    members.sort_unstable();
    Ok(members)
}

/// Parses the name and the process group in `/proc/PID/stat`.
fn name_and_group(stat: &str) -> Option<(&str, u32)> {
    // The name may have blanks and brackets in it.
    let (before, after) = stat.rsplit_once(") ")?;
    let (_, name) = before.split_once(" (")?;
    let mut words = after.split(' ');
    let (_state, _parent) = (words.next()?, words.next()?);
    Some((name, words.next()?.parse().ok()?))
}

fn of_process(process: u32) -> Result<String> {
    let mut command = Command::new("timeout");
    process::end_with_us(&mut command);
    let output = command
        .args(["--kill-after=5", PATIENCE, "gdb", "-nx", "-batch", "-p"])
        .arg(process.to_string())
        .args(["-ex", FRAMES])
        // gdb is not to fetch symbols from the network.
        .env("DEBUGINFOD_URLS", "")
        .stdin(Stdio::null())
        .output()
        .context("cannot start timeout")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let stacks: String = text
        .lines()
        .filter(|line| line.starts_with("Thread ") || line.starts_with('#'))
        .take(LINES)
        .flat_map(|line| [line, "\n"])
        .collect();
    if stacks.is_empty() {
        let words = String::from_utf8_lossy(&output.stderr);
        let last = words.lines().next_back().unwrap_or("without a word");
        bail!("gdb failed: {last}");
    }
    Ok(stacks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_and_group_are_read_whatever_the_name() {
        let stat = "77 (a) b (c) S 1 33 33 0 -1 4194560";
        assert_eq!(name_and_group(stat), Some(("a) b (c", 33)));
        assert_eq!(name_and_group("77"), None);
    }
}
