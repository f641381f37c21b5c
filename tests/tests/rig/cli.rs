//! Tests the program `hvprobe` as a user runs it: its output, its exit status, and that it leaves nothing behind.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::env;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hvprobe_fixtures::dwarf;
use hvprobe_tests::names;
use hvprobe_tests::program::{Finished, Program, hvprobe, ok, patience};
use hvprobe_tests::rig::{guest, rig};
use rustix::io::Errno;
use rustix::process::{Signal, test_kill_process_group};
use serde_json::Value;
use tempfile::TempDir;

/// Calls getpgid without end. Nothing else in the guest calls it.
const BUSY: [&str; 4] = ["--", "workload", "stdin-hold", "1"];
/// Calls getpgid without end, but slowly enough for a reader to keep up.
const CALM: [&str; 4] = [
    "--",
    "sh",
    "-c",
    "while workload calls getpgid 10; do :; done",
];

fn json(lines: &[String]) -> Vec<Value> {
    let parse = |line: &String| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
    lines.iter().map(parse).collect()
}

/// Fields of a printed hit.
#[derive(Debug)]
struct Hit<'a> {
    comm: &'a str,
    pid: u32,
    seconds: f64,
    event: &'a str,
    place: &'a str,
}

/// Parses the line of a hit: `comm-pid [cpu] seconds: event: (symbol+offset) registers`.
fn hit(line: &str) -> Option<Hit<'_>> {
    let (task, rest) = line.trim_start().split_once(char::is_whitespace)?;
    let (comm, pid) = task.rsplit_once('-')?;
    let mut words = rest.split_whitespace();
    let cpu = words.next()?.strip_prefix('[')?.strip_suffix(']')?;
    assert_eq!(cpu, "000", "{line}");
    let seconds = words.next()?.strip_suffix(':')?;
    assert_eq!(seconds.split_once('.')?.1.len(), 6, "{line}");
    let event = words.next()?.strip_suffix(':')?;
    let place = words.next()?.strip_prefix('(')?.strip_suffix(')')?;
    for register in ["rdi=", "rsi=", "rdx="] {
        hexadecimal(words.next()?.strip_prefix(register)?)?;
    }
    words.next().is_none().then_some(Hit {
        comm,
        pid: pid.parse().ok()?,
        seconds: seconds.parse().ok()?,
        event,
        place,
    })
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// Returns place, hits, missed and events of the probe `name` in the table at the end of a trace.
fn row<'a>(lines: &'a [String], name: &str) -> (&'a str, u64, u64, u64) {
    let row = lines.iter().find_map(|line| {
        let mut cells = line.split_whitespace();
        if cells.next()? != name {
            return None;
        }
        let place = cells.next()?;
        let mut number = || cells.next()?.parse().ok();
        Some((place, number()?, number()?, number()?))
    });
    row.unwrap_or_else(|| panic!("no row of {name}: {lines:#?}"))
}

fn stderr_has(finished: &Finished, text: &str) -> bool {
    finished.err.iter().any(|line| line.contains(text))
}

const FUNCTION: &str = "__x64_sys_getpgid";

/// Returns the place `offset` bytes into the function, as the table at the end of a trace writes it.
fn place_at(offset: u64) -> String {
    match offset {
        0 => FUNCTION.to_owned(),
        offset => format!("{FUNCTION}+{offset:#x}"),
    }
}

/// Returns the text that marks a printed hit of the probe `calls` at the entry.
fn called() -> String {
    format!("calls: ({FUNCTION}+{:#x})", names::entry(FUNCTION))
}

