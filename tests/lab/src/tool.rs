//! Tools of this machine, each run to its end. A failure is one line with the tool's own reason.

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Output, Stdio};

use anyhow::{Result, anyhow, bail};

/// Runs a tool without input. If it fails, the error contains the tool's reason.
pub(crate) fn run(command: &mut Command) -> Result<Output> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| not_started(&program, &error))?;
    if output.status.success() {
        return Ok(output);
    }
    if let Some(signal) = output.status.signal() {
        bail!("{program} was ended by signal {signal}");
    }
    bail!(
        "{program}: {}",
        reason(&String::from_utf8_lossy(&output.stderr))
    );
}

/// Returns the error of a tool that could not be started.
pub(crate) fn not_started(program: &str, error: &std::io::Error) -> anyhow::Error {
    if error.kind() == ErrorKind::NotFound {
        anyhow!("{program} is not there: the lab takes its tools and kernels from Debian's apt")
    } else {
        anyhow!("{program} does not start: {error}")
    }
}

/// Returns the line with the reason of a failure: the first line in which apt names an error, or else the last
/// line, which is the reason in most tools. npm prints further lines after its reason, which are passed over.
fn reason(words: &str) -> &str {
    let mut lines = words.lines().filter(|line| !line.trim().is_empty());
    let apt = lines.clone().find_map(|line| line.strip_prefix("E: "));
    let last = lines.rfind(|line| !line.starts_with("npm error") || line.contains(" reason: "));
    apt.or(last).unwrap_or("it gave no reason").trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_the_line_that_says_why() {
        let npm = "npm error code ECONNREFUSED\n\
                   npm error FetchError: request to http://x failed, reason: connect ECONNREFUSED\n\
                   npm error     at ClientRequest\n\
                   npm error A complete log of this run can be found in: /x\n";
        assert!(reason(npm).ends_with("reason: connect ECONNREFUSED"));
        let pip = "WARNING: retrying\nERROR: No matching distribution found for grpcio\n\n";
        let why = "ERROR: No matching distribution found for grpcio";
        assert_eq!(reason(pip), why);
        let apt = "W: something\nE: Failed to fetch http://x  Could not connect\nE: more\n";
        assert_eq!(reason(apt), "Failed to fetch http://x  Could not connect");
        assert_eq!(reason("one\ntwo\n\n"), "two");
        assert_eq!(reason(" \n"), "it gave no reason");
    }

    #[test]
    fn tool_that_is_not_there_is_named() {
        let error = run(&mut Command::new("no-such-tool-of-the-lab")).unwrap_err();
        let words = error.to_string();
        assert!(
            words.contains("no-such-tool-of-the-lab is not there"),
            "{words}"
        );
    }

    #[test]
    fn tool_that_fails_is_named_with_its_reason() {
        let run = |script: &str| run(Command::new("sh").args(["-c", script]));
        let error = run("echo one >&2; echo two >&2; exit 3").unwrap_err();
        assert_eq!(error.to_string(), "sh: two");
        let error = run("kill -9 $$").unwrap_err();
        assert_eq!(error.to_string(), "sh was ended by signal 9");
        assert_eq!(run("echo out").unwrap().stdout, b"out\n");
    }
}
