//! Tests hits with unsuitable page tables, descriptor tables and stacks.

use super::*;
use hvprobe_machine::{EndReason, Mechanism};
use hvprobe_tests::micro::host::{build, catch_mode};
use hvprobe_tests::micro::recorder::records;
use hvprobe_tests::micro::{Asm, IDT_BASE, UNMAPPED, WINDOW};
use hvprobe_vm::CatchMode;
use iced_x86::code_asm::{CodeAssembler, ptr, qword_ptr, registers::*};

#[test]
fn hits_need_no_tables_of_the_guests() {
    let Some(mode) = catch_mode("bad tables") else {
        return;
    };
    let (_folder, mut config) = build(|kernel| {
        kernel.start_recording()?;
        let (probed, mut own, mut bad) = (Probed::new(kernel), kernel.label(), kernel.label());
        let a = kernel.asm();
        probed.call(a)?;
        a.lidt(ptr(bad))?;
        a.lgdt(ptr(bad))?;
        a.mov(r13, rsp)?;
        probed.call(a)?;
        a.lidt(ptr(own))?;
        done(a)?;
        a.set_label(&mut own)?;
        a.dw(&[0xfff])?;
        a.dq(&[IDT_BASE])?;
        a.set_label(&mut bad)?;
        a.dw(&[0xfff])?;
        a.dq(&[UNMAPPED])?;
        probed.define(kernel)
    });
    config.probes = one_each();
    let (_, ending, events) = ended(config);
    if mode == CatchMode::IdtGate {
        // Without a table, no int3 can be delivered.
        assert!(
            matches!(ending.reason, EndReason::TripleFault(_)),
            "{ending:?}"
        );
    } else {
        assert!(is_done(&ending), "{ending:?}");
        assert_eq!(events.len(), 6);
    }
}

#[test]
fn a_stepped_copy_that_faults_without_a_table_ends_the_guest_as_in_its_place() {
    if catch_mode("faults without a table").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        let (faulting, mut bad) = (kernel.label(), kernel.label());
        let a = kernel.asm();
        a.mov(rbx, UNMAPPED)?;
        a.lidt(ptr(bad))?;
        a.call(faulting)?;
        done(a)?;
        a.set_label(&mut bad)?;
        a.dw(&[0xfff])?;
        a.dq(&[UNMAPPED])?;
        kernel.function("faulting", faulting)?;
        kernel.asm().mov(rax, qword_ptr(rbx))?;
        kernel.asm().ret()
    });
    config.probes = vec![with("p faulting+5", Mechanism::Stepped)];
    let (_, ending, _) = ended(config);
    assert!(
        matches!(ending.reason, EndReason::TripleFault(_)),
        "{ending:?}"
    );
}

#[test]
fn stacks_that_are_not_there_are_the_guests_own_trouble() {
    let Some(mode) = catch_mode("bad stacks") else {
        return;
    };
    for stack in [UNMAPPED, 0x8000_0000_0000_0000, 0] {
        for way in ["boosted", "stepped", "faulting", "emulated"] {
            let (_folder, mut config) = build(|kernel| {
                let (mut back, function) = (kernel.label(), kernel.label());
                let a = kernel.asm();
                a.mov(rbx, UNMAPPED)?;
                a.mov(r12, rsp)?;
                a.mov(rsp, stack)?;
                a.jmp(function)?;
                a.set_label(&mut back)?;
                a.mov(rsp, r12)?;
                done(a)?;
                kernel.function("probed", function)?;
                let a = kernel.asm();
                match way {
                    "emulated" => a.push(rbx)?,
                    "faulting" => a.mov(rax, qword_ptr(rbx))?,
                    _ => a.imul_2(rax, rbx)?,
                }
                a.jmp(back)
            });
            config.probes = vec![with(
                "p probed+5",
                match way {
                    "emulated" => Mechanism::Emulated,
                    "boosted" => Mechanism::Boosted,
                    _ => Mechanism::Stepped,
                },
            )];
            let (_, ending, _) = ended(config);
            let harmless = matches!(way, "boosted" | "stepped") && mode != CatchMode::IdtGate;
            if harmless {
                assert!(is_done(&ending), "{stack:#x}, {way}: {ending:?}");
            } else {
                assert!(
                    matches!(ending.reason, EndReason::TripleFault(_)),
                    "{stack:#x}, {way}: {ending:?}"
                );
            }
        }
    }
}