#[test]
fn run_prints_every_hit_in_columns_and_closes_with_a_table() {
    if rig("cli: every hit").is_none() {
        return;
    }
    let behind = names::behind_entry(FUNCTION);
    let run = hvprobe(&[
        "run",
        "--raw",
        "-p",
        "p:entry __x64_sys_getpgid",
        "-p",
        &format!("p:inside {FUNCTION}+{behind:#x}"),
        "--timings",
        "--",
        "workload",
        "calls",
        "getpgid",
        "50",
    ]);
    assert_eq!(run.status, Some(0), "{run:#?}");
    assert!(stderr_has(&run, "hvprobe: booting kernel (1 CPU, 256 MiB)"));
    assert!(stderr_has(&run, ", 2 of 2 probes planted"), "{run:#?}");

    let (header, hits) = run.out.split_at(2);
    assert!(header.iter().all(|line| line.starts_with('#')), "{run:#?}");
    assert!(header[0].contains("TASK-PID"), "{run:#?}");
    let parse = |line: &'_ String| -> (String, String, f64) {
        let hit = hit(line).unwrap_or_else(|| panic!("no hit: {line}, of {:#?}", run.err));
        assert_eq!(hit.comm, "workload");
        assert!(hit.pid > 1, "{hit:?}");
        (hit.event.to_owned(), hit.place.to_owned(), hit.seconds)
    };
    let hits: Vec<_> = hits.iter().map(parse).collect();
    assert!(hits.is_sorted_by_key(|(_, _, seconds)| *seconds));
    // Each call is seen at the entry and then inside.
    assert_eq!(hits.len(), 100);
    for call in hits.chunks(2) {
        let seen = [&call[0], &call[1]].map(|(event, place, _)| (event.as_str(), place.as_str()));
        assert_eq!(
            seen,
            [
                (
                    "entry",
                    &*format!("{FUNCTION}+{:#x}", names::entry(FUNCTION))
                ),
                ("inside", &*format!("{FUNCTION}+{behind:#x}"))
            ]
        );
    }
    let [entry, inside] = [names::entry(FUNCTION), behind].map(place_at);
    assert_eq!(row(&run.err, "entry"), (&*entry, 50, 0, 50));
    assert_eq!(row(&run.err, "inside"), (&*inside, 50, 0, 50));
    for line in run.err.iter().filter(|line| line.contains(" ms  ")) {
        eprintln!("{line}");
    }
}

#[test]
fn run_stops_after_as_many_hits_as_asked_for_and_prints_them_as_json() {
    if rig("cli: hits as JSON").is_none() {
        return;
    }
    let probe = ["--raw", "-p", "p:calls __x64_sys_getpgid"];
    let run = hvprobe(&[&["run", "--json", "--hits", "3"], &probe[..], &BUSY].concat());
    assert_eq!(run.status, Some(0), "{run:#?}");
    let mut lines = json(&run.out);
    // The guest calls the function as fast as it can. Events for which there is no room are reported as dropped.
    lines.retain(|line| line["type"] != "dropped" || line["count"] == 0);
    let (summaries, events): (Vec<_>, Vec<_>) = lines
        .into_iter()
        .partition(|line| line["type"] == "summary");
    assert_eq!(events.len(), 3, "{run:#?}");
    for event in &events {
        assert_eq!(event["type"], "event");
        assert_eq!(event["event"], "calls");
        assert_eq!(event["symbol"], "__x64_sys_getpgid");
        assert_eq!(event["comm"], "workload");
        let registers = event["registers"].as_object().unwrap();
        for name in [
            "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rsp", "rbp", "r8", "r9", "r10", "r11",
            "r12", "r13", "r14", "r15", "rip", "rflags",
        ] {
            let value = registers[name].as_str().and_then(hexadecimal);
            assert!(value.is_some(), "{name}: {event}");
        }
        assert_eq!(registers.len(), 18, "{event}");
        let rip = registers["rip"].as_str().and_then(hexadecimal).unwrap();
        assert!(rip >= 0xffff_ffff_8000_0000, "in the kernel's text");
    }
    assert_eq!(summaries.len(), 1, "{run:#?}");
    assert!(summaries[0]["hits"].as_u64().unwrap() >= 3);
    assert_eq!(summaries[0]["events"], 3);
}

#[test]
fn run_passes_the_status_of_the_guests_command_on() {
    if rig("cli: status").is_none() {
        return;
    }
    let run = hvprobe(&["run", "--json", "--", "sh", "-c", "exit 42"]);
    assert_eq!(run.status, Some(42), "{run:#?}");
    let lines = json(&run.out);
    assert_eq!(lines.len(), 1, "{run:#?}");
    assert_eq!(lines[0]["type"], "ended");
    assert_eq!(lines[0]["reason"], "shutdown");
    assert_eq!(lines[0]["guest_status"], 42);
    assert!(!stderr_has(&run, "did not end well"), "{run:#?}");
}

#[test]
fn run_says_that_the_guest_panicked_and_fails() {
    if rig("cli: panic").is_none() {
        return;
    }
    let run = hvprobe(&["run", "--", "sh", "-c", "echo c >/proc/sysrq-trigger"]);
    assert_eq!(run.status, Some(1), "{run:#?}");
    assert!(
        stderr_has(&run, "hvprobe: the guest did not end well"),
        "{run:#?}"
    );
    let why = "its kernel panicked: sysrq triggered crash";
    assert!(stderr_has(&run, why), "{run:#?}");
    assert!(stderr_has(&run, "its console ended with:"), "{run:#?}");
    assert_eq!(run.out, [""; 0]);
}

