//! Probes that are refused in a live guest, and probes that are not.

use expect_test::{Expect, expect};
use hvprobe_linux::image::KernelImage;
use hvprobe_spec::Item;

use super::arguments::defaults;
use super::*;
use crate::explain::explain;

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    if let Some(source) = error.source() {
        text = format!("{text}: {}", chain(source));
    }
    text
}

fn check(rig: &mut Rig, definition: &str, expected: Expect) {
    let found = match rig.try_register(&[spec(definition)]) {
        Ok(ids) => {
            let info = rig.info(ids[0]);
            rig.unregister(&ids).unwrap();
            let (symbol, offset) = info.symbol.unwrap();
            format!("{symbol}+{offset:#x} {}", info.mechanism.unwrap())
        }
        Err(error) => chain(&error),
    };
    expected.assert_eq(&found);
}

#[test]
fn what_is_refused_is_marked_where_it_was_typed() {
    let mut rig = Rig::live();
    for (definition, expected) in [
        ("p   vfs_raed", Some(4)),
        ("p twin", Some(2)),
        ("p:g/e  vfs_read+0x100", Some(16)),
        ("p _stext+271 ", Some(9)),
        ("p vfs_read+0x100 %di", Some(11)),
        ("p nosuch_*", Some(2)),
        ("p  vfs_* nothing", Some(9)),
        ("p  exc_int3", Some(3)),
        ("p 0x1000", Some(2)),
        ("p  vfs_read if count == 3 && a == 1", Some(29)),
    ] {
        let error = rig.changes_nothing(|rig| rig.try_register(&[defaults(definition)]));
        let column = match error.expect_err("it is refused") {
            RegisterError::Refused { column, .. } => column,
            RegisterError::SomeRefused { first, .. } => first.column,
            other => panic!("{definition}: {other:?}"),
        };
        assert_eq!(column, expected, "{definition}");
    }
}

#[test]
fn a_kernel_that_lies_where_code_of_probes_goes_is_not_probed() {
    let why = |start: u64| {
        let image = KernelImage::parse(&kernel::linked_at(start)).unwrap();
        assert_eq!(image.virt_to_phys_offset(), kernel::OFFSET, "{start:#x}");
        let mut all = explain(&image, &spec("p vfs_read"));
        all.remove(0).err().map(|skipped| skipped.why)
    };
    let end = Gva(kernel::TEXT);
    for physical in [0x20_0000, 0x100_0000 - 0x1000] {
        let at = Gva(kernel::OFFSET + physical);
        assert_eq!(why(at.0), Some(Refused::LinkedLow { at, end }), "{at}");
    }
    for start in [kernel::TEXT, kernel::TEXT + 0x20_0000] {
        assert!(!matches!(why(start), Some(Refused::LinkedLow { .. })));
    }
    let at = Gva(kernel::OFFSET + 0x20_0000);
    expect!["the kernel lies at 0xffffffff80200000, and the code of probes goes below 0xffffffff81000000: nothing of it can be probed unless it is built with CONFIG_PHYSICAL_START=0x1000000 or more"]
        .assert_eq(&Refused::LinkedLow { at, end }.to_string());
}

