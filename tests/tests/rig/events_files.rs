//! Runs files of definitions with filters and histograms on a stock guest, and compares the results with those of
//! the guest's own kernel for the same lines.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use hvprobe_tests::rig::{quickly, rig};
use serde_json::Value;

/// Lines that set triggers of events. Both a shell in the guest and hvprobe read them.
const LINES: &str = "\
echo 'hist:keys=len:vals=len if comm == \"dd\"' > events/kprobes/reads/trigger
echo 'hist:keys=len.log2 if comm == \"dd\" && len > 10' >> /sys/kernel/tracing/events/kprobes/reads/trigger
echo 'hist:keys=n.hex if comm == \"dd\"' > events/g/done/trigger
";
/// An event whose hits are printed, not counted.
const PRINTED: &str = "\
p:opens do_sys_openat2 name=+0(%si):ustring
events/kprobes/opens/filter:name ~ \"/proc/v*\"
";
/// Printed by a guest whose kernel has no histograms.
const NONE: &str = "no histograms here";

/// Returns the definitions of the events to count, which are calls of `function` and returns from it.
fn definitions(function: &str) -> [String; 2] {
    [
        format!("p:reads {function} len=%dx:u64"),
        format!("r:g/done {function} n=$retval:u64"),
    ]
}

/// Returns the entries of each histogram in `printed`. The key says whether the histogram is ours, and what its
/// trigger is.
fn histograms(printed: &str) -> BTreeMap<(bool, String), Vec<String>> {
    let mut found = BTreeMap::new();
    for section in printed.split("# event histogram").skip(1) {
        let lines = section.lines().map(str::trim_end);
        let trigger = lines
            .clone()
            .find_map(|line| line.strip_prefix("# trigger info: "))
            .expect("a trigger");
        let ours = !trigger.ends_with(" [active]");
        let of = trigger.trim_end_matches(" [active]").to_owned();
        let mut entries: Vec<_> = lines
            .filter(|line| line.starts_with('{'))
            .map(str::to_owned)
            .collect();
        entries.sort();
        found.insert((ours, of), entries);
    }
    found
}

#[test]
fn lines_of_a_file_do_what_they_do_in_a_guest() {
    if rig("files of definitions held against the kernel's").is_none() {
        return;
    }
    let file = tempfile::NamedTempFile::new().expect("there is room");
    // Our probes are on `ksys_read`, and the kernel's on `vfs_read`, which `ksys_read` calls with the same length.
    let ours = definitions("ksys_read").join("\n");
    fs::write(&file, format!("{ours}\n{LINES}{PRINTED}")).expect("it can be written");
    let theirs = definitions("vfs_read").map(|line| format!("echo '{line}' >> kprobe_events\n"));
    let script = format!(
        "mount -t tracefs t /sys/kernel/tracing 2>/dev/null; cd /sys/kernel/tracing\n\
         grep -q hist:keys README || echo {NONE}\n\
         {}{LINES}\
         for bs in 1 2 3 10 11 64 300 4096; do \
         dd if=/dev/zero of=/dev/null bs=$bs count=$((bs % 5 + 2)) 2>/dev/null; done\n\
         cat /proc/version /proc/uptime >/dev/null\n\
         cat events/kprobes/reads/hist events/g/done/hist; echo end of histograms",
        theirs.concat()
    );
    let mut command = Command::new("hvprobe");
    command
        .arg("run")
        .args(quickly())
        .args(["--console", "--events"])
        .arg(file.path());
    command.args(["--", "sh", "-c", &script]);
    let output = command
        .stdin(Stdio::null())
        .output()
        .expect("hvprobe is there");
    let printed = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && printed.contains("end of histograms"),
        "{stderr}\n{printed}"
    );

    let found = histograms(&printed);
    let of = |ours| {
        found
            .iter()
            .filter(move |((is_ours, _), _)| *is_ours == ours)
    };
    assert_eq!(of(true).count(), 3, "{printed}");
    for event in ["kprobes/reads", "g/done"] {
        assert!(
            printed.contains(&format!("# events/{event}/hist")),
            "{printed}"
        );
    }
    if printed.contains(NONE) {
        eprintln!("skipped: the guest's kernel has no histograms to hold ours against");
    } else {
        assert_eq!(of(false).count(), 3, "{printed}");
        for ((_, trigger), entries) in of(false) {
            assert!(entries.len() > 1, "{printed}");
            let ours = found.get(&(true, trigger.clone()));
            assert_eq!(ours, Some(entries), "{trigger}\n{printed}");
        }
    }

    let events: Vec<_> = stderr
        .lines()
        .filter(|line| line.contains("opens: "))
        .collect();
    assert!(!events.is_empty(), "{stderr}");
    for event in &events {
        assert!(event.contains("name=\"/proc/v"), "{event}\n{stderr}");
    }
}

#[test]
fn traces_count_what_their_files_say_and_print_the_rest() {
    if rig("a trace with a file of definitions").is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("there is room");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (socket, file) = (at("socket"), at("events"));
    let lines = "p:calls do_getpgid\n\
                 p:g/calls do_getpgid\n\
                 p:printed __x64_sys_getpgid\n\
                 events/kprobes/calls/trigger:hist:keys=comm\n\
                 events/g/calls/trigger:hist:keys=common_cpu:vals=common_pid.min\n\
                 events/kprobes/printed/filter:comm == \"workload\"\n";
    fs::write(&file, lines).expect("it can be written");
    let _server = Server::start(&socket);
    let boot = ["vm", "boot", "--name", "web"];
    let command = ["--", "workload", "stdin-hold", "1"];
    let booted = client_output(&socket, &[&boot[..], &quickly(), &command].concat());
    assert_eq!(booted.trim(), "web");
    let trace = [
        "trace", "--vm", "web", "--json", "--hits", "5", "--events", &file,
    ];
    let printed = client_output(&socket, &trace);
    let lines: Vec<Value> = printed
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let of = |ty: &str| -> Vec<_> { lines.iter().filter(|line| line["type"] == ty).collect() };
    let events = of("event");
    assert_eq!(events.len(), 5, "{printed}");
    assert!(
        events.iter().all(|it| it["event"] == "printed"),
        "{printed}"
    );
    let entries = of("entry");
    let counted: Vec<_> = entries.iter().map(|entry| &entry["event"]).collect();
    assert_eq!(counted, ["kprobes/calls", "g/calls"], "{printed}");
    assert_eq!(entries[0]["keys"]["comm"], "workload");
    assert!(entries[0]["hits"].as_u64() >= Some(5), "{printed}");
    // The probes that belong to the trace have been removed.
    assert_eq!(
        client_output(&socket, &["probe", "list", "--vm", "web", "--json"]),
        ""
    );
}

/// A server process, which is killed on drop.
struct Server(Child);

impl Server {
    /// Starts a server and waits until it listens.
    fn start(socket: &str) -> Self {
        let mut command = Command::new("hvprobe");
        command.args(["serve", "--socket", socket]);
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        let mut server = Self(command.spawn().expect("hvprobe is there"));
        let errors = server.0.stderr.take().expect("a pipe");
        let mut line = String::new();
        let read = BufReader::new(errors).read_line(&mut line);
        assert!(read.is_ok() && line.contains("listening"), "{line}");
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may already have ended.
        let _killed = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// Runs `hvprobe` as a client of the server at `socket` and returns its output.
fn client_output(socket: &str, words: &[&str]) -> String {
    let output = Command::new("hvprobe")
        .args(words)
        .env("HVPROBE_SOCKET", socket)
        .stdin(Stdio::null())
        .output()
        .expect("hvprobe is there");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}
