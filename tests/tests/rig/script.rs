//! Runs scripts in the language of bpftrace on a stock guest, and compares their maps with histograms of the
//! guest's own kernel.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};

use hvprobe_tests::rig::{quickly, rig};

/// Sizes of the counted reads of `dd`.
const SIZES: [u64; 9] = [1, 2, 3, 10, 11, 64, 300, 1024, 4096];
/// Output of a guest whose kernel has no histograms.
const NONE: &str = "no histograms here";

/// Returns the number of reads with this size that `dd` makes.
fn count(size: u64) -> u64 {
    size % 5 + 2
}

/// Runs `hvprobe run --console` with `args`, and `script` in the guest.
fn run(args: &[&str], script: &str) -> Output {
    let mut command = Command::new("hvprobe");
    command
        .arg("run")
        .args(quickly())
        .arg("--console")
        .args(args);
    command.args(["--", "sh", "-c", script]);
    let output = command.stdin(Stdio::null()).output();
    output.expect("hvprobe is there")
}

/// Returns the kernel's histogram in `printed`: hits by size.
fn of_kernel(printed: &str) -> BTreeMap<u64, u64> {
    let lines = printed.lines().filter_map(|line| {
        let rest = line.trim().strip_prefix("{ len:")?;
        let (size, rest) = rest.split_once('}')?;
        let hits = rest.split_once("hitcount:")?.1;
        let hits = hits.split_whitespace().next()?;
        Some((size.trim().parse().ok()?, hits.parse().ok()?))
    });
    lines.collect()
}

/// Returns the entries of the map whose lines begin with `head`, by key.
fn map(printed: &str, head: &str) -> BTreeMap<u64, u64> {
    let lines = printed.lines().filter_map(|line| {
        let (key, value) = line.strip_prefix(head)?.split_once("]: ")?;
        Some((key.parse().ok()?, value.parse().ok()?))
    });
    lines.collect()
}

/// Returns the rows of the histogram after the line `head`: ranges and hits.
fn rows(printed: &str, head: &str) -> Vec<(String, u64)> {
    let lines = printed.lines().skip_while(|line| line.trim_end() != head);
    let rows = lines.skip(1).map_while(|line| {
        let (label, _) = line.split_once('|')?;
        let (range, hits) = label.trim_end().rsplit_once(' ')?;
        Some((range.trim_end().to_owned(), hits.parse().ok()?))
    });
    rows.collect()
}