#[test]
fn every_refusal_says_why() {
    let rig = &mut Rig::live();
    check(
        rig,
        "p vfs_raed",
        expect!["probe 0 (p vfs_raed): unknown symbol `vfs_raed`; did you mean `vfs_read`?"],
    );
    check(
        rig,
        "p twin",
        expect![
            "probe 0 (p twin): symbol `twin` is ambiguous, it is at 0xffffffff81000200, 0xffffffff81000300; give the address instead"
        ],
    );
    check(
        rig,
        "p vfs_read+0x100",
        expect![
            "probe 0 (p vfs_read+0x100): offset 0x100 is outside vfs_read, which is 0x100 bytes long"
        ],
    );
    check(
        rig,
        "p vfs_read+0xf0",
        expect![
            "probe 0 (p vfs_read+0xf0): 0xffffffff810001f0 is padding behind vfs_read, whose code is 0x1a bytes long: nothing runs there"
        ],
    );
    check(
        rig,
        "p _stext+0x10f",
        expect![
            "probe 0 (p _stext+0x10f): 0xffffffff8100010f is inside the instruction `mov rax, [rdi+8]` at 0xffffffff8100010d, 4 bytes long"
        ],
    );
    check(
        rig,
        "p _stext+0x10d $arg1",
        expect!["probe 0 (p _stext+0x10d $arg1): $arg* can be used only on function entry or exit"],
    );
    check(
        rig,
        "r _stext+0x10d",
        expect![
            "probe 0 (r _stext+0x10d): 0xffffffff8100010d is 0xd bytes into vfs_read: only a function's entry can be used for return probes"
        ],
    );
    check(
        rig,
        "p _stext+0x7fffffffffff",
        expect![
            "probe 0 (p _stext+0x7fffffffffff): no symbol contains 0x7fff80ffffff, so instruction boundaries cannot be checked"
        ],
    );
    check(
        rig,
        "p _stext+0xffffffffffffffff",
        expect![
            "probe 0 (p _stext+0xffffffffffffffff): no symbol contains 0xffffffff80ffffff, so instruction boundaries cannot be checked"
        ],
    );
    check(
        rig,
        "p init_top_pgt",
        expect!["probe 0 (p init_top_pgt): 0xffffffff82a00000 is not in the kernel's text"],
    );
    check(
        rig,
        "p 0x1000",
        expect!["probe 0 (p 0x1000): 0x1000 is not in the kernel's text"],
    );
    check(
        rig,
        "p init_it",
        expect![
            "probe 0 (p init_it): 0xffffffff8304e000 is init text, which the kernel frees before probes can be planted"
        ],
    );
    check(
        rig,
        "p do_int3+4",
        expect![
            "probe 0 (p do_int3+0x4): 0xffffffff81000404: `do_int3` is on the kernel's own kprobe blacklist (NOKPROBE_SYMBOL)"
        ],
    );
    check(
        rig,
        "p exc_int3",
        expect![
            "probe 0 (p exc_int3): 0xffffffff81000800: it is noinstr code, which runs where an exception cannot be taken"
        ],
    );
    check(
        rig,
        "p asm_exc_int3",
        expect![
            "probe 0 (p asm_exc_int3): 0xffffffff81000900: it is entry code, which runs before the kernel's own state is set up"
        ],
    );
    check(
        rig,
        "p sites+0x12",
        expect![
            "probe 0 (p sites+0x12): 0xffffffff81000612: it is a jump label, which the kernel rewrites as features turn on and off"
        ],
    );
    check(
        rig,
        "p vfs_read+1",
        expect![
            "probe 0 (p vfs_read+0x1): 0xffffffff81000101 is inside the instruction `endbr64` at 0xffffffff81000100, 4 bytes long"
        ],
    );
    check(
        rig,
        "p vfs_read+0xf",
        expect![
            "probe 0 (p vfs_read+0xf): 0xffffffff8100010f is inside the instruction `mov rax, [rdi+8]` at 0xffffffff8100010d, 4 bytes long"
        ],
    );
    check(
        rig,
        "p vfs_read+0x13",
        expect![
            "probe 0 (p vfs_read+0x13): 0xffffffff81000113: it marks a BUG or WARN, which the kernel looks up by the address of the trap"
        ],
    );
    check(
        rig,
        "p vfs_read+0x15",
        expect![
            "probe 0 (p vfs_read+0x15): 0xffffffff81000115 already holds an int3 that is not ours: the guest is probing or patching it"
        ],
    );
    check(
        rig,
        "p loop:lo_open",
        expect![
            "probe 0 (p loop:lo_open): nothing of module loop can be probed: no symbol `modules` leads to the kernel's modules: it was built without CONFIG_KALLSYMS_ALL"
        ],
    );
}