/// Assembles code that copies the page tables that map the kernel, and loads the copy. The copy is in RAM, 8 MiB
/// after the start of the kernel. Before it is loaded, the code that `change` assembles may modify the copied table
/// of 2 MiB pages, whose address is in RDI. Changes all registers except R12 to R15.
fn other_tables(
    a: &mut CodeAssembler,
    change: impl FnOnce(&mut CodeAssembler) -> Asm<()>,
) -> Asm<()> {
    const VIRT: u64 = 0xffff_ffff_8100_0000;
    const PHYS: u64 = 0x100_0000;
    const AT: u64 = 0x80_0000;
    for (page, table) in [(0_u64, 0_u64), (1, 1), (2, 2)] {
        let mut again = a.create_label();
        a.mov(rsi, VIRT + table * 0x1000)?;
        a.mov(rdi, VIRT + AT + page * 0x1000)?;
        a.mov(ecx, 512)?;
        a.set_label(&mut again)?;
        a.mov(rax, qword_ptr(rsi))?;
        a.mov(qword_ptr(rdi), rax)?;
        a.add(rsi, 8)?;
        a.add(rdi, 8)?;
        a.dec(ecx)?;
        a.jnz(again)?;
    }
    a.mov(rdi, VIRT + AT)?;
    a.mov(rax, PHYS + AT + 0x1003)?;
    a.mov(qword_ptr(rdi + 511 * 8), rax)?;
    a.mov(rax, PHYS + AT + 0x2003)?;
    a.mov(qword_ptr(rdi + 0x1000 + 510 * 8), rax)?;
    a.add(rdi, 0x2000)?;
    change(a)?;
    a.mov(rax, PHYS + AT)?;
    a.mov(cr3, rax)
}

#[test]
fn hits_under_other_page_tables_go_by_what_the_kernel_maps() {
    let Some(mode) = catch_mode("other page tables") else {
        return;
    };
    for way in ["emulated", "boosted", "stepped"] {
        let (_folder, mut config) = build(|kernel| {
            kernel.start_recording()?;
            let (probed, mut after) = (Probed::new(kernel), kernel.label());
            let a = kernel.asm();
            probed.call(a)?;
            // Maps the kernel without the hidden region.
            other_tables(a, |a| a.mov(qword_ptr(rdi), 0))?;
            a.lea(r15, ptr(after))?;
            a.call(match way {
                "emulated" => probed.emulated,
                "boosted" => probed.boosted,
                _ => probed.stepped,
            })?;
            a.set_label(&mut after)?;
            done(a)?;
            probed.define(kernel)?;
            kernel.record(&[13, 14], true)
        });
        config.probes = one_each();
        let (machine, ending, events) = ended(config);
        match way {
            "emulated" => {
                assert!(is_done(&ending), "{ending:?}");
                assert_eq!(events.len(), 4);
            }
            "boosted" => {
                assert!(is_done(&ending), "{mode:?} {ending:?}");
                let seen = records(&machine);
                assert!(seen.iter().any(|r| r.rip == WINDOW + SLOTS), "{seen:#x?}");
            }
            _ => assert!(
                matches!(ending.reason, EndReason::TripleFault(_)),
                "{ending:?}"
            ),
        }
    }
}

#[test]
fn a_fault_on_a_stack_the_kernel_does_not_map_leaves_nobody_hanging() {
    if catch_mode("a stack of another page table").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        let (probed, faulting) = (Probed::new(kernel), kernel.label());
        let a = kernel.asm();
        probed.call(a)?;
        other_tables(a, |a| {
            a.mov(rax, 0x83_u64 | 24 << 20)?;
            a.mov(qword_ptr(rdi + 40 * 8), rax)
        })?;
        a.mov(rsp, WINDOW + (41 << 21))?;
        a.mov(rbx, UNMAPPED)?;
        a.call(faulting)?;
        done(a)?;
        probed.define(kernel)?;
        kernel.function("faulting", faulting)?;
        kernel.asm().mov(rax, qword_ptr(rbx))?;
        kernel.asm().ret()
    });
    config.probes = one_each();
    config.probes.push(with("p faulting+5", Mechanism::Stepped));
    let (_, ending, _) = ended(config);
    eprintln!("{}", first_line(&ending));
}
