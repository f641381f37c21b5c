//! Filters, from their definitions to the hits that count.

use super::*;

/// Runs one hit of `definition`, with its default arguments, after `prepare` has set it up. Returns the counts of
/// hits and of vetoed hits.
fn filtered(definition: &str, prepare: impl FnOnce(&TestGuest, &mut Cpu)) -> (u64, u64) {
    let mut rig = Rig::live();
    let id = rig.register(&[defaults(definition)])[0];
    let mut cpu = Cpu::new(&rig);
    prepare(&rig.guest, &mut cpu);
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let seen = cpu.events().len() as u64;
    let counts = rig.counts(id);
    assert_eq!(counts.hits, seen, "{definition}");
    (counts.hits, counts.vetoed)
}

#[test]
fn a_filter_lets_pass_what_it_says() {
    let prepare = |guest: &TestGuest, cpu: &mut Cpu| {
        guest.write(HERE, b"/etc/passwd\0");
        guest.write(HERE.wrapping_add(0x40), &[0xff; 8]);
        cpu.regs.rdi = HERE.0 + 0x40;
        cpu.regs.rsi = HERE.0;
        cpu.regs.rdx = 100;
    };
    let passes = (1, 0);
    let rejected = (0, 1);
    for (filter, expected) in [
        ("count == 100", passes),
        ("count != 100", rejected),
        ("count > 99 && count <= 100", passes),
        ("count < 100 || pid == 77", passes),
        ("!(count < 100) && tgid == 70", passes),
        ("comm == \"worker\"", passes),
        ("comm ~ \"wor*\" && cpu == 1", passes),
        ("comm != \"worker\"", rejected),
        ("buf ~ \"/etc/*\"", passes),
        ("buf == \"/etc/passwd\"", passes),
        ("buf ~ \"/etc\"", rejected),
        ("count & 4 && count & 3", rejected),
    ] {
        let found = filtered(&format!("p vfs_read if {filter}"), prepare);
        assert_eq!(found, expected, "{filter}");
    }
    for (arguments, expected) in [
        ("m=+0(%di):s8 if m == -1", passes),
        ("m=+0(%di):u8 if m == 255 && m > 254", passes),
        ("m=+0(%di):s32 if m < 0", passes),
        ("m=+0(%di):b3@2/8 if m == 7", passes),
        ("m=+0(%si):string if m ~ \"*pass*\"", passes),
        // Every comparison with an unreadable value is false, so its negation is true.
        ("m=+0(%dx) if m == 0", rejected),
        ("m=+0(%dx) if m != 0", rejected),
        ("m=+0(%dx) if !(m != 0)", passes),
    ] {
        let found = filtered(&format!("p vfs_read {arguments}"), prepare);
        assert_eq!(found, expected, "{arguments}");
    }
}

#[test]
fn a_text_that_is_longer_than_an_event_is_compared_as_a_whole() {
    let long = [b"/etc/".as_slice(), &[b'a'; 300], b"Z\0"].concat();
    let prepare = |guest: &TestGuest, cpu: &mut Cpu| {
        guest.write(HERE, &long);
        cpu.regs.rsi = HERE.0;
    };
    let equal = format!("n == \"/etc/{}\"", "a".repeat(250));
    for (filter, expected) in [
        ("n ~ \"*Z\"", (1, 0)),
        ("n ~ \"/etc/*\"", (1, 0)),
        ("n ~ \"*Y\"", (0, 1)),
        ("!(n ~ \"*Z\")", (0, 1)),
        (&equal, (0, 1)),
    ] {
        let definition = format!("p vfs_read n=+0(%si):string if {filter}");
        assert_eq!(filtered(&definition, prepare), expected, "{filter}");
    }
}

