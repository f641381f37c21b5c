//! What a displaced instruction that faults, or is interrupted, shows the guest: the same as in its
//! own place. On whatever KVM there is.

use hvprobe_introspect::event::EventKind;
use hvprobe_tests::micro::host::{build, catch_mode, result, run, symbol};
use hvprobe_tests::micro::recorder::{Record, records};
use hvprobe_tests::micro::{Asm, IDT_BASE, MicroKernel, RESULTS, UNMAPPED};
use hvprobe_tests::rig::probe;
use hvprobe_vmm::machine::{EndReason, Event, Machine, MachineConfig, Mechanism, ProbeSpec};
use iced_x86::code_asm::{CodeAssembler, ptr, qword_ptr, registers::*};

const IF: u64 = 1 << 9;
const NONCANONICAL: u64 = 0x8000_1234_5678_0000;
const RAX: u64 = 0x0123_4567_89ab_cdef;
/// Words a case leaves: RAX, RFLAGS, RSP - the stack pointer before.
const WORDS: u64 = 4;

/// One instruction that faults.
struct Case {
    name: &'static str,
    /// What RBX, RSP and RBP hold before; 0 leaves the latter two as they are.
    operand: u64,
    stack: u64,
    frame: u64,
    vector: u64,
    error_code: u64,
    code: fn(&mut CodeAssembler) -> Asm<()>,
}

const fn case(
    name: &'static str,
    operand: u64,
    vector: u64,
    error_code: u64,
    code: fn(&mut CodeAssembler) -> Asm<()>,
) -> Case {
    Case {
        name,
        operand,
        stack: 0,
        frame: 0,
        vector,
        error_code,
        code,
    }
}

const fn on_stack(case: Case, stack: u64) -> Case {
    Case { stack, ..case }
}

const PF: u64 = 14;
const GP: u64 = 13;
const WRITE: u64 = 2;

const COPIED: &[Case] = &[
    case("read", UNMAPPED + 0x123, PF, 0, |a| {
        a.mov(rax, qword_ptr(rbx))
    }),
    case("write", UNMAPPED + 0x456, PF, WRITE, |a| {
        a.mov(qword_ptr(rbx), rax)
    }),
    case("read and write", UNMAPPED, PF, WRITE, |a| {
        a.add(qword_ptr(rbx), rax)
    }),
    case("read of no address", NONCANONICAL, GP, 0, |a| {
        a.mov(rax, qword_ptr(rbx))
    }),
    case("write to no address", NONCANONICAL, GP, 0, |a| {
        a.mov(qword_ptr(rbx), rax)
    }),
    case("division by zero", 0, 0, 0, |a| a.div(rbx)),
    case("unknown register", 0, GP, 0, |a| a.rdmsr()),
    case("reserved bits of CR4", 1 << 63, GP, 0, |a| a.mov(cr4, rbx)),
];

const EMULATED: &[Case] = &[
    on_stack(
        case("push", 0, PF, WRITE, |a| a.push(rbx)),
        UNMAPPED + 0x1000,
    ),
    on_stack(case("pop", 0, PF, 0, |a| a.pop(rbx)), UNMAPPED + 0x1000),
    on_stack(
        case("pushfq", 0, PF, WRITE, |a| a.pushfq()),
        UNMAPPED + 0x1000,
    ),
    on_stack(case("ret", 0, PF, 0, |a| a.ret()), UNMAPPED + 0x1000),
    on_stack(
        case("call", RESULTS, PF, WRITE, |a| a.call(rbx)),
        UNMAPPED + 0x1000,
    ),
    case("call through memory", UNMAPPED, PF, 0, |a| {
        a.call(qword_ptr(rbx))
    }),
    case("jmp through memory", UNMAPPED, PF, 0, |a| {
        a.jmp(qword_ptr(rbx))
    }),
    case("jmp through no address", NONCANONICAL, GP, 0, |a| {
        a.jmp(qword_ptr(rbx))
    }),
    case("jmp to nowhere", UNMAPPED + 0x700, PF, 0, |a| a.jmp(rbx)),
    case("jmp to no address", NONCANONICAL, GP, 0, |a| a.jmp(rbx)),
    Case {
        frame: UNMAPPED,
        ..case("leave", 0, PF, 0, |a| a.leave())
    },
];

/// `main` runs each case in its place and displaced, and leaves what it did.
fn compared(kernel: &mut MicroKernel, cases: &[Case], flags: u64) -> Asm<()> {
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

fn with_faults(definition: &str, mechanism: Mechanism) -> ProbeSpec {
    let mut spec = probe(definition);
    spec.mechanism = Some(mechanism);
    spec.actions.faults = true;
    spec
}

fn finished(config: MachineConfig) -> (std::sync::Arc<Machine>, Vec<Event>) {
    let (machine, ending, events) = run(config);
    assert_eq!(
        (ending.reason, ending.guest_status),
        (EndReason::Reset, Some(42)),
        "{:#x?}",
        records(&machine)
    );
    (machine, events)
}

fn same_faults(cases: &[Case], mechanism: Mechanism) {
    if catch_mode("faults").is_none() {
        return;
    }
    for flags in [0x2, 0x8d7 | IF] {
        let (_folder, mut config) = build(|kernel| compared(kernel, cases, flags));
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
            assert_eq!(plain, probed, "{name}: {plain:#x?} {probed:#x?}");
            assert_eq!(plain.vector, case.vector, "{name}: {plain:#x?}");
            assert_eq!(plain.idt, IDT_BASE, "{name}");
            for word in 0..WORDS {
                let at = 16 * n as u64 * WORDS + word * 8;
                let (plain, probed) = (result(&machine, at), result(&machine, at + 8 * WORDS));
                assert_eq!(plain, probed, "{name}: word {word}");
            }
            // A jump itself succeeds on some processors; its target then faults.
            let in_place = plain.rip == 5;
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
            assert_eq!(plain.error_code, case.error_code, "{name}");
            let has_code = case.vector != 0;
            let fault = EventKind::Fault {
                vector: u8::try_from(case.vector).unwrap(),
                error_code: has_code.then(|| u32::try_from(case.error_code).unwrap()),
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
