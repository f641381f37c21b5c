//! Compares the arguments of system calls with those that the guest's own events of these calls show.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use hvprobe_machine::{ProbeSpec, Refusals};
use hvprobe_spec::shape::ShapeKind;
use hvprobe_tests::rig::{Running, assert_clean, chain, optimizing_guest, probe, quickly, rig};

/// Output of a guest whose kernel has no events of system calls.
const NONE: &str = "no events of calls";

/// Prints each system call with the types and names of its arguments, one call in each line.
const FORMATS: &str = "mount -t tracefs t /sys/kernel/tracing 2>/dev/null; \
     cd /sys/kernel/tracing/events/syscalls || echo 'no events of calls'; \
     awk '/^name: sys_enter_/ { sub(\"sys_enter_\", \"\", $2); call = $2 } \
     /^\\tfield:/ && seen { sub(\"\\tfield:\", \"\"); sub(\";.*\", \"\"); line = line \";\" $0 } \
     /__syscall_nr/ { seen = 1 } \
     /^print fmt/ { print \"call \" call line; line = \"\"; seen = 0 }' sys_enter_*/format; \
     echo formats end; read line";

/// Returns the arguments of each call, as type and name.
fn formats(printed: &str) -> BTreeMap<&str, Vec<(&str, &str)>> {
    let lines = printed.lines().map(str::trim_end);
    let calls = lines.filter_map(|line| line.strip_prefix("call "));
    let calls = calls.map(|line| {
        let mut parts = line.split(';');
        let call = parts.next().expect("one part at least");
        let arguments = parts.filter_map(|field| field.rsplit_once(' '));
        // Newer kernels add fields that show texts, which are not arguments.
        let arguments = arguments.filter(|(ty, _)| !ty.contains("__data_loc"));
        (call, arguments.collect())
    });
    calls.collect()
}

#[test]
fn calls_take_what_the_guests_own_events_say() {
    if rig("what system calls take").is_none() {
        return;
    }
    let mut running = Running::shared(&optimizing_guest(1, &["sh", "-c", FORMATS]));
    let printed = running.wait_for("formats end");
    let theirs = formats(&printed);
    let machine = running.machine.clone();
    if theirs.is_empty() {
        assert!(printed.contains(NONE), "{printed}");
        eprintln!("skipped: the guest's kernel has no events of system calls");
    } else {
        let all = ProbeSpec {
            default_arguments: true,
            ..probe("p __x64_sys_*")
        };
        machine
            .register_batch(&[all], Refusals::Skip)
            .expect("they can be probed");
        let (mut compared, mut arguments) = (0, 0);
        for info in machine.probes() {
            let symbol = info.symbol.as_ref().expect("a function").0.as_str();
            let call = symbol.trim_start_matches("__x64_sys_");
            let Some(expected) = theirs.get(call) else {
                continue;
            };
            let shown = info.shown.arguments.iter();
            let names: Vec<_> = shown.clone().map(|it| it.name.as_str()).collect();
            // The types of old kernels lack functions that cannot be traced.
            let at = info.addr.expect("placed");
            if names.is_empty() && !expected.is_empty() && !machine.image().is_ftrace_site(at) {
                continue;
            }
            let their_names: Vec<_> = expected.iter().map(|(_, name)| *name).collect();
            assert_eq!(names, their_names, "{call}");
            for (ours, (ty, name)) in shown.zip(expected) {
                if ours.shape.kind == ShapeKind::String {
                    assert_eq!(*ty, "const char *", "{call} {name}");
                } else {
                    assert_eq!(ours.shape.name, *ty, "{call} {name}");
                }
                arguments += 1;
            }
            compared += 1;
        }
        eprintln!(
            "{compared} calls of {}, {arguments} arguments",
            theirs.len()
        );
        assert!(
            compared * 10 > theirs.len() * 9,
            "{compared} of {}",
            theirs.len()
        );
        let ids: Vec<_> = machine.probes().iter().map(|info| info.id).collect();
        machine.unregister(&ids).expect("registered");
        // When execve returns, the registers are those of the new program.
        let of_execve = probe("r __x64_sys_execve filename:ustring");
        let refused = machine.register(&[of_execve]).expect_err("it has none");
        let why = chain(&refused);
        let expected = "the call replaces the registers that it was made with";
        assert!(why.contains(expected), "{why}");
    }
    machine.console_input(b"\n");
    let (ending, printed) = running.end();
    assert_clean(&ending, &printed, 0);
}

/// Returns the numbers in the list of a call's arguments, as the kernel's event or ours shows them. `between`
/// separates a name from its value.
fn numbers(list: &str, between: char) -> Vec<u64> {
    let values = list.split([',', ' ', ')']).filter_map(|word| {
        let word = match between {
            '=' => word.split_once('=')?.1,
            _ => word,
        };
        u64::from_str_radix(word.trim_start_matches("0x"), 16).ok()
    });
    values.collect()
}