#[test]
fn addresses_are_compared_by_their_functions_and_cpus_by_their_sets() {
    let prepare = |guest: &TestGuest, cpu: &mut Cpu| {
        cpu.regs.rdi = guest.image.symbols().lookup("vfs_read").unwrap().addr.0 + 0x20;
        guest.write(HERE, b"/etc/passwd\0");
        cpu.regs.rsi = HERE.0;
        cpu.regs.rdx = 3;
    };
    for (filter, expected) in [
        ("a=%di if a.function == vfs_read", (1, 0)),
        ("a=%di if a.function != vfs_read", (0, 1)),
        ("a=%di if a.function == filler_002", (0, 1)),
        ("a=%di:s64 if a.function == 0xffffffff81000110", (1, 0)),
        ("if CPU & CPUS{0,1-2}", (1, 0)),
        ("if CPU & CPUS{0,2-7}", (0, 1)),
        ("if cpu == CPUS{1}", (1, 0)),
        ("if cpu != CPUS{1}", (0, 1)),
        ("if count & CPUS{2-3}", (1, 0)),
        ("if buf.ustring ~ \"/etc/*\"", (1, 0)),
    ] {
        let definition = format!("p vfs_read {filter}");
        assert_eq!(filtered(&definition, prepare), expected, "{filter}");
    }
    let mut rig = Rig::live();
    let mut check = |definition, column, words| check_refused(&mut rig, definition, column, words);
    check(
        "p vfs_read a=%di if a.function == vfs_raed",
        34,
        "unknown symbol `vfs_raed`; did you mean `vfs_read`?",
    );
    check(
        "p vfs_read a=%di:u32 if a.function == vfs_read",
        24,
        "Illegal operation for field type; `a` is no address",
    );
    check(
        "p vfs_read a=%di if a.function & vfs_read",
        20,
        "Illegal operation for field type; `.function`",
    );
    check(
        "p vfs_read a=%di if a.ustring ~ \"x\"",
        20,
        "Illegal operation for field type; `a` is no text",
    );
    check(
        "p vfs_read if cpu == CPUS{1,2}",
        21,
        "Illegal operation for field type; `cpu` is one CPU",
    );
    check(
        "p vfs_read if common_preempt_count == 0",
        14,
        "Field not found; `common_preempt_count` is not known of hits",
    );
}

#[test]
fn names_of_values_are_those_that_hits_show() {
    let prepare = |_: &TestGuest, cpu: &mut Cpu| {
        cpu.regs.rdi = 11_u64.wrapping_neg();
        cpu.regs.rsi = 0;
    };
    for (definition, expected) in [
        ("p vfs_read a=%di:s32 if a == -EAGAIN", (1, 0)),
        ("p vfs_read a=%di if a == -EAGAIN", (1, 0)),
        ("p vfs_read a=%di:s64 if a >= -EIO", (0, 1)),
        ("p vfs_read if buf == NULL", (1, 0)),
        ("p vfs_read if file != NULL", (1, 0)),
        ("p filler_002 if kind == NONE", (0, 1)),
        ("p filler_002 if kind != SOME", (1, 0)),
    ] {
        assert_eq!(filtered(definition, prepare), expected, "{definition}");
    }
    let mut rig = Rig::live();
    let mut check = |definition, column, words| check_refused(&mut rig, definition, column, words);
    check(
        "p vfs_read a=%di if a == -EAGIAN",
        25,
        "Invalid value (did you forget quotes)?; no error is called `EAGIAN`; did you mean `-EAGAIN`",
    );
    check(
        "p vfs_read a=%di if a == EAGAIN",
        25,
        "Invalid value (did you forget quotes)?; errors are returned below zero: write -EAGAIN",
    );
    check(
        "p vfs_read a=%di if a == true",
        25,
        "Invalid value (did you forget quotes)?; values of `a` have no names: write a number",
    );
    check(
        "p vfs_read if comm == bash",
        22,
        "Invalid value (did you forget quotes)?; `comm` is a text: write \"bash\"",
    );
    check(
        "p __x64_sys_openat n=filename:string if n == NULL",
        45,
        "Invalid value (did you forget quotes)?; `n` is a text: fetch its address, too",
    );
    check(
        "p filler_002 kind if kind == SOMEE",
        29,
        "Invalid value (did you forget quotes)?; no value of `kind` is called `SOMEE`; did you mean `SOME`?",
    );
}

#[test]
fn a_filter_on_whole_registers_is_a_condition_and_costs_no_exit() {
    let mut rig = Rig::optimizing();
    let text = "p filler_002 a=%di b=%si:u32 if a >= 5 && b == 7 && b & 0x10000000f";
    let id = rig.one(text);
    let info = rig.info(id);
    assert_eq!(info.mechanism, Some(Mechanism::Optimized));
    assert_eq!(info.actions.when.len(), 2);
    assert_eq!(info.actions.when[1].value, 0xf);
    assert!(info.actions.filter.is_some());
    assert_eq!(info.definition, text);
}

