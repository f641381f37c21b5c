//! Compares the state that a guest sees when an instruction faults at its own address with the state that it sees
//! when the instruction is displaced by a probe and faults in the same way.

use hvprobe_hit::event::EventKind;
use hvprobe_machine::{Event, Mechanism};
use hvprobe_tests::micro::host::{build, catch_mode, result, symbol};
use hvprobe_tests::micro::recorder::{Record, records};
use hvprobe_tests::micro::{Asm, IDT_BASE, MicroKernel, RESULTS, UNMAPPED};
use hvprobe_vm::CatchMode;
use iced_x86::code_asm::registers::*;
use iced_x86::code_asm::{CodeAssembler, ptr, qword_ptr};

use super::*;

const RF: u64 = 1 << 16;

const NONCANONICAL: u64 = 0x8000_1234_5678_0000;

/// Number of result words of a case: RAX, RSP, RFLAGS, RBX.
const WORDS: u64 = 4;

/// An instruction that faults.
struct Case {
    name: &'static str,
    /// Value of RBX before the instruction.
    operand: u64,
    /// Value of RSP before the instruction, or 0 to leave RSP unchanged.
    stack: u64,
    /// Value of RBP before the instruction, or 0 to leave RBP unchanged.
    frame: u64,
    vector: u64,
    code: fn(&mut CodeAssembler) -> Asm<()>,
}

const fn case(
    name: &'static str,
    operand: u64,
    vector: u64,
    code: fn(&mut CodeAssembler) -> Asm<()>,
) -> Case {
    Case {
        name,
        operand,
        stack: 0,
        frame: 0,
        vector,
        code,
    }
}

const fn on_stack(case: Case, stack: u64) -> Case {
    Case { stack, ..case }
}

const PF: u64 = 14;

const GP: u64 = 13;

const COPIED: &[Case] = &[
    case("read", UNMAPPED + 0x123, PF, |a| a.mov(rax, qword_ptr(rbx))),
    case("write", UNMAPPED + 0x456, PF, |a| {
        a.mov(qword_ptr(rbx), rax)
    }),
    case("read and write", UNMAPPED, PF, |a| {
        a.add(qword_ptr(rbx), rax)
    }),
    case("read of no address", NONCANONICAL, GP, |a| {
        a.mov(rax, qword_ptr(rbx))
    }),
    case("write to no address", NONCANONICAL, GP, |a| {
        a.mov(qword_ptr(rbx), rax)
    }),
    case("division by zero", 0, 0, |a| a.div(rbx)),
    case("unknown register", 0, GP, |a| a.rdmsr()),
    case("reserved bits of CR4", 1 << 63, GP, |a| a.mov(cr4, rbx)),
];

const EMULATED: &[Case] = &[
    on_stack(case("push", 0, PF, |a| a.push(rbx)), UNMAPPED + 0x1000),
    on_stack(case("pop", 0, PF, |a| a.pop(rbx)), UNMAPPED + 0x1000),
    on_stack(case("pushfq", 0, PF, |a| a.pushfq()), UNMAPPED + 0x1000),
    on_stack(case("ret", 0, PF, |a| a.ret()), UNMAPPED + 0x1000),
    on_stack(
        case("call", RESULTS, PF, |a| a.call(rbx)),
        UNMAPPED + 0x1000,
    ),
    case("call through memory", UNMAPPED, PF, |a| {
        a.call(qword_ptr(rbx))
    }),
    case("jmp through memory", UNMAPPED, PF, |a| {
        a.jmp(qword_ptr(rbx))
    }),
    case("jmp through no address", NONCANONICAL, GP, |a| {
        a.jmp(qword_ptr(rbx))
    }),
    case("jmp to nowhere", UNMAPPED + 0x700, PF, |a| a.jmp(rbx)),
    case("jmp to no address", NONCANONICAL, GP, |a| a.jmp(rbx)),
    Case {
        frame: UNMAPPED,
        ..case("leave", 0, PF, |a| a.leave())
    },
];