/// Returns the folder, the text and the flags of a call of openat, as newer kernels and our events show them.
/// `between` separates a name from its value.
fn opened(list: &str, between: char) -> Option<(i32, &str, &str)> {
    let value = |name: &str| list.split_once(&format!("{name}{between}")).map(|it| it.1);
    let (number, _) = value("dfd")?.split_once(',')?;
    let number = number.trim().parse::<i64>().ok()?;
    // The kernel prints the folder's number as unsigned.
    let number =
        u32::try_from(number).map_or_else(|_| number.try_into(), |it| Ok(it.cast_signed()));
    let text = list.split('"').nth(1)?;
    let (flags, _) = value("flags")?.split_once([',', ')'])?;
    Some((number.ok()?, text, flags.trim()))
}

#[test]
fn values_are_those_of_the_guests_own_events() {
    if rig("values of system calls").is_none() {
        return;
    }
    let script = format!(
        "mount -t tracefs t /sys/kernel/tracing 2>/dev/null; cd /sys/kernel/tracing; \
         for call in openat mmap; do \
         echo 'common_pid != 1' > events/syscalls/sys_enter_$call/filter || echo {NONE}; \
         echo 1 > events/syscalls/sys_enter_$call/enable; done; \
         workload calls getpgid 1; cat /proc/version >/dev/null; \
         echo 0 > tracing_on; cat trace; echo end of trace"
    );
    let output = Command::new("hvprobe")
        .arg("run")
        .args(quickly())
        .arg("--console")
        .args([
            "-p",
            "p:o __x64_sys_openat dfd:x64 filename flags:x64 mode:x64",
        ])
        .args([
            "-p",
            "p:m __x64_sys_mmap addr:x64 len:x64 prot:x64 flags:x64 fd:x64 off:x64",
        ])
        .args(["-p", "p:shown __x64_sys_openat"])
        .args(["-p", "p:mapped __x64_sys_mmap"])
        .args(["--", "sh", "-c", &script])
        .stdin(Stdio::null())
        .output()
        .expect("hvprobe is there");
    let printed = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && printed.contains("end of trace"),
        "{stderr}\n{printed}"
    );
    if printed.contains(NONE) {
        eprintln!("skipped: the guest's kernel has no events of system calls");
        return;
    }
    let task = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let is_traced = |task: &str| task.starts_with("cat-") || task.starts_with("workload-");
    // Kernels that show the path leave the numbers out.
    let shows = |line: &&str| line.contains("sys_openat(") && line.contains('"');
    let shown: Vec<_> = printed.lines().filter(shows).collect();
    let calls = [("o: ", "sys_openat("), ("m: ", "sys_mmap(")];
    if !shown.is_empty() {
        let theirs = shown.iter().filter_map(|line| {
            let task = task(line).filter(|task| is_traced(task))?;
            Some((task, opened(line, ':').unwrap_or_else(|| panic!("{line}"))))
        });
        let theirs: Vec<_> = theirs.collect();
        let ours = stderr.lines().filter_map(|line| {
            let list = line.split_once(" shown: ")?.1;
            Some((
                task(line)?,
                opened(list, '=').unwrap_or_else(|| panic!("{line}")),
            ))
        });
        let traced = |task: &str| theirs.iter().any(|(other, _)| other == task);
        let ours: Vec<_> = ours.filter(|(task, _)| traced(task)).collect();
        assert_eq!(ours, theirs, "{stderr}\n{printed}");
        assert!(ours.len() > 3, "{printed}");
    }
    for (event, call) in calls.into_iter().skip(usize::from(!shown.is_empty())) {
        let theirs = printed.lines().filter_map(|line| {
            let numbers = numbers(line.split_once(call)?.1, ':');
            Some((task(line)?, numbers))
        });
        // The kernel does not trace what the shell does before and after.
        let theirs: Vec<_> = theirs.filter(|(task, _)| is_traced(task)).collect();
        let ours = stderr.lines().filter_map(|line| {
            let numbers = numbers(line.split_once(&format!(" {event}("))?.1, '=');
            Some((task(line)?, numbers))
        });
        let traced = |task: &str| theirs.iter().any(|(other, _)| other == task);
        let ours: Vec<_> = ours.filter(|(task, _)| traced(task)).collect();
        assert_eq!(ours, theirs, "{call}\n{stderr}\n{printed}");
        assert!(ours.len() > 3, "{call}\n{printed}");
    }
    for shown in [
        "(dfd=-100, filename=\"/proc/version\", flags=O_RDONLY",
        "prot=PROT_READ|PROT_WRITE, flags=MAP_PRIVATE|MAP_ANONYMOUS, fd=",
    ] {
        assert!(stderr.contains(shown), "{shown}\n{stderr}");
    }
}