#[test]
fn legal_places_have_the_cheapest_mechanism() {
    let rig = &mut Rig::live();
    check(rig, "p vfs_read", expect!["vfs_read+0x4 emulated"]);
    check(rig, "p _stext+0x100", expect!["vfs_read+0x4 emulated"]);
    check(rig, "p _stext+0x10d", expect!["vfs_read+0xd boosted"]);
    check(rig, "r _stext+0x100", expect!["vfs_read+0x4 emulated"]);
    check(rig, "p _stext+0x200", expect!["twin+0x0 emulated"]);
    check(rig, "p vfs_read+9", expect!["vfs_read+0x9 emulated"]);
    check(rig, "p vfs_read+0xd", expect!["vfs_read+0xd boosted"]);
    check(rig, "p vfs_read+0x11", expect!["vfs_read+0x11 emulated"]);
    check(rig, "p vfs_read+0x16", expect!["vfs_read+0x16 emulated"]);
    check(
        rig,
        "p 0xffffffff81000100",
        expect!["vfs_read+0x0 emulated"],
    );
    check(rig, "p sites+0x40", expect!["sites+0x40 stepped"]);
    check(rig, "p sites+0x44", expect!["sites+0x44 emulated"]);
    check(rig, "p sites+0x48", expect!["sites+0x48 boosted"]);
    check(rig, "r vfs_read", expect!["vfs_read+0x4 emulated"]);
    check(rig, "r filler_001", expect!["filler_001+0x0 boosted"]);
}

#[test]
fn breakpoint_of_the_guest_is_left_to_it() {
    let mut rig = Rig::live();
    let at = rig.at("filler_000", 0);
    rig.guest.write(at, &[INT3]);
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec(EMULATED)]));
    assert_eq!(refusal(result), (0, Refused::ForeignBreakpoint { at }));
}

#[test]
fn function_entry_with_a_call_of_ftrace_is_left_to_it() {
    let mut rig = Rig::live();
    let at = rig.at("vfs_read", 4);
    rig.guest.write(at, &[0xe8, 1, 2, 3, 4]);
    for definition in ["p vfs_read", "p vfs_read+4"] {
        let result = rig.changes_nothing(|rig| rig.try_register(&[spec(definition)]));
        assert_eq!(refusal(result), (0, Refused::FtraceInUse { at }));
    }
}

#[test]
fn boundaries_are_found_through_the_int3s_of_other_probes() {
    let mut rig = Rig::live();
    // From the last to the first and back: each is checked through all patches before it.
    let offsets = [0x11, 0xd, 0xa, 9, 4, 0];
    for offset in offsets.into_iter().chain(offsets.into_iter().rev()) {
        let target = rig.at("vfs_read", offset);
        rig.one(&format!("p {target}"));
    }
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec("p vfs_read+0xb")]));
    let (_, why) = refusal(result);
    expect!["0xffffffff8100010b is inside the instruction `mov rbp, rsp` at 0xffffffff8100010a, 3 bytes long"]
        .assert_eq(&why.to_string());
    let mechanisms = rig.list().into_iter().map(|info| info.mechanism);
    let boosted = mechanisms.filter(|it| *it == Some(Mechanism::Boosted));
    assert_eq!(boosted.count(), 2);
}

#[test]
fn text_that_is_not_mapped_is_refused() {
    let mut rig = Rig::live();
    // The page of `filler_400` is unmapped.
    let tables = rig.guest.view().tables;
    let at = rig.at("filler_400", 0);
    let (entry, _) = tables.entry_at(&rig.guest.mem, at, 1).unwrap();
    hvprobe_arch::mem::PhysMemory::write(&rig.guest.mem, entry, &[0; 8]).unwrap();
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec("p filler_400")]));
    assert_eq!(refusal(result), (0, Refused::Unmapped { at }));
}

#[test]
fn stacks_are_refused_where_the_kernel_has_no_tables_for_them() {
    let mut rig = Rig::live();
    let mut wanted = spec("p vfs_read");
    wanted.actions.capture = vec![Item::StackTrace(31)];
    let error = rig.try_register(&[wanted]).unwrap_err();
    expect![
        "probe 0 (p vfs_read): the kernel's stack cannot be recorded: the kernel has no unwind tables (CONFIG_UNWINDER_ORC)"
    ]
    .assert_eq(&chain(&error));
}