/// Makes `main` run each case in place and displaced, and store the results.
fn compared(kernel: &mut MicroKernel, cases: &[&Case], flags: u64) -> Asm<()> {
    kernel.start_recording()?;
    let mut results = RESULTS;
    for (n, case) in cases.iter().enumerate() {
        for kind in ["plain", "probed"] {
            let (mut after, function, saved) = (kernel.label(), kernel.label(), RESULTS + 0xd00);
            let a = kernel.asm();
            a.mov(rcx, 0xdead_0000_u64)?;
            a.xor(edx, edx)?;
            a.lea(r15, ptr(after))?;
            a.mov(qword_ptr(saved), rsp)?;
            a.mov(rax, flags)?;
            a.push(rax)?;
            a.popfq()?;
            a.mov(rax, RAX)?;
            a.mov(rbx, case.operand)?;
            if case.stack != 0 {
                a.mov(rsp, case.stack)?;
            }
            if case.frame != 0 {
                a.mov(rbp, case.frame)?;
            }
            a.jmp(function)?;
            kernel.function(&format!("{kind}_{n}"), function)?;
            (case.code)(kernel.asm())?;
            let a = kernel.asm();
            a.set_label(&mut after)?;
            a.mov(qword_ptr(results), rax)?;
            a.mov(qword_ptr(results + 8), rsp)?;
            a.mov(rsp, qword_ptr(saved))?;
            a.pushfq()?;
            a.pop(rax)?;
            a.mov(qword_ptr(results + 16), rax)?;
            a.mov(qword_ptr(results + 24), rbx)?;
            a.cli()?;
            results += 8 * WORDS;
        }
    }
    kernel.asm().mov(al, 42)?;
    kernel.asm().ret()?;
    kernel.record(&[0, 6, 12, 13, 14], true)
}

fn same_faults(cases: &[Case], mechanism: Mechanism) {
    let Some(mode) = catch_mode("faults") else {
        return;
    };
    // With the IDT gate, an int3 is delivered before it is caught, which is not possible on an absent stack.
    let on_stack = |case: &&Case| mode != CatchMode::IdtGate || case.stack == 0;
    let cases: Vec<&Case> = cases.iter().filter(on_stack).collect();
    for flags in [0x2, 0x8d7 | IF] {
        let (_folder, mut config) = build(|kernel| compared(kernel, &cases, flags));
        config.probes = (0..cases.len())
            .map(|n| with_faults(&format!("p probed_{n}+5"), mechanism))
            .collect();
        let (machine, events) = finished(config);
        let records = records(&machine);
        assert_eq!(records.len(), cases.len() * 2, "{records:#x?}");
        let probes = machine.probes();
        for (n, case) in cases.iter().enumerate() {
            let name = format!("{} with flags {flags:#x}", case.name);
            let relative = |kind: &str, record: &Record| {
                let start = symbol(&machine, &format!("{kind}_{n}"));
                let offset = record.rip.wrapping_sub(start);
                Record {
                    rip: if offset < 32 { offset } else { record.rip },
                    ..*record
                }
            };
            let plain = relative("plain", &records[2 * n]);
            let probed = relative("probed", &records[2 * n + 1]);
            // On some processors (QEMU's), a jump to a non-canonical address faults at the target. On others, which
            // the emulator follows, it faults before the jump.
            let no_address = plain.vector == GP && plain.rip == case.operand;
            // QEMU's processor leaves RF clear where others set it.
            let same = Record {
                rip: if no_address { plain.rip } else { probed.rip },
                rflags: probed.rflags & (plain.rflags | !RF),
                ..probed
            };
            assert_eq!(plain, same, "{name}: {plain:#x?} {probed:#x?}");
            assert_eq!(plain.vector, case.vector, "{name}: {plain:#x?}");
            assert_eq!(plain.idt, IDT_BASE, "{name}");
            for word in 0..WORDS {
                let at = 16 * n as u64 * WORDS + word * 8;
                let (plain, probed) = (result(&machine, at), result(&machine, at + 8 * WORDS));
                assert_eq!(plain, probed, "{name}: word {word}");
            }
            // On some processors the jump itself succeeds, and its target faults.
            let in_place = probed.rip == 5;
            assert_eq!(probes[n].mechanism, Some(mechanism), "{name}");
            assert_eq!(
                (probes[n].counts.hits, probes[n].counts.faults),
                (1, u64::from(in_place)),
                "{name}"
            );
            let seen: Vec<&Event> = events.iter().filter(|e| e.probe == probes[n].id).collect();
            let kinds: Vec<EventKind> = seen.iter().map(|e| e.kind).collect();
            if !in_place {
                assert_eq!(kinds, [EventKind::Hit], "{name}");
                continue;
            }
            let has_code = case.vector != 0;
            let fault = EventKind::Fault {
                vector: u8::try_from(case.vector).expect("a vector"),
                error_code: has_code.then(|| u32::try_from(plain.error_code).expect("32 bits")),
            };
            assert_eq!(kinds, [EventKind::Hit, fault], "{name}");
            for event in seen {
                assert_eq!(
                    Some(event.regs.rip),
                    probes[n].addr.map(|at| at.0),
                    "{name}"
                );
                assert_eq!(event.regs.rflags & 0xed5, flags & 0xed5, "{name}");
                assert_eq!(event.regs.rax, RAX, "{name}");
            }
        }
    }
}

#[test]
fn a_stepped_copy_faults_as_the_instruction_in_its_place() {
    same_faults(COPIED, Mechanism::Stepped);
}

#[test]
fn an_emulated_instruction_faults_as_it_does_in_its_place() {
    same_faults(EMULATED, Mechanism::Emulated);
}