#[test]
fn maps_are_those_of_the_guests_own_histograms() {
    if rig("maps of a script held against the kernel's histograms").is_none() {
        return;
    }
    let file = tempfile::NamedTempFile::new().expect("there is room");
    let program = "kretprobe:ksys_read /comm == \"dd\" && retval > 0/ {\n\
                   \x20 @returned[retval] = count();\n\
                   }\n\
                   kprobe:ksys_read /comm == \"dd\"/ { @start[tid] = nsecs; }\n\
                   kretprobe:ksys_read /@start[tid] && retval > 0/ {\n\
                   \x20 @us = hist((nsecs - @start[tid]) / 1000); @ms = max((nsecs - @start[tid]) / 1000000);\n\
                   \x20 @quarters[retval / 4] = count(); delete(@start[tid]);\n\
                   }\n\
                   END { printf(\"that was %d%%\\n\", 100); }\n";
    fs::write(file.path(), program).expect("it can be written");
    let sizes = SIZES.map(|size| size.to_string()).join(" ");
    // `ksys_read` passes the requested size on to `vfs_read`.
    let script = format!(
        "mount -t tracefs t /sys/kernel/tracing 2>/dev/null; cd /sys/kernel/tracing\n\
         grep -q hist:keys README || echo {NONE}\n\
         echo 'p:e vfs_read len=%dx:u64' > kprobe_events\n\
         echo 'hist:keys=len if comm == \"dd\"' > events/kprobes/e/trigger\n\
         for bs in {sizes}; do \
         dd if=/dev/zero of=/dev/null bs=$bs count=$((bs % 5 + 2)) 2>/dev/null; done\n\
         cat events/kprobes/e/hist; echo end of histograms"
    );
    let one_liner = "kprobe:ksys_read /comm == \"dd\"/ { @asked[arg2] = count(); @size = hist(arg2); \
                     @[comm] = lhist(arg2, 0, 400, 100); @sum = sum(arg2); @max[func] = max(arg2); \
                     @min[probe] = min(args.count); @avg = avg(arg2); }";
    let file = file.path().display().to_string();
    let output = run(&["-e", one_liner, "--script", &file], &script);
    let printed = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && printed.contains("end of histograms"),
        "{stderr}\n{printed}"
    );
    assert!(stderr.contains("Attaching 4 probes..."), "{stderr}");
    assert!(printed.contains("that was 100%\n"), "{printed}");

    let asked = map(&printed, "@asked[");
    if printed.contains(NONE) {
        eprintln!("skipped: the guest's kernel has no histograms to hold ours against");
    } else {
        assert_eq!(asked, of_kernel(&printed), "{printed}");
    }
    // Other reads of `dd`, those of its libraries, are larger.
    for size in SIZES.into_iter().filter(|size| *size < 800) {
        assert_eq!(asked.get(&size), Some(&count(size)), "{printed}");
        let returned = map(&printed, "@returned[");
        assert_eq!(returned.get(&size), Some(&count(size)), "{printed}");
    }
    // Durations are measured for all calls that return, and are short. Sizes with the same quotient are counted
    // together.
    let returned = map(&printed, "@returned[");
    let mut quarters = BTreeMap::new();
    for (size, hits) in &returned {
        *quarters.entry(size / 4).or_insert(0) += hits;
    }
    assert_eq!(map(&printed, "@quarters["), quarters, "{printed}");
    let took = rows(&printed, "@us:");
    let timed: u64 = took.iter().map(|(_, hits)| hits).sum();
    // An uncertain duration is not counted; the number of such hits is printed.
    let untimed = stderr.lines().find_map(|line| {
        let hits = line.strip_suffix(" hits the value for @us could not be read")?;
        hits.rsplit(' ').next()?.parse::<u64>().ok()
    });
    let untimed = untimed.unwrap_or(0);
    assert!(untimed < timed, "{stderr}");
    assert_eq!(
        timed + untimed,
        returned.values().sum::<u64>(),
        "{stderr}\n{printed}"
    );
    assert!(!printed.contains("@start"), "{printed}");
    let longest = printed.lines().find_map(|line| line.strip_prefix("@ms: "));
    let longest = longest.and_then(|ms| ms.parse::<u64>().ok());
    assert!(longest.is_some_and(|ms| ms < 10_000), "{printed}");

    let hits: u64 = asked.values().sum();
    let sum: u64 = asked.iter().map(|(size, hits)| size * hits).sum();
    let max = asked.keys().max().expect("some");
    for line in [
        format!("@sum: {sum}"),
        format!("@avg: {}", sum / hits),
        format!("@max[ksys_read]: {max}"),
        "@min[kprobe:ksys_read]: 1".to_owned(),
    ] {
        assert!(printed.lines().any(|it| it == line), "{line}\n{printed}");
    }

    let within = |from: u64, to: u64| asked.range(from..to).map(|(_, hits)| hits).sum::<u64>();
    let size = rows(&printed, "@size:");
    let shown: u64 = size.iter().map(|(_, hits)| hits).sum();
    assert_eq!(shown, hits, "{printed}");
    for (range, from, to) in [
        ("[1]", 1, 2),
        ("[2, 4)", 2, 4),
        ("[64, 128)", 64, 128),
        ("[1K, 2K)", 1024, 2048),
    ] {
        let row = (range.to_owned(), within(from, to));
        assert!(size.contains(&row), "{row:?}\n{printed}");
    }
    let steps: Vec<_> = [
        ("[0, 100)", 0, 100),
        ("[100, 200)", 100, 200),
        ("[200, 300)", 200, 300),
    ]
    .into_iter()
    .chain([("[300, 400)", 300, 400), ("[400, ...)", 400, u64::MAX)])
    .map(|(range, from, to)| (range.to_owned(), within(from, to)))
    .collect();
    assert_eq!(rows(&printed, "@[dd]:"), steps, "{printed}");
}

