//! Tests guests that leave their kernel for another, by kexec or after a panic: the probes of the first kernel are
//! gone, and the second is left alone.

use std::fs;
use std::io::Write;

use cpio::newc::{self, ModeFileType};
use hvprobe_machine::{MachineConfig, ProbeSpec, ProbeState};
use hvprobe_tests::rig::{
    Running, assert_clean, chain, guest, info, optimizing_guest, probe, rig, rounds, short,
};
use hvprobe_vm::loader::command_archive;
use tempfile::NamedTempFile;

/// Path of the second kernel in the guest.
const KERNEL: &str = "second/kernel";
/// Path of the second kernel's initramfs in the guest.
const INITRD: &str = "second/initrd";

/// Gives the guest a second kernel, which is the same as the first and runs `command`. Returns the file with the
/// guest's own initramfs, which must exist until the boot.
fn with_second(config: &mut MachineConfig, command: &str) -> NamedTempFile {
    let first = config.initrd.as_ref().expect("stock guests have one");
    let first = fs::read(first).expect("it is there");
    let words: Vec<String> = ["sh", "-c", command].map(str::to_owned).to_vec();
    let mut second = first.clone();
    second.extend(command_archive(&words).expect("a command"));
    let folder = newc::Builder::new("second")
        .nlink(2)
        .mode(0o755)
        .set_mode_file_type(ModeFileType::Directory);
    let mut archive = folder.write(first, 0).finish().expect("a folder");
    let kernel = fs::read(&config.kernel).expect("it is there");
    for (name, content) in [(KERNEL, kernel), (INITRD, second)] {
        let file = newc::Builder::new(name)
            .nlink(1)
            .mode(0o644)
            .set_mode_file_type(ModeFileType::Regular);
        let size = u32::try_from(content.len()).expect("small");
        let mut file = file.write(archive, size);
        file.write_all(&content).expect("memory");
        archive = file.finish().expect("memory");
    }
    let archive = newc::trailer(archive).expect("memory");
    let file = NamedTempFile::new().expect("a file");
    fs::write(file.path(), archive).expect("room for it");
    config.initrd = Some(file.path().to_owned());
    file
}

/// Commands of the second kernel: prints a line, waits for input, makes calls, and exits with a status.
const SECOND: &str = "echo second kernel; read line; workload calls getpgid 1000; exit 7";

fn of_both_kinds() -> Vec<ProbeSpec> {
    ["p", "r"]
        .iter()
        .flat_map(|kind| {
            ["__x64_sys_getpgid", "vfs_read", "vfs_write"].map(|at| format!("{kind} {at}"))
        })
        .map(|definition| probe(&definition))
        .collect()
}

/// Asserts that the probes of `running` are gone, that none can be registered, and that the second kernel runs
/// to its end.
fn assert_left_alone(mut running: Running) {
    running.wait_for("second kernel");
    let machine = running.machine.clone();
    assert!(machine.status().kernel_replaced);
    let before = machine.probes();
    for gone in &before {
        assert_eq!((&gone.state, gone.addr), (&ProbeState::Gone, None));
    }
    let refused = machine.register(&[probe("p vfs_read")]);
    let refused = chain(&refused.expect_err("the kernel is another"));
    assert!(refused.contains("runs another kernel"), "{refused}");
    let ids: Vec<_> = before.iter().map(|probe| probe.id).collect();
    machine.disable(&ids).expect("nothing is to be done");
    machine.console_input(b"\n");
    running.wait_for("calls: 1000");
    for gone in &before {
        assert_eq!(info(&machine, gone.id).counts, gone.counts);
    }
    machine.unregister(&ids).expect("nothing is to be done");
    assert!(machine.probes().is_empty());
    let (ending, printed) = running.end();
    // The output of a kernel that panics is not clean.
    let from = if machine.config().cmdline.contains("crashkernel") {
        printed.find("second kernel").unwrap_or(0)
    } else {
        0
    };
    assert_clean(&ending, &printed[from..], 7);
}

#[test]
fn probes_are_gone_with_the_kernel_that_kexec_leaves() {
    if rig("kexec").is_none() {
        return;
    }
    let command = format!("workload held kexec /{KERNEL} /{INITRD} '{}'", short());
    let ways = [optimizing_guest, guest];
    for make in &ways[..rounds(2)] {
        let mut config = make(1, &["sh", "-c", &command]);
        let _initrd = with_second(&mut config, SECOND);
        let mut running = Running::boot(config);
        running.wait_for("ready");
        let machine = running.machine.clone();
        machine.register(&of_both_kinds()).expect("legal probes");
        machine.console_input(b"\n");
        assert_left_alone(running);
    }
}

#[test]
fn probes_are_gone_with_the_kernel_that_a_panic_leaves() {
    if rig("a crash kernel").is_none() {
        return;
    }
    // The crash kernel runs in the memory reserved for it, on one processor.
    let command = format!(
        "workload kdump /{KERNEL} /{INITRD} '{} nr_cpus=1' && workload die panic",
        short()
    );
    let mut config = optimizing_guest(2, &["sh", "-c", &command]);
    config.memory = 768 << 20;
    config.cmdline.push_str(" crashkernel=256M");
    let _initrd = with_second(&mut config, SECOND);
    let mut running = Running::boot(config);
    running.wait_for("ready");
    let machine = running.machine.clone();
    machine.register(&of_both_kinds()).expect("legal probes");
    running.wait_while_running(|machine| machine.probes()[0].counts.hits > 1000);
    machine.console_input(b"\n");
    assert_left_alone(running);
}