#[test]
fn interrupted_run_ends_in_order_and_leaves_nothing_behind() {
    let Some(kind) = rig("cli: interrupt") else {
        return;
    };
    let probe = ["--raw", "-p", "p:calls __x64_sys_getpgid"];
    let run = Program::start(&[&["run"], &probe[..], &BUSY].concat());
    run.wait_out(&called());
    let (group, asked) = (run.pid(), Instant::now());
    run.signal(Signal::INT);
    let run = run.finish();
    let took = asked.elapsed();
    eprintln!("ended {took:?} after the interrupt");
    assert_eq!(run.status, Some(130), "{:#?}", run.err);
    let bound = if kind == "bochs" { 120 } else { 10 };
    assert!(took < Duration::from_secs(bound), "{took:?}");

    // Probes were removed before the counts were read, so the table is complete.
    assert!(
        run.out
            .iter()
            .all(|line| hit(line).is_some() || line.contains("dropped"))
    );
    let (place, hits, missed, events) = row(&run.err, "calls");
    assert_eq!((place, missed), (&*place_at(names::entry(FUNCTION)), 0));
    let printed = 1 + run.out.iter().filter_map(|line| hit(line)).count() as u64;
    assert_eq!(events, printed);
    assert!(hits >= events, "{:#?}", run.err);
    assert_eq!(test_kill_process_group(group), Err(Errno::SRCH));
}

#[test]
fn server_keeps_machines_and_probes_for_clients_that_come_and_go() {
    if rig("cli: server").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let at = ["--socket", path.to_str().unwrap()];
    let server = Program::start(&[&["serve"], &at[..]].concat());
    let line = server.wait_err("listening");
    assert_eq!(line, format!("hvprobe: listening on {}", path.display()));

    let booted = ok(&[&["vm", "boot", "--name", "web"], &at[..], &CALM].concat());
    assert_eq!(booted, ["web"]);
    let add = ["probe", "add", "--raw", "--json"];
    let calls = ["p:calls __x64_sys_getpgid"];
    let added = json(&ok(&[&add[..], &at, &calls].concat()));
    assert_eq!(added.len(), 1);
    assert_eq!(added[0]["name"], "calls");
    // The trace ends once the guest is up and calls the function.
    let trace = ["trace", "--json", "--probe", "calls", "--hits", "5"];
    let traced = json(&ok(&[&trace[..], &at].concat()));
    let hits = traced.iter().filter(|line| line["type"] == "event");
    assert_eq!(hits.count(), 5, "{traced:?}");

    refuses_debug_information_of_other_kernels(&at, folder.path());

    let vanishing = Program::start(&[&["trace"], &at[..]].concat());
    vanishing.wait_out(&called());
    vanishing.signal(Signal::KILL);
    assert_eq!(vanishing.finish().status, None);

    let list = [&["probe", "list", "--json"], &at[..]].concat();
    let probes = json(&ok(&list));
    assert_eq!(probes.len(), 1);
    assert_eq!(probes[0]["id"], added[0]["id"]);
    assert_eq!(probes[0]["state"], "placed");
    assert_eq!(probes[0]["disabled"], false);
    assert_eq!(probes[0]["symbol"], "__x64_sys_getpgid");
    assert!(probes[0]["hits"].as_u64().unwrap() > 5, "{probes:?}");
    ok(&[&["probe", "remove", "calls"], &at[..]].concat());
    assert_eq!(ok(&list), [""; 0]);

    // The guest's handler takes each NMI and asks for its reason, and the guest survives.
    ok(&[&["probe", "add", "p:nmi default_get_nmi_reason"], &at[..]].concat());
    let to_one = ["vm", "nmi", "--cpu", "0", "web"];
    for (words, addressee, nth) in [(&to_one[..2], "all CPUs", 1), (&to_one, "CPU 0", 2)] {
        let sent = hvprobe(&[words, &at].concat());
        assert_eq!(sent.status, Some(0), "{sent:#?}");
        assert_eq!(sent.err, [format!("hvprobe: web: NMI sent to {addressee}")]);
        let since = Instant::now();
        while json(&ok(&list))[0]["hits"].as_u64() != Some(nth) {
            assert!(since.elapsed() < patience(), "not taken");
        }
    }
    let nowhere = hvprobe(&[&["vm", "nmi", "--cpu", "1"], &at[..]].concat());
    assert_eq!(nowhere.status, Some(1));
    assert!(
        stderr_has(&nowhere, "there is no virtual CPU 1"),
        "{nowhere:#?}"
    );

    let stopped = hvprobe(&[&["vm", "stop"], &at[..]].concat());
    assert_eq!(stopped.status, Some(0), "{stopped:#?}");
    assert_eq!(stopped.err, ["hvprobe: web ended: stopped"]);
    let machines = json(&ok(&[&["vm", "list", "--json"], &at[..]].concat()));
    assert_eq!(machines.len(), 1);
    assert_eq!(machines[0]["state"], "ended");

    let group = server.pid();
    server.signal(Signal::TERM);
    let served = server.finish();
    assert_eq!(served.status, Some(0), "{served:#?}");
    // A busy emulated machine may prevent the server from determining the time of a hit. The server logs that once.
    let unknown_time = "there are hits whose time is unknown";
    let said: Vec<_> = served
        .err
        .iter()
        .filter(|it| !it.contains(unknown_time))
        .collect();
    assert_eq!(said, ["hvprobe: stopping"]);
    assert!(!Path::new(&path).exists());
    assert_eq!(test_kill_process_group(group), Err(Errno::SRCH));
}