#[test]
fn hits_are_printed_and_a_script_ends_itself() {
    if rig("a script that prints hits").is_none() {
        return;
    }
    let one_liner = "BEGIN { printf(\"begin\\n\"); }\n\
                     kprobe:do_sys_openat2 /str(arg1) == \"/proc/version\"/ {\n\
                     \x20 printf(\"%s %d <%s> <%s> %s %s\\n\", comm, cpu, str(arg1), args.filename, func, ksym(arg1));\n\
                     \x20 @stacks[kstack] = count(); exit(); }\n\
                     kprobe:vfs_re?d { @[probe] = count(); }";
    let output = run(
        &["-e", one_liner],
        "while :; do cat /proc/version >/dev/null; done",
    );
    let printed = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}\n{printed}");
    assert!(printed.contains("begin\n"), "{printed}");
    let line = printed.lines().find(|line| line.starts_with("cat 0 "));
    let line = line.unwrap_or_else(|| panic!("{stderr}\n{printed}"));
    assert!(line.starts_with("cat 0 </proc/version> <"), "{line}");
    assert!(line.contains("> do_sys_openat2 0x"), "{line}");
    assert!(printed.contains("@[kprobe:vfs_read]: "), "{printed}");
    let stack = printed.split_once("@stacks[").map(|(_, rest)| rest);
    let stack = stack.and_then(|rest| rest.split_once("]: "));
    let (stack, _) = stack.unwrap_or_else(|| panic!("{printed}"));
    assert!(stack.contains("\n    do_sys_openat2+"), "{stack}");
}

#[test]
fn what_the_guest_has_not_is_shown_in_the_script() {
    if rig("a script that asks for what there is not").is_none() {
        return;
    }
    for (program, caret) in [
        (
            "kprobe:ksys_read { @ = sum(args.nothing); }",
            "args.nothing",
        ),
        (
            "kprobe:ksys_read { } kprobe:no_such_function { }",
            "no_such_function",
        ),
    ] {
        let output = run(&["-e", program], "true");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        let mut lines = stderr.lines().skip_while(|line| line.trim() != program);
        lines.next().unwrap_or_else(|| panic!("{stderr}"));
        let at = lines.next().and_then(|line| line.find('^'));
        let expected = program.find(caret).expect("it is there") + "  ".len();
        assert_eq!(at, Some(expected), "{stderr}");
    }
}

#[test]
fn traces_carry_out_scripts_for_as_long_as_they_run() {
    if rig("a trace with a script").is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("there is room");
    let socket = folder.path().join("socket").display().to_string();
    let _server = Server::start(&socket);
    let boot = ["vm", "boot", "--name", "web"];
    let command = ["--", "workload", "stdin-hold", "1"];
    let booted = client_output(&socket, &[&boot[..], &quickly(), &command].concat());
    assert_eq!(booted.trim(), "web");
    // `printing` acts at the return of the function that calls `do_getpgid`. By then that call has been counted.
    let counted = "kprobe:do_getpgid { @calls[comm, pid] = count(); }";
    // Probes at one return run in the order of the script.
    let printing = "kretprobe:__x64_sys_getpgid /comm == \"workload\"/ { printf(\"<%s\", comm); } \
         kretprobe:__x64_sys_getpgid /comm == \"workload\"/ { printf(\" again>\\n\"); exit(); }";
    let first = ["trace", "--vm", "web", "-e", counted, "-e", printing];
    let printed = client_output(&socket, &first);
    assert!(
        printed.starts_with("<workload again>\n\n@calls[workload, "),
        "{printed}"
    );
    let every = "interval:s:1 { print(@calls); clear(@calls); exit(); }";
    let second = ["trace", "--vm", "web", "-e", counted, "-e", every];
    let printed = client_output(&socket, &second);
    assert!(printed.starts_with("@calls[workload, "), "{printed}");
    // The probes of a trace are gone when it has ended.
    assert_eq!(
        client_output(&socket, &["probe", "list", "--vm", "web", "--json"]),
        ""
    );
}

/// A server that runs until it is dropped.
struct Server(Child);

impl Server {
    /// Starts a server, and waits until it listens.
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
        // The server may have ended.
        let _killed = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// Returns the output of `hvprobe` as a client of the server at `socket`.
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