#[test]
fn a_filter_of_a_return_looks_at_the_return() {
    let mut rig = Rig::live();
    let ids = rig.register(&[
        defaults("r vfs_read if retval == 42 && count == 9"),
        defaults("r vfs_read if retval < 0"),
        // Registers also have their values at the return.
        defaults("r vfs_read x=%ax if x == 42"),
        defaults("r vfs_read x=%dx if x == 9"),
        defaults("r vfs_read x=$stack if x == 0"),
    ]);
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rsp = STACK.0;
    cpu.regs.rdx = 9;
    rig.guest
        .write(STACK, &0xffff_ffff_8100_0b20_u64.to_le_bytes());
    assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
    let trampoline = Gva(u64::from_le_bytes(rig.guest.read::<8>(STACK)));
    cpu.regs.rsp = STACK.0 + 8;
    (cpu.regs.rax, cpu.regs.rdx) = (42, 0);
    cpu.regs.rip = trampoline.0;
    assert_eq!(cpu.hit(trampoline), RESUME);
    let events = cpu.events();
    let seen: Vec<_> = events.iter().map(|event| event.probe).collect();
    assert_eq!(seen, [ids[2], ids[0]]);
    let counts = ids.iter().map(|id| rig.counts(*id));
    let counts: Vec<_> = counts.map(|it| (it.hits, it.vetoed)).collect();
    assert_eq!(counts, [(1, 0), (0, 1), (1, 0), (0, 1), (0, 1)]);
}

#[test]
fn fields_that_are_not_there_are_refused_at_their_column() {
    let mut rig = Rig::live();
    let mut check = |definition, column, words| check_refused(&mut rig, definition, column, words);
    check("p vfs_read if nosuch == 1", 14, "Field not found");
    check(
        "p vfs_read a=%di if a == 1 && b == 1",
        30,
        "Field not found",
    );
    check(
        "p vfs_read a=%di if a ~ \"x\"",
        20,
        "Illegal operation for field type",
    );
    check(
        "p vfs_read if comm == 1",
        14,
        "Illegal operation for field type",
    );
    check(
        "p vfs_read a=+0(%di):u8[4] if a == 1",
        30,
        "Illegal operation for field type",
    );
}

#[test]
fn numbers_are_compared_in_the_size_and_with_the_sign_of_the_field() {
    // A value in memory with all bits set. The rows below have a type, a filter, and whether the filter holds for
    // this value.
    const ALL: [u8; 8] = [0xff; 8];
    let prepare = |memory: [u8; 8]| {
        move |guest: &TestGuest, cpu: &mut Cpu| {
            guest.write(HERE, &memory);
            cpu.regs.rdi = HERE.0;
        }
    };
    for (bits, own) in [
        (8, 0xff_u64),
        (16, 0xffff),
        (32, 0xffff_ffff),
        (64, u64::MAX),
    ] {
        let more = u128::from(own) + 1;
        for (ty, filter, holds) in [
            ('s', "m == -1".to_owned(), true),
            ('s', format!("m == {own:#x}"), true),
            ('s', format!("m == {own}"), true),
            ('s', "m < 0".to_owned(), true),
            ('s', format!("m >= {own:#x} && m <= -1"), true),
            ('s', "m != -1".to_owned(), false),
            ('s', "m > -2 && m & 0x80".to_owned(), true),
            ('u', "m == -1".to_owned(), true),
            ('u', format!("m == {own:#x}"), true),
            ('u', "m > 0 && m >= -1".to_owned(), true),
            ('u', "m < 0".to_owned(), false),
            ('u', "m < -1".to_owned(), false),
            ('u', "m > -2".to_owned(), true),
            ('x', "m == -1".to_owned(), true),
        ] {
            let definition = format!("p vfs_read m=+0(%di):{ty}{bits} if {filter}");
            let expected = if holds { (1, 0) } else { (0, 1) };
            assert_eq!(
                filtered(&definition, prepare(ALL)),
                expected,
                "{definition}"
            );
        }
        // Bits beyond the field do not count.
        if let Ok(more) = u64::try_from(more) {
            let definition = format!("p vfs_read m=+0(%di):u{bits} if m == {more:#x}");
            assert_eq!(
                filtered(&definition, prepare([0; 8])),
                (1, 0),
                "{definition}"
            );
        }
    }
    for (filter, expected) in [
        ("pid == 0x10000004d", (1, 0)),
        ("pid != -1 && cpu != -1", (1, 0)),
        ("cpu < -1", (1, 0)),
    ] {
        let found = filtered(&format!("p vfs_read if {filter}"), prepare([0; 8]));
        assert_eq!(found, expected, "{filter}");
    }
}
