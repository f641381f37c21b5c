//! Arguments of system calls, in a `pt_regs`.

use super::*;

/// Sets up the registers of a call of `openat`. The path is in kernel memory, unlike that of a real call.
fn openat(guest: &TestGuest, cpu: &mut Cpu) {
    let registers = [
        (112, 0xffff_ffff_ffff_ff9c),
        (104, HERE.0 + 0x200),
        (96, 0o2_000_002),
        (56, 0o644),
    ];
    for (offset, value) in registers {
        guest.write(HERE.wrapping_add(offset), &u64::to_le_bytes(value));
    }
    guest.write(HERE.wrapping_add(0x200), b"/etc/passwd\0");
    cpu.regs.rdi = HERE.0;
}

#[test]
fn a_system_call_shows_its_own_arguments() {
    let mut rig = Rig::live();
    let id = rig.register(&[defaults("p __x64_sys_openat")])[0];
    let info = rig.info(id);
    assert!(info.shown.call);
    let mut cpu = Cpu::new(&rig);
    openat(&rig.guest, &mut cpu);
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let events = cpu.events();
    let named =
        |name: &str, ty: &str, value: &[u8]| (name.to_owned(), ty.to_owned(), Some(value.to_vec()));
    assert_eq!(
        values(&events[0], &info),
        [
            named("dfd", "int", &(-100_i32).to_le_bytes()),
            named("filename", "string", b"/etc/passwd"),
            named("flags", "int", &0o2_000_002_u32.to_le_bytes()),
            named("mode", "umode_t", &0o644_u16.to_le_bytes()),
        ]
    );
    let ShapeKind::Enum { values, .. } = &info.shown.arguments[2].shape.kind else {
        panic!("{:?}", info.shown.arguments[2]);
    };
    let first = &values[0];
    assert_eq!(
        (&*first.name, first.value, first.mask),
        ("O_RDONLY", 0, Some(3))
    );
}

#[test]
fn the_arguments_of_a_system_call_are_known_by_name() {
    let path = Some(b"/etc/passwd".to_vec());
    assert_eq!(only("p __x64_sys_openat filename:string", openat), path);
    let flags = Some(0o2_000_002_u32.to_le_bytes().to_vec());
    assert_eq!(only("p __x64_sys_openat flags", openat), flags);
    assert_eq!(
        only("p __x64_sys_openat filename", openat),
        word(HERE.0 + 0x200)
    );
    assert_eq!(
        only("p __x64_sys_openat +5(filename):string", openat),
        Some(b"passwd".to_vec())
    );
    // The function's own parameter is also available.
    assert_eq!(only("p __x64_sys_openat regs", openat), word(HERE.0));
    assert_eq!(only("p __x64_sys_openat $arg1", openat), word(HERE.0));
    let mut rig = Rig::live();
    let (_, message) = refused(&mut rig, "p __x64_sys_openat pathname");
    assert!(
        message.ends_with("regs, dfd, filename, flags, mode"),
        "{message}"
    );
    // A function that is not an entry of a system call has no such arguments.
    check_refused(&mut rig, "p vfs_read dfd", 11, "This variable is not found");
}

#[test]
fn a_filter_takes_what_a_system_call_was_made_with() {
    for (filter, expected) in [
        ("filename ~ \"/etc/*\" && dfd == -100", 1),
        ("filename == \"/etc\"", 0),
        ("flags & 2", 1),
        ("mode != 420", 0),
        // As events show it: O_RDWR|O_CLOEXEC.
        ("flags == O_RDWR|O_CLOEXEC", 1),
        ("flags == O_RDWR", 0),
        ("flags & O_RDWR && !(flags & O_RDONLY)", 1),
        ("flags & O_CREAT", 0),
        ("flags & O_CREAT|O_CLOEXEC", 1),
        ("flags & O_SYNC", 0),
    ] {
        let mut rig = Rig::live();
        let definition = format!("p __x64_sys_openat if {filter}");
        let id = rig.register(&[defaults(&definition)])[0];
        let mut cpu = Cpu::new(&rig);
        openat(&rig.guest, &mut cpu);
        assert_eq!(cpu.hit(rig.addr(id)), RESUME);
        assert_eq!(rig.counts(id).hits, expected, "{filter}");
    }
}

#[test]
fn flags_that_a_call_does_not_have_are_refused() {
    let mut rig = Rig::live();
    for (filter, message) in [
        (
            "flags & O_CLOEXE",
            "no value of `flags` is called `O_CLOEXE`; did you mean `O_CLOEXEC`?",
        ),
        (
            "flags == O_RDWR|MAP_FIXED_NOREPLACE",
            "no value of `flags` is called `MAP_FIXED_NOREPLACE`; there are O_RDONLY, O_WRONLY, O_RDWR, O_CREAT, \
             O_EXCL, O_NOCTTY, O_TRUNC, O_APPEND",
        ),
    ] {
        let definition = format!("p __x64_sys_openat if {filter}");
        let (_, why) = refusal(rig.try_register(&[defaults(&definition)]));
        let why = why.to_string();
        assert!(why.ends_with(message), "{why}");
    }
}

#[test]
fn a_return_shows_the_registers_and_follows_them_when_asked() {
    let mut rig = Rig::live();
    let id = rig.register(&[defaults("r __x64_sys_openat")])[0];
    let info = rig.info(id);
    let names: Vec<_> = info.shown.arguments.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["regs", "retval"]);
    assert!(info.actions.capture.is_empty() && info.actions.capture_at_return.is_empty());
    let id = rig.one("r __x64_sys_openat flags");
    assert_eq!(rig.info(id).actions.capture_at_return.len(), 1);
}
