//! Tests a machine that really hangs: the thread of its virtual CPU is stopped in the host and never continues.
//! Other machines, and requests about all machines, must not wait for it.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use hvprobe_tests::program::{Program, ok};
use hvprobe_tests::rig::rig;
use rustix::process::Signal;

/// Time limit for stopping a server: it waits ten seconds for machines that do not end, and all else may take
/// twenty seconds in a rig.
const STOPPED: Duration = Duration::from_secs(10 + 20);

/// Time limit of a request while the machine hangs, including the start of a program in a rig.
const ANSWERED: Duration = Duration::from_secs(5);

/// Returns the thread called `name` of process `process`.
fn thread(process: i32, name: &str) -> i32 {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let numbers = threads.map(|thread| thread.unwrap().file_name().into_string().unwrap());
    let is_it = |number: &String| {
        let comm = fs::read_to_string(format!("/proc/{process}/task/{number}/comm"));
        comm.is_ok_and(|comm| comm.trim_end() == name)
    };
    let number = numbers.into_iter().find(is_it);
    number.expect("such a thread").parse().unwrap()
}

/// Stops a thread of another process until the calling thread ends.
fn freeze(thread: i32) {
    let none = std::ptr::null_mut::<libc::c_void>();
    for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
        // SAFETY: neither request reads or writes memory of this process.
        let done = unsafe { libc::ptrace(request, thread, none, none) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }
    assert!(libc::WIFSTOPPED(changed(thread)));
}

/// Waits until a thread that the calling thread traces stops or ends, and returns its wait status.
///
/// Reaps a thread that has ended: before that, the process of that thread cannot be reaped.
fn changed(thread: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the kernel may write a status to `status`.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    assert_eq!(waited, thread, "{}", io::Error::last_os_error());
    status
}

#[test]
fn a_server_that_is_asked_to_stop_does_not_wait_for_ever_for_a_machine_that_hangs() {
    if rig("a machine that hangs").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let at = ["--socket", socket.to_str().unwrap()];
    let server = Program::start(&[&["serve"], &at[..]].concat());
    server.wait_err("listening");
    let command = ["--", "workload", "stdin-hold", "1"];
    let boot = |name| {
        ok(&[&["vm", "boot", "--name", name], &at[..], &command].concat());
    };
    boot("stuck");
    let stuck = thread(server.pid().as_raw_nonzero().get(), "vcpu0");
    freeze(stuck);
    boot("well");
    boot("ends");
    for (words, expected) in [
        (["vm", "list"].as_slice(), "stuck"),
        (&["vm", "show", "stuck"], "\"stuck\""),
        (&["vm", "show", "well"], "\"well\""),
        (&["vm", "stop", "ends"], ""),
    ] {
        let since = Instant::now();
        let printed = ok(&[words, &at].concat());
        assert!(
            since.elapsed() < ANSWERED,
            "{words:?}: {:?}",
            since.elapsed()
        );
        assert!(
            printed.concat().contains(expected),
            "{words:?}: {printed:?}"
        );
    }
    let since = Instant::now();
    server.signal(Signal::TERM);
    let ended = changed(stuck);
    let served = server.finish();
    assert!(!libc::WIFSTOPPED(ended), "{ended:#x}");
    assert!(since.elapsed() < STOPPED, "{:?}", since.elapsed());
    assert_eq!(served.status, Some(0), "{served:#?}");
    let left = |line: &&String| line.contains("left to end with the process");
    let left: Vec<_> = served.err.iter().filter(left).collect();
    assert!(
        matches!(left[..], [one] if one.contains("machine=\"stuck\"")),
        "{served:#?}"
    );
    assert!(!socket.exists());
}