/// Checks that probes at source lines are planted only in the kernel to which the lines belong.
fn refuses_debug_information_of_other_kernels(at: &[&str], folder: &Path) {
    let shown = json(&ok(&[&["vm", "show", "web"], at].concat()));
    let own = shown[0]["kernel_build_id"].as_str().unwrap();
    let bytes = (0..own.len()).step_by(2);
    let bytes: Result<Vec<_>, _> = bytes
        .map(|at| u8::from_str_radix(&own[at..at + 2], 16))
        .collect();
    let file = folder.join("vmlinux");
    for (build_id, said) in [
        (
            dwarf::BUILD_ID.to_vec(),
            format!("that of web's kernel {own}"),
        ),
        // This file has the build id of the guest's kernel, which has no such function.
        (bytes.unwrap(), "unknown symbol `vfs_test`".to_owned()),
    ] {
        fs::write(&file, dwarf::file_of(&build_id)).unwrap();
        for command in [&["trace", "-p"][..], &["probe", "add"]] {
            let file = ["vfs_test:1", "--debug-info", file.to_str().unwrap()];
            let refused = hvprobe(&[command, &file, at].concat());
            assert_eq!(refused.status, Some(1), "{refused:#?}");
            assert!(stderr_has(&refused, &said), "{said}: {refused:#?}");
        }
    }
}

/// A server with a machine that has the probe `stays`; `hvprobe trace -p` adds another.
struct Traced {
    server: Program,
    socket: String,
    _folder: TempDir,
}

