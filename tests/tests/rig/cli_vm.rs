//! Tests the commands about machines and about traces as scripts use them: a machine from its boot to its removal,
//! and a trace into a file.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::fs;
use std::time::Instant;

use hvprobe_fixtures::dwarf;
use hvprobe_tests::program::{Finished, Program, hvprobe, ok, patience};
use hvprobe_tests::rig::rig;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

/// A server, its socket, and a folder for files.
struct Server {
    program: Program,
    socket: String,
    folder: TempDir,
}

impl Server {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket").to_str().unwrap().to_owned();
        let program = Program::start(&["serve", "--socket", &socket]);
        program.wait_err("listening");
        Self {
            program,
            socket,
            folder,
        }
    }

    /// Returns `words` with the option for this server, before any `--`.
    fn words<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        let end = words.iter().position(|word| *word == "--");
        let (options, command) = words.split_at(end.unwrap_or(words.len()));
        [options, &["--socket", &self.socket], command].concat()
    }

    fn start_program(&self, words: &[&str]) -> Program {
        Program::start(&self.words(words))
    }

    fn run(&self, words: &[&str]) -> Finished {
        hvprobe(&self.words(words))
    }

    fn ok(&self, words: &[&str]) -> Vec<String> {
        ok(&self.words(words))
    }

    /// Returns the names of the machines that `vm list` finds with these options.
    fn found(&self, options: &[&str]) -> Vec<String> {
        names(&self.ok(&[&["vm", "list", "--json"], options].concat()))
    }

    /// Returns the names of the probes of `owner`.
    fn owned(&self, owner: &str) -> Vec<String> {
        names(&self.ok(&["probe", "list", "--json", "--owner", owner]))
    }

    fn end(self) {
        self.program.signal(Signal::TERM);
        assert_eq!(self.program.finish().status, Some(0));
    }
}

fn names(lines: &[String]) -> Vec<String> {
    let name = |line: &String| {
        let value: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        value["name"].as_str().unwrap().to_owned()
    };
    lines.iter().map(name).collect()
}

#[test]
fn a_machine_is_followed_from_its_boot_to_its_removal() {
    if rig("cli: a machine from boot to removal").is_none() {
        return;
    }
    let server = Server::start();
    let watch = server.start_program(&["vm", "list", "--watch", "--label", "team=k"]);
    let boot = ["vm", "boot", "--name", "job", "--label", "team=k"];
    let command = ["--", "sh", "-c", "echo hi; exit 42"];
    assert_eq!(server.ok(&[&boot[..], &command].concat()), ["job"]);
    let follow = server.start_program(&["vm", "logs", "--follow", "job"]);
    assert_eq!(server.found(&["--label", "team=k"]), ["job"]);
    assert_eq!(server.found(&["--label", "team=l"]), [""; 0]);
    let removed = server.run(&["vm", "rm", "job"]);
    assert_eq!(removed.status, Some(1), "it runs: {removed:#?}");
    watch.wait_out("job  running");

    let waited = server.run(&["vm", "wait", "job"]);
    assert_eq!(waited.status, Some(42), "{waited:#?}");
    assert_eq!(
        waited.err,
        ["hvprobe: job ended: shutdown, status 42".to_owned()]
    );
    watch.wait_out("job  ended: shutdown, status 42");
    let followed = follow.finish();
    assert_eq!(followed.status, Some(0), "{followed:#?}");
    assert!(followed.out.iter().any(|it| it == "hi"), "{followed:#?}");
    assert_eq!(server.ok(&["vm", "logs", "job"]), followed.out);
    let in_state = |state| server.found(&["--label", "team=k", "--state", state]);
    assert_eq!(in_state("ended"), ["job"]);
    assert_eq!(in_state("running"), [""; 0]);

    server.ok(&["vm", "rm", "job"]);
    watch.wait_out("job  gone");
    let shown = server.run(&["vm", "show", "job"]);
    assert_eq!((shown.status, &shown.out[..]), (Some(1), &[][..]));
    assert_eq!(shown.err, ["hvprobe: there is no machine `job`"]);
    assert_eq!(server.found(&[]), [""; 0]);
    watch.signal(Signal::INT);
    let watched = watch.finish();
    assert_eq!(watched.status, Some(130), "{watched:#?}");
    assert_eq!(watched.out, [""; 0], "nothing after it was gone");
    server.end();
}

