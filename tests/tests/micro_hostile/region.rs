//! Tests attacks on the hidden region: guests unmap it, overwrite it, and jump into it.

use super::*;
use hvprobe_machine::{EndReason, Mechanism};
use hvprobe_tests::micro::host::{build, catch_mode};
use hvprobe_tests::micro::recorder::{FULL, Record, records};
use hvprobe_tests::micro::{Asm, PMD, UNEXPECTED_EXCEPTION, UNMAPPED, WINDOW};
use iced_x86::code_asm::{CodeAssembler, ptr, qword_ptr, registers::*};

/// Offset of the stubs in the hidden region. These guests know it, as they know the next two offsets.
const STUBS: u64 = 0x1000;

const TRAMPOLINE: u64 = 0x1440;

const IDT_PAGE: u64 = 0x2000;

/// Change of the page table entry that maps the hidden region.
#[derive(Clone, Copy, Debug)]
enum Entry {
    Cleared,
    /// Maps other memory, which is all zeros.
    Redirected,
    /// Refers to a table that does not exist.
    Wild,
}

#[test]
fn a_guest_that_unmaps_the_slots_gets_the_faults_and_no_more() {
    let Some(mode) = catch_mode("unmapped slots") else {
        return;
    };
    for entry in [Entry::Cleared, Entry::Redirected, Entry::Wild] {
        for way in ["boosted", "stepped"] {
            let (_folder, mut config) = build(|kernel| {
                kernel.start_recording()?;
                let (probed, mut after) = (Probed::new(kernel), kernel.label());
                let a = kernel.asm();
                probed.call(a)?;
                a.mov(rbx, PMD)?;
                let value: u64 = match entry {
                    Entry::Cleared => 0,
                    Entry::Redirected => 24 << 20 | 0x83,
                    Entry::Wild => 0x000f_ffff_ffff_f003,
                };
                a.mov(rax, value)?;
                a.mov(qword_ptr(rbx), rax)?;
                flush(a)?;
                a.call(probed.emulated)?;
                a.lea(r15, ptr(after))?;
                a.mov(rbx, UNMAPPED)?;
                a.mov(rax, UNMAPPED)?;
                a.call(if way == "boosted" {
                    probed.boosted
                } else {
                    probed.stepped
                })?;
                a.set_label(&mut after)?;
                done(a)?;
                probed.define(kernel)?;
                kernel.record(&[6, 13, 14], true)
            });
            config.probes = one_each();
            let (machine, ending, _) = ended(config);
            let what = format!("{entry:?}, {way}, {mode:?}: {ending:?}");
            let counts: Vec<_> = machine.probes().iter().map(|p| p.counts.hits).collect();
            let hits = if way == "boosted" {
                [2, 2, 1]
            } else {
                [2, 1, 2]
            };
            assert_eq!(counts, hits, "{what}");
            match (way, &ending.reason) {
                // The guest handles the fault.
                ("boosted", EndReason::Reset) => {
                    assert_eq!(ending.guest_status, Some(DONE), "{what}");
                    let seen: Vec<Record> = records(&machine);
                    assert!(seen.iter().any(|r| r.vector == 14), "{what} {seen:#x?}");
                }
                // Otherwise the guest may end in any way. A stepped copy, for example, faults in the exception
                // window, whose table is unmapped as well.
                (_, EndReason::TripleFault(_) | EndReason::Crash(_) | EndReason::Reset) => {}
                _ => panic!("{what}"),
            }
        }
    }
}