impl Traced {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket").to_str().unwrap().to_owned();
        let at = ["--socket", &socket];
        let server = Program::start(&[&["serve"], &at[..]].concat());
        server.wait_err("listening");
        ok(&[&["vm", "boot", "--name", "web"], &at[..], &CALM].concat());
        ok(&[&["probe", "add", "p:stays __x64_sys_getpgid"], &at[..]].concat());
        Self {
            server,
            socket,
            _folder: folder,
        }
    }

    fn probes(&self) -> Vec<Value> {
        json(&ok(&["probe", "list", "--json", "--socket", &self.socket]))
    }

    fn names(&self) -> Vec<String> {
        let name = |probe: Value| probe["name"].to_string();
        self.probes().into_iter().map(name).collect()
    }

    fn trace(&self) -> Program {
        let words = ["trace", "-p", "p:mine do_getpgid", "--socket", &self.socket];
        let trace = Program::start(&words);
        trace.wait_out(" mine: ");
        assert_eq!(self.names(), [r#""stays""#, r#""mine""#]);
        trace
    }

    fn only_one_stays(&self, after: &str) {
        let since = Instant::now();
        while self.names() != [r#""stays""#] {
            assert!(since.elapsed() < patience(), "{after}: {:?}", self.names());
        }
        eprintln!("{after}: gone after {:?}", since.elapsed());
    }

    /// Stops the server after a further hit, which shows that the guest still runs.
    fn end(self) {
        let hits = || self.probes()[0]["hits"].as_u64();
        let (before, since) = (hits(), Instant::now());
        while hits() == before {
            assert!(since.elapsed() < patience(), "no hit since {before:?}");
        }
        self.server.signal(Signal::TERM);
        assert_eq!(self.server.finish().status, Some(0));
    }
}

#[test]
fn what_a_trace_plants_goes_with_it_when_it_ends_dies_or_does_not_run_for_long() {
    if rig("cli: a trace that plants, and goes").is_none() {
        return;
    }
    let traced = Traced::start();
    let interrupted = traced.trace();
    interrupted.signal(Signal::INT);
    let interrupted = interrupted.finish();
    assert_eq!(interrupted.status, Some(130), "{interrupted:#?}");
    let (_, hits, _, events) = row(&interrupted.err, "mine");
    assert!(hits >= events && events > 0, "{interrupted:#?}");
    // The trace ends only after its probe has been removed.
    assert_eq!(traced.names(), [r#""stays""#]);

    let killed = traced.trace();
    killed.signal(Signal::KILL);
    assert_eq!(killed.finish().status, None);
    traced.only_one_stays("killed");

    // The connection of a frozen trace stays open, but carries no data.
    let frozen = traced.trace();
    frozen.signal(Signal::STOP);
    traced.only_one_stays("frozen");
    frozen.signal(Signal::CONT);
    let frozen = frozen.finish();
    assert_eq!(frozen.status, Some(1), "{frozen:#?}");
    let why = "this program did not run for too long";
    assert!(stderr_has(&frozen, why), "{frozen:#?}");
    traced.end();
}

/// Sets the host name of an emulated machine, and returns it. Returns `None` on a real machine, whose own name may
/// be a part of any word.
fn host_name() -> Option<String> {
    const NAME: &str = "tower-of-tests";
    let emulated = env::var("HVPROBE_RIG").is_ok_and(|rig| rig != "direct");
    emulated.then(|| {
        fs::write("/proc/sys/kernel/hostname", NAME).unwrap();
        NAME.to_owned()
    })
}

#[test]
fn report_of_the_doctor_describes_all_of_the_host_but_which_one_it_is() {
    const WAYS: [&str; 6] = [
        "kprobe, optimized",
        "kprobe, emulated",
        "kprobe, boosted",
        "kprobe, stepped",
        "return probe, optimized",
        "return probe, exit at the entry",
    ];
    if rig("cli: report").is_none() {
        return;
    }
    let name = host_name();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.md");
    let (file, kernel) = (file.to_str().unwrap(), guest(1, &[]).kernel);
    let kernel = kernel.to_str().unwrap();
    let run = hvprobe(&["doctor", "--report", file, "--kernel", kernel]);
    assert_eq!(run.status, Some(0), "{run:#?}");
    assert!(stderr_has(&run, "the report is in"), "{run:#?}");
    let report = fs::read_to_string(file).unwrap();
    eprintln!("{report}");
    for part in [
        "## processor",
        "- vendor: ",
        "- API version: 12",
        "- release: ",
    ] {
        assert!(report.contains(part), "{part}");
    }
    for way in WAYS {
        let row = report.lines().find(|line| line.starts_with(way));
        let row = row.unwrap_or_else(|| panic!("no row of {way}"));
        let cells: Vec<&str> = row[way.len()..].split_whitespace().collect();
        assert_eq!(cells[1..3], ["ok", "6000"], "{row}");
        let exits: f64 = cells[4].parse().unwrap();
        let expected = match way {
            _ if way.ends_with("optimized") => 0.0,
            "kprobe, stepped" => 2.0,
            _ => 1.0,
        };
        // Further exits are due to the console and to other work of the guest's kernel.
        assert!((exits - expected).abs() < 0.1, "{row}");
    }
    assert!(report.contains("the function is as it was"));

    let text = report.to_ascii_lowercase();
    let secrets = fs::read_dir("/sys/class/net").unwrap();
    let cards = secrets.map(|card| fs::read_to_string(card.unwrap().path().join("address")));
    let command_line = fs::read_to_string("/proc/cmdline").unwrap();
    let secrets = cards.flatten().chain(name).chain([command_line]);
    for secret in secrets {
        let secret = secret.trim().to_ascii_lowercase();
        assert!(!text.contains(&secret), "{secret}");
    }
    let numbers = text.split(|c: char| !(c.is_ascii_digit() || c == '.'));
    let is_ip = |word: &&str| word.parse::<std::net::Ipv4Addr>().is_ok();
    assert_eq!(numbers.clone().find(is_ip), None);
    let digits = text.split(|c: char| !c.is_ascii_hexdigit());
    let kernel_address = |word: &&str| word.len() == 16 && word.starts_with("ffff");
    assert_eq!(digits.clone().find(kernel_address), None);
}
