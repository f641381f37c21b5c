//! Mistakes of users: each one ends with one clear message and a nonzero exit status, never with a panic or a
//! hang. Needs no KVM.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

mod configuration;
mod definitions;
mod events;
mod loopback;
mod place;

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use expect_test::expect;

use place::Place;

#[test]
fn no_kernel_says_how_to_get_one() {
    Place::new().check(
        &["run"],
        expect![[r#"
        hvprobe: there is no guest kernel yet: run `cargo lab setup` to fetch one, or give --kernel
        status 1
    "#]],
    );
}

#[test]
fn kernels_that_are_none_are_refused() {
    let place = Place::new();
    let missing = place.path("missing");
    place.check(
        &["run", "-k", missing.to_str().unwrap()],
        expect![[r#"
        hvprobe: booting missing (1 CPU, 256 MiB)
        hvprobe: cannot read the kernel image $PLACE/missing: No such file or directory (os error 2)
        status 1
    "#]],
    );
    place.check(
        &["run", "-k", &place.file("empty", b"")],
        expect![[r#"
        hvprobe: booting empty (1 CPU, 256 MiB)
        hvprobe: the kernel image is empty
        status 1
    "#]],
    );
    let garbage: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    place.check(
        &["run", "-k", &place.file("garbage", &garbage)],
        expect![[r#"
        hvprobe: booting garbage (1 CPU, 256 MiB)
        hvprobe: not a kernel image: no known signature; expected an x86-64 vmlinux (ELF) or bzImage
        status 1
    "#]],
    );
    fs::create_dir(place.path("folder")).unwrap();
    let folder = place.path("folder");
    place.check(
        &["run", "-k", folder.to_str().unwrap()],
        expect![[r#"
        hvprobe: the folder $PLACE/folder has no kernel, neither arch/x86/boot/bzImage nor vmlinux nor vmlinuz: give a kernel's file, or the folder in which it was built (`make bzImage`)
        status 1
    "#]],
    );

    let mut elf = vec![0; 4096];
    elf[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xb7\0");
    place.check(
        &["run", "-k", &place.file("aarch64", &elf)],
        expect![[r#"
        hvprobe: booting aarch64 (1 CPU, 256 MiB)
        hvprobe: the kernel image is for arm64, not for x86-64
        status 1
    "#]],
    );
    elf[18] = 0x3e;
    place.check(
        &["run", "-k", &place.file("truncated", &elf[..30])],
        expect![[r#"
        hvprobe: booting truncated (1 CPU, 256 MiB)
        hvprobe: the kernel image is damaged: its ELF header is invalid
        status 1
    "#]],
    );

    let mut bzimage = vec![0; 4096];
    bzimage[0x1f1] = 1;
    bzimage[0x1fe..0x200].copy_from_slice(b"\x55\xaa");
    bzimage[0x202..0x206].copy_from_slice(b"HdrS");
    bzimage[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    bzimage[0x248..0x24c].copy_from_slice(&u32::MAX.to_le_bytes());
    bzimage[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
    place.check(
        &["run", "-k", &place.file("bzimage", &bzimage)],
        expect![[r#"
        hvprobe: booting bzimage (1 CPU, 256 MiB)
        hvprobe: the kernel image is damaged: its setup header is too short
        status 1
    "#]],
    );
}

#[test]
fn disk_images_that_are_none_are_refused() {
    let place = Place::new();
    let missing = place.path("missing");
    place.check(
        &["image", "inspect", missing.to_str().unwrap()],
        expect![[r#"
        hvprobe: cannot open the disk image $PLACE/missing: No such file or directory (os error 2)
        status 1
    "#]],
    );
    place.check(
        &["image", "inspect", "/dev/zero"],
        expect![[r#"
        hvprobe: cannot open the disk image /dev/zero: it is not a regular file
        status 1
    "#]],
    );
    let zeros = place.file("zeros", &[0; 4096]);
    place.check(
        &["image", "inspect", "--format", "qcow2", &zeros],
        expect![[r#"
        hvprobe: cannot open the disk image $PLACE/zeros: Not a qcow2 file
        status 1
    "#]],
    );
    place.check(
        &["image", "inspect", &zeros],
        expect![[r#"
        hvprobe: found nothing to boot in the disk image: there is no boot entry and no kernel in /boot; give --kernel and --initrd
        status 1
    "#]],
    );
}

#[test]
fn impossible_sizes_are_refused() {
    let place = Place::new();
    let kernel = place.file("kernel", b"no matter");
    place.check(
        &["run", "-k", &kernel, "--memory", "4M"],
        expect![[r#"
            hvprobe: booting kernel (1 CPU, 4 MiB)
            hvprobe: 4 MiB of memory is too little: a machine needs at least 16 MiB
            status 1
        "#]],
    );
    let output = place.run(&["run", "-k", &kernel, "--memory", "15000000T"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr.contains("MiB of memory, and all machines together may have"),
        "{stderr}"
    );
    place.check(&["run", "-k", &kernel, "--memory", "12Q"], expect![[r#"
        error: invalid value '12Q' for '--memory <SIZE>': write a whole number and K, M, G or T, as in 512M

        For more information, try '--help'.
        status 2
    "#]]);
    place.check(
        &["run", "-k", &kernel, "--cpus", "0"],
        expect![[r#"
        error: invalid value '0' for '--cpus <N>': 0 is not in 1..=4294967295

        For more information, try '--help'.
        status 2
    "#]],
    );
}

#[test]
fn no_server_says_how_to_start_one() {
    let place = Place::new();
    place.check(
        &["vm", "list"],
        expect![[r#"
        hvprobe: no server listens on $PLACE/hvprobe.sock; start one with `hvprobe serve`
        status 1
    "#]],
    );
    drop(UnixListener::bind(place.path("hvprobe.sock")).unwrap());
    place.check(
        &["trace"],
        expect![[r#"
        hvprobe: no server listens on $PLACE/hvprobe.sock; start one with `hvprobe serve`
        status 1
    "#]],
    );
}

#[test]
fn server_has_no_machine_to_work_on() {
    let place = Place::new();
    let server = place.serve();
    place.check(
        &["probe", "list"],
        expect![[r#"
        hvprobe: no machine runs; boot one with `hvprobe vm boot`
        status 1
    "#]],
    );
    place.check(
        &["vm", "stop", "web"],
        expect![[r#"
        hvprobe: there is no machine `web`
        status 1
    "#]],
    );
    place.check(&["vm", "pause", "../web"], expect![[r#"
        hvprobe: bad machine name: use 1 to 63 letters, digits, `-`, `_` and `.`, a letter or digit first
        status 1
    "#]]);
    place.check(
        &["trace", "--vm", "web"],
        expect![[r#"
        hvprobe: there is no machine `web`
        status 1
    "#]],
    );
    place.check(
        &["syms", "--vm", "web", "vfs_*"],
        expect![[r#"
        hvprobe: there is no machine `web`
        status 1
    "#]],
    );
    place.check(
        &["types", "--vm", "web", "struct file"],
        expect![[r#"
        hvprobe: there is no machine `web`
        status 1
    "#]],
    );
    place.check(
        &["probe", "add", "--vm", "web", "p vfs_read"],
        expect![[r#"
        hvprobe: there is no machine `web`
        status 1
    "#]],
    );
    place.check(
        &["vm", "console", "web"],
        expect![[r#"
        hvprobe: there is no machine `web`
        status 1
    "#]],
    );
    let kernel = place.file("kernel", b"garbage");
    place.check(
        &["vm", "boot", "--kernel", &kernel],
        expect![[r#"
        hvprobe: not a kernel image: no known signature; expected an x86-64 vmlinux (ELF) or bzImage
        status 1
    "#]],
    );
    place.check(&["vm", "boot", "--kernel", &kernel, "--name", "a b"], expect![[r#"
        hvprobe: bad machine name: use 1 to 63 letters, digits, `-`, `_` and `.`, a letter or digit first
        status 1
    "#]]);
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn second_server_on_a_socket_is_refused_and_the_first_goes_on() {
    let place = Place::new();
    let first = place.serve();
    place.check(
        &["serve"],
        expect![[r#"
        hvprobe: a server already listens on $PLACE/hvprobe.sock
        status 1
    "#]],
    );
    assert!(place.run(&["vm", "list"]).status.success());
    assert_eq!(first.terminate(), Some(0));
    assert!(fs::read_dir(place.0.path()).unwrap().next().is_none());
}

#[test]
fn socket_of_a_killed_server_is_replaced() {
    let place = Place::new();
    place.serve().kill();
    let left = fs::symlink_metadata(place.path("hvprobe.sock")).unwrap();
    assert!(left.file_type().is_socket());
    let second = place.serve();
    assert!(place.run(&["vm", "list"]).status.success());
    assert_eq!(second.terminate(), Some(0));
}

#[test]
fn file_in_the_place_of_the_socket_is_left_alone() {
    let place = Place::new();
    let file = place.file("precious", b"data");
    place.check(
        &["serve", "--socket", &file],
        expect![[r#"
        hvprobe: $PLACE/precious exists and is not a socket; remove it or choose another path
        status 1
    "#]],
    );
    assert_eq!(fs::read(&file).unwrap(), b"data");
    place.check(&["serve", "--socket", &"x".repeat(200)], expect![[r#"
        hvprobe: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx is too long for a socket: at most 107 bytes
        status 1
    "#]]);
}

#[test]
fn reader_that_goes_away_is_no_error() {
    let place = Place::new();
    let mut child = place
        .command(&["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn host_without_kvm_is_reported() {
    let place = Place::new();
    let hidden = |args: &str| {
        let program = env!("CARGO_BIN_EXE_hvprobe");
        let script = format!("mount -t tmpfs none /dev && exec {program} {args}");
        Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
            .env("HVPROBE_CACHE", place.path("cache"))
            .output()
            .unwrap()
    };
    if !hidden("--version").status.success() {
        println!("skipped: needs user namespaces to hide /dev/kvm in");
        return;
    }
    let output = hidden("doctor");
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout.contains("/dev/kvm does not exist"), "{stdout}");
    assert!(stdout.contains("Linux guests cannot run here."), "{stdout}");
}