/// Name and code of an attack that overwrites the hidden region.
type Vandal = (&'static str, fn(&mut CodeAssembler) -> Asm<()>);

/// Fills `count` words from `at` on with `value`. Changes RAX, RCX, RDI.
fn fill(a: &mut CodeAssembler, at: u64, count: u64, value: u64) -> Asm<()> {
    let mut again = a.create_label();
    a.mov(rdi, at)?;
    a.mov(rcx, count)?;
    a.mov(rax, value)?;
    a.set_label(&mut again)?;
    a.mov(qword_ptr(rdi), rax)?;
    a.add(rdi, 8)?;
    a.dec(rcx)?;
    a.jnz(again)
}

const VANDALS: &[Vandal] = &[
    ("slots of zeros", |a| fill(a, WRITABLE + SLOTS, 16, 0)),
    ("slots of ud2", |a| {
        fill(a, WRITABLE + SLOTS, 16, 0x0b0f_0b0f_0b0f_0b0f)
    }),
    ("slots of int3", |a| {
        fill(a, WRITABLE + SLOTS, 16, 0xcccc_cccc_cccc_cccc)
    }),
    ("slots of our port", |a| {
        fill(a, WRITABLE + SLOTS, 16, 0x90e6_90e6_90e6_90e6)
    }),
    // `push rax; jmp .-1`: until the stack is exhausted.
    ("slots that eat the stack", |a| {
        fill(a, WRITABLE + SLOTS, 16, 0x9090_9090_90fd_eb50)
    }),
    ("stubs of ud2", |a| {
        fill(a, WRITABLE + STUBS, 128, 0x0b0f_0b0f_0b0f_0b0f)
    }),
    ("stubs of nops and int3", |a| {
        fill(a, WRITABLE + STUBS, 128, 0xcc90_9090_cc90_9090)
    }),
    ("no window's table", |a| fill(a, WRITABLE + IDT_PAGE, 64, 0)),
    ("a wild table", |a| {
        fill(a, WRITABLE + IDT_PAGE, 64, 0xffff_8e00_0010_1234)
    }),
    ("no page table", |a| fill(a, WRITABLE, 16, 0)),
    ("a wild page table", |a| {
        fill(a, WRITABLE, 16, 0x000f_ffff_ffff_f003)
    }),
    ("a page table of itself", |a| {
        a.mov(rbx, PMD)?;
        a.mov(rax, qword_ptr(rbx))?;
        for page in 1..16 {
            a.mov(rdi, WRITABLE + page * 8)?;
            a.mov(qword_ptr(rdi), rax)?;
        }
        Ok(())
    }),
];

#[test]
fn guests_that_overwrite_the_hidden_region_harm_only_themselves() {
    let Some(mode) = catch_mode("vandals") else {
        return;
    };
    for (name, vandal) in VANDALS {
        for way in ["boosted", "stepped", "faulting"] {
            eprintln!("{name}, {way}");
            let (_folder, mut config) = build(|kernel| {
                kernel.start_recording()?;
                let (probed, mut after) = (Probed::new(kernel), kernel.label());
                let faulting = kernel.label();
                let a = kernel.asm();
                probed.call(a)?;
                find_hidden(a)?;
                vandal(a)?;
                flush(a)?;
                a.lea(r15, ptr(after))?;
                a.mov(rbx, UNMAPPED)?;
                a.mov(rax, UNMAPPED)?;
                a.call(match way {
                    "boosted" => probed.boosted,
                    "stepped" => probed.stepped,
                    _ => faulting,
                })?;
                a.set_label(&mut after)?;
                done(a)?;
                probed.define(kernel)?;
                kernel.function("faulting", faulting)?;
                kernel.asm().mov(rax, qword_ptr(rbx))?;
                kernel.asm().ret()?;
                kernel.record(&[0, 6, 13, 14], false)
            });
            config.probes = one_each();
            config.probes.push(with("p faulting+5", Mechanism::Stepped));
            let (_, ending, _) = ended(config);
            eprintln!("  {mode:?}: {}", first_line(&ending));
        }
    }
}

#[test]
fn guests_that_jump_into_the_hidden_region_harm_only_themselves() {
    let Some(mode) = catch_mode("jumps") else {
        return;
    };
    for (name, offset) in [
        ("the page table", 0),
        ("a stub", STUBS + 14 * 4),
        ("behind the out of a stub", STUBS + 14 * 4 + 2),
        ("the middle of an out", STUBS + 14 * 4 + 1),
        ("the trampoline", TRAMPOLINE),
        ("the window's table", IDT_PAGE),
        ("a boosted slot", SLOTS),
        ("the middle of a boosted copy", SLOTS + 1),
        ("the jump of a boosted slot", SLOTS + 4),
        ("the end of a boosted slot", SLOTS + 31),
        ("a stepped slot", SLOTS + SLOT),
        ("the middle of a stepped copy", SLOTS + SLOT + 2),
        ("the int3 of a stepped slot", SLOTS + SLOT + 4),
        ("behind the int3 of a stepped slot", SLOTS + SLOT + 5),
        (
            "the middle of the int3s of a stepped slot",
            SLOTS + SLOT + 20,
        ),
        ("a slot that is free", SLOTS + 5 * SLOT),
        ("the last byte of the slots", SLOTS + 0xfff),
        ("a page that is not there", SLOTS + 0x1000),
        ("the end of the region", (2 << 20) - 1),
    ] {
        eprintln!("{name}");
        let (_folder, mut config) = build(|kernel| {
            kernel.start_recording()?;
            let (probed, mut after) = (Probed::new(kernel), kernel.label());
            let a = kernel.asm();
            probed.call(a)?;
            a.lea(r15, ptr(after))?;
            // Return addresses for the functions that these slots belong to.
            a.push(r15)?;
            a.push(r15)?;
            a.mov(rax, WINDOW + offset)?;
            a.jmp(rax)?;
            a.set_label(&mut after)?;
            done(a)?;
            probed.define(kernel)?;
            kernel.record(&[0, 6, 13, 14], true)
        });
        config.probes = one_each();
        let (_, ending, _) = ended(config);
        eprintln!("  {mode:?}: {}", first_line(&ending));
        let wild = [DONE, UNEXPECTED_EXCEPTION, FULL]
            .map(Some)
            .contains(&ending.guest_status);
        assert!(
            wild || matches!(
                ending.reason,
                EndReason::TripleFault(_) | EndReason::Crash(_)
            ),
            "{name}: {ending:?}"
        );
    }
}