/// Returns whether `line` contains a time such as `2026-11-25T15:00:00.123456Z`.
fn has_date(line: &str) -> bool {
    let is_date = |word: &str| {
        let digits = word.chars().filter(char::is_ascii_digit).count();
        let shape: String = word.chars().filter(|it| !it.is_ascii_digit()).collect();
        (digits, &*shape) == (20, "--T::.Z:") && word.starts_with("20")
    };
    line.split_whitespace().any(is_date)
}

#[test]
fn a_trace_writes_into_a_file_with_dates_and_has_an_owner_meanwhile() {
    if rig("cli: a trace into a file").is_none() {
        return;
    }
    let server = Server::start();
    let watch = server.start_program(&["vm", "list", "--watch"]);
    let command = ["--", "workload", "stdin-hold", "1"];
    server.ok(&[&["vm", "boot", "--name", "web"], &command[..]].concat());
    watch.wait_out("web  running");
    // Pauses the machine, so that no hit happens before the planted probes have been checked.
    server.ok(&["vm", "pause", "web"]);
    let file = server.folder.path().join("hits");
    let path = file.to_str().unwrap();
    let probe = ["trace", "-p", "p:mine __x64_sys_getpgid", "--owner", "me"];
    let output = ["--time", "wall", "--output", path, "--hits", "3"];
    let trace = server.start_program(&[&probe[..], &output].concat());
    let since = Instant::now();
    while server.owned("me") != ["mine"] {
        assert!(since.elapsed() < patience(), "nothing was planted");
    }
    assert_eq!(server.owned("x"), [""; 0]);
    server.ok(&["vm", "resume", "web"]);

    let traced = trace.finish();
    assert_eq!(traced.status, Some(0), "{traced:#?}");
    assert_eq!(traced.out, [""; 0]);
    let written = fs::read_to_string(&file).unwrap();
    let hits: Vec<_> = written
        .lines()
        .filter(|it| it.contains(" mine: "))
        .collect();
    assert_eq!(hits.len(), 3, "{written}");
    assert!(hits.iter().all(|line| has_date(line)), "{written}");
    assert_eq!(server.owned("me"), [""; 0]);
    server.end();
}

#[test]
fn debug_information_goes_to_the_server_once_and_answers_for_the_machine() {
    if rig("cli: an upload of debug information").is_none() {
        return;
    }
    let server = Server::start();
    let command = ["--", "sh", "-c", "read line"];
    server.ok(&[&["vm", "boot", "--name", "web"], &command[..]].concat());
    let file = server.folder.path().join("debug");
    let path = file.to_str().unwrap();
    let none = server.run(&["lines", "vfs_test", "--vm", "web"]);
    assert_eq!((none.status, &none.out[..]), (Some(1), &[][..]));
    let upload = ["lines", "vfs_test", "--vm", "web", "--debug-info", path];
    for (bytes, words) in [
        (dwarf::file_of(b"another build"), "of another kernel"),
        (b"nothing of that kind".to_vec(), "ELF"),
    ] {
        fs::write(&file, bytes).unwrap();
        let refused = server.run(&upload);
        assert_eq!((refused.status, &refused.out[..]), (Some(1), &[][..]));
        assert!(refused.err[0].contains(words), "{refused:#?}");
    }

    let shown = server.ok(&["vm", "show", "web"]).concat();
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let build_id = shown["kernel_build_id"].as_str().unwrap().as_bytes();
    let build_id = build_id.chunks(2).map(|digits| {
        let digits = str::from_utf8(digits).unwrap();
        u8::from_str_radix(digits, 16).unwrap()
    });
    fs::write(&file, dwarf::file_of(&build_id.collect::<Vec<_>>())).unwrap();
    let lines = server.ok(&upload);
    assert_eq!(lines[0], "vfs_test fs/test.c:10");
    fs::remove_file(&file).unwrap();
    assert_eq!(server.ok(&upload[..4]), lines);
    let gone = server.run(&upload);
    assert_eq!((gone.status, &gone.out[..]), (Some(1), &[][..]));
    assert!(gone.err[0].contains("cannot read"), "{gone:#?}");
    server.end();
}
