//! Messages of `run` before a stock kernel runs: on a host whose KVM cannot run Linux, and with an initrd that
//! never ends.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::env;
use std::path::Path;
use std::process::{Command, Stdio};

/// Returns a command that runs the program under `timeout` in case it hangs. With `--foreground`, `timeout`
/// forwards a signal once.
fn hvprobe() -> Command {
    let mut command = Command::new("timeout");
    command
        .args([
            "--foreground",
            "--kill-after=5",
            "60",
            env!("CARGO_BIN_EXE_hvprobe"),
        ])
        .stdin(Stdio::null());
    command
}

/// Returns whether KVM on this host cannot run Linux, by the criteria of `run`.
fn hopeless() -> bool {
    let doctor = hvprobe().args(["doctor", "--json"]).output().unwrap();
    let report = String::from_utf8(doctor.stdout).unwrap();
    doctor.status.code() == Some(1) && report.contains("\"emulation-exit\"")
}

#[test]
fn run_ends_where_linux_guests_cannot_run() {
    let Some(kernel) = env::var_os("HVPROBE_TEST_VMLINUZ").filter(|_| hopeless()) else {
        eprintln!("skipped: needs a kernel (cargo lab test) and a KVM that cannot run it");
        return;
    };
    let run = hvprobe()
        .args(["run", "-p", "p vfs_read", "-k"])
        .arg(kernel)
        .output()
        .unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(1), "{stderr}");
    let last = stderr.lines().last().expect("it says why");
    assert!(
        last.starts_with("hvprobe: this host cannot run Linux guests (")
            && last.contains("; `hvprobe doctor` shows why")
            && last.contains("`cargo lab run -- hvprobe run ...`"),
        "{stderr}"
    );
}

#[test]
fn initrd_without_end_is_refused() {
    let Some(kernel) = env::var_os("HVPROBE_TEST_VMLINUZ") else {
        eprintln!("skipped: needs a kernel (cargo lab test)");
        return;
    };
    let sparse = tempfile::NamedTempFile::new().unwrap();
    sparse.as_file().set_len(1 << 40).unwrap();
    for (initrd, why) in [
        (sparse.path(), "is too large for 256 MiB of memory"),
        (Path::new("/dev/zero"), "it is not a regular file"),
    ] {
        let run = hvprobe()
            .args(["run", "-k"])
            .arg(&kernel)
            .arg("--initrd")
            .arg(initrd)
            .output()
            .unwrap();
        let stderr = String::from_utf8(run.stderr).unwrap();
        assert_eq!(run.status.code(), Some(1), "{stderr}");
        // On a host without KVM, the missing KVM is reported first.
        assert!(
            stderr.contains(why) || stderr.contains("/dev/kvm"),
            "{stderr}"
        );
    }
}
