//! What a displaced instruction that faults, or is interrupted, shows the guest: the same as in its
//! own place. On whatever KVM there is.

use hvprobe_introspect::event::EventKind;
use hvprobe_tests::micro::host::{build, catch_mode, result, run, symbol};
use hvprobe_tests::micro::recorder::{Record, records};
use hvprobe_tests::micro::{
    APIC, Asm, IDT_BASE, MicroKernel, OWN_BREAKPOINTS, PMD, RESULTS, UNMAPPED, WINDOW,
};
use hvprobe_tests::rig::probe;
use hvprobe_vmm::CatchMode;
use hvprobe_vmm::machine::{
    EndReason, Event, Machine, MachineConfig, Mechanism, ProbeSpec, ProbeState,
};
use hvprobe_vmm::selfcheck::{self, Verdict};
use iced_x86::code_asm::{CodeAssembler, CodeLabel, dword_ptr, ptr, qword_ptr, registers::*};

const IF: u64 = 1 << 9;
const RF: u64 = 1 << 16;
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

/// `main` runs each case in its place and displaced, and leaves what it did.
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
    let Some(mode) = catch_mode("faults") else {
        return;
    };
    // There int3s are delivered before they are caught, which a stack that is not there prevents.
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
            // A jump to no address faults there on some processors (QEMU's), and on others, which
            // are what we emulate, before it is made.
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
            // A jump itself succeeds on some processors; its target then faults.
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

/// The function `probed`: a nop of five bytes, `instruction`, a nop and a return.
fn probed(
    kernel: &mut MicroKernel,
    function: CodeLabel,
    instruction: fn(&mut CodeAssembler) -> Asm<()>,
) -> Asm<()> {
    kernel.function("probed", function)?;
    instruction(kernel.asm())?;
    kernel.asm().nop()?;
    kernel.asm().ret()
}

fn stepped(definition: &str) -> ProbeSpec {
    let mut spec = with_faults(definition, Mechanism::Stepped);
    spec.actions.post = true;
    spec
}

fn kinds(events: &[Event]) -> Vec<EventKind> {
    events.iter().map(|event| event.kind).collect()
}

/// Where nothing of the guest's may ever be seen to run.
fn is_hidden(record: &Record) -> bool {
    (WINDOW..WINDOW + (16 << 20)).contains(&record.rip)
}

#[test]
fn a_fault_that_is_resolved_runs_the_instruction_again_and_hits_again() {
    if catch_mode("resolved faults").is_none() {
        return;
    }
    for flags in [0x2, 0x2 | IF] {
        let (_folder, mut config) = build(|kernel| {
            kernel.start_recording()?;
            let function = kernel.label();
            let a = kernel.asm();
            // The handler maps the address, and all is well.
            a.mov(r14, PMD + 32 * 8)?;
            a.mov(r13, 0x183_u64 | 24 << 20)?;
            a.xor(r15d, r15d)?;
            a.mov(rbx, UNMAPPED + 0x40)?;
            a.mov(eax, 77)?;
            a.push(i32::try_from(flags).expect("few bits"))?;
            a.popfq()?;
            a.call(function)?;
            a.pushfq()?;
            a.pop(rcx)?;
            a.cli()?;
            a.mov(rdx, qword_ptr(rbx))?;
            a.mov(qword_ptr(RESULTS), rdx)?;
            a.mov(qword_ptr(RESULTS + 8), rcx)?;
            a.mov(al, 42)?;
            a.ret()?;
            probed(kernel, function, |a| a.mov(qword_ptr(rbx), rax))?;
            kernel.record(&[14], true)
        });
        config.probes = vec![stepped("p probed+5")];
        let (machine, events) = finished(config);
        let at = symbol(&machine, "probed") + 5;
        let [record] = records(&machine)[..] else {
            panic!("{:#x?}", records(&machine))
        };
        assert_eq!((record.rip, record.rflags & IF), (at, flags & IF));
        assert_eq!(
            (result(&machine, 0), result(&machine, 8) & IF),
            (77, flags & IF)
        );
        let counts = machine.probes()[0].counts;
        assert_eq!((counts.hits, counts.missed, counts.faults), (2, 0, 1));
        let fault = EventKind::Fault {
            vector: 14,
            error_code: Some(2),
        };
        assert_eq!(
            kinds(&events),
            [EventKind::Hit, fault, EventKind::Hit, EventKind::Post]
        );
        for event in &events {
            let rip = if event.kind == EventKind::Post {
                at + 3
            } else {
                at
            };
            assert_eq!((event.regs.rip, event.regs.rflags & IF), (rip, flags & IF));
        }
    }
}

#[test]
fn a_fault_handler_has_int3s_and_probes_of_its_own() {
    if catch_mode("probes in fault handlers").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        kernel.start_recording()?;
        let (function, mut handler, inner) = (kernel.label(), kernel.label(), kernel.label());
        let mut after = kernel.label();
        let a = kernel.asm();
        a.mov(rbx, UNMAPPED)?;
        a.lea(r15, ptr(after))?;
        a.jmp(function)?;
        a.set_label(&mut after)?;
        a.mov(al, 42)?;
        a.ret()?;
        a.set_label(&mut handler)?;
        a.int3()?;
        a.call(inner)?;
        a.add(rsp, 8)?;
        a.mov(qword_ptr(rsp), r15)?;
        a.iretq()?;
        kernel.handler(14, handler, 1);
        kernel.function("inner", inner)?;
        kernel.asm().imul_2(rax, rbx)?;
        kernel.asm().ret()?;
        probed(kernel, function, |a| a.mov(rax, qword_ptr(rbx)))
    });
    config.probes = vec![stepped("p probed+5"), stepped("p inner+5")];
    let (machine, events) = finished(config);
    assert_eq!(result(&machine, OWN_BREAKPOINTS), 1);
    for (probe, faults) in machine.probes().iter().zip([1, 0]) {
        let counts = probe.counts;
        assert_eq!((counts.hits, counts.missed, counts.faults), (1, 0, faults));
    }
    assert_eq!(events.len(), 4, "{events:#x?}");
}

/// What sends this processor an interrupt or NMI: EAX goes to the interrupt command register (SDM
/// vol. 3, 11.6.1).
const ICR: i32 = 0x300;
const SELF_INTERRUPT: u32 = 1 << 18 | 1 << 14 | 0x40;
/// To the processor with id 0, which the upper half of the register says after a reset.
const SELF_NMI: u32 = 1 << 14 | 4 << 8;

/// Leaves the guest for a moment: hosts that emulate the guest look for interrupts only then.
fn exit(a: &mut CodeAssembler) -> Asm<()> {
    a.out(0x80, al)?;
    a.nop()
}

/// `main` sends itself what `command` says, with the instruction at `plain+5` and, displaced, with
/// that at `probed+5`.
fn sends(kernel: &mut MicroKernel, command: u32, flags: u64) -> Asm<()> {
    kernel.start_recording()?;
    let (plain, function) = (kernel.label(), kernel.label());
    for function in [plain, function] {
        let a = kernel.asm();
        a.mov(rbx, APIC)?;
        a.mov(eax, command)?;
        a.push(i32::try_from(flags).expect("few bits"))?;
        a.popfq()?;
        a.call(function)?;
        exit(a)?;
        a.cli()?;
    }
    kernel.asm().mov(al, 42)?;
    kernel.asm().ret()?;
    probed(kernel, function, |a| a.mov(dword_ptr(rbx + ICR), eax))?;
    kernel.function("plain", plain)?;
    let a = kernel.asm();
    a.mov(dword_ptr(rbx + ICR), eax)?;
    a.ret()?;
    kernel.record(&[2, 0x40], true)
}

#[test]
fn what_a_stepped_copy_sends_its_own_processor_comes_right_after_it() {
    if catch_mode("interrupts").is_none() {
        return;
    }
    for (command, flags) in [
        (SELF_INTERRUPT, 0x2 | IF),
        (SELF_NMI, 0x2 | IF),
        (SELF_NMI, 0x2),
    ] {
        let (_folder, mut config) = build(|kernel| sends(kernel, command, flags));
        config.probes = vec![stepped("p probed+5")];
        let (machine, events) = finished(config);
        let records = records(&machine);
        let [plain, displaced] = records[..] else {
            panic!("{command:#x}: {records:#x?}")
        };
        let offset = |record: &Record, name| record.rip.wrapping_sub(symbol(&machine, name));
        assert!(!is_hidden(&displaced), "{displaced:#x?}");
        assert_eq!(displaced.idt, IDT_BASE);
        assert_eq!(displaced.rflags & IF, flags & IF);
        // Hosts that emulate the guest are not as prompt.
        if offset(&plain, "plain") == 11 {
            assert_eq!(offset(&displaced, "probed"), 11, "{records:#x?}");
            let same = Record {
                rip: plain.rip,
                ..displaced
            };
            assert_eq!(plain, same, "{command:#x}: {records:#x?}");
        }
        assert_eq!(kinds(&events), [EventKind::Hit, EventKind::Post]);
        assert_eq!(events[1].regs.rip, symbol(&machine, "probed") + 11);
        assert_eq!(events[1].regs.rflags & IF, flags & IF);
        assert_eq!(machine.probes()[0].counts.faults, 0);
    }
}

#[test]
fn interrupts_of_a_timer_never_show_a_stepped_copy() {
    if catch_mode("timer").is_none() {
        return;
    }
    const HITS: u32 = 300;
    let (_folder, mut config) = build(|kernel| {
        kernel.start_recording()?;
        let (function, mut again) = (kernel.label(), kernel.label());
        let a = kernel.asm();
        // Periodic, vector 0x40, 1/16 of the bus frequency (SDM vol. 3, 11.5.4).
        a.mov(rbx, APIC)?;
        a.mov(dword_ptr(rbx + 0x3e0), 3)?;
        a.mov(dword_ptr(rbx + 0x320), 1 << 17 | 0x40)?;
        a.mov(dword_ptr(rbx + 0x380), 200_000)?;
        a.mov(r12d, HITS)?;
        a.set_label(&mut again)?;
        a.sti()?;
        a.call(function)?;
        a.dec(r12d)?;
        a.jnz(again)?;
        a.cli()?;
        a.mov(al, 42)?;
        a.ret()?;
        probed(kernel, function, |a| a.imul_2(rax, rbx))?;
        kernel.record(&[0x40], true)
    });
    config.probes = vec![stepped("p probed+5")];
    let (machine, events) = finished(config);
    let records = records(&machine);
    assert!(!records.is_empty(), "the timer never fired");
    for record in &records {
        assert!(!is_hidden(record) && record.idt == IDT_BASE, "{record:#x?}");
    }
    let counts = machine.probes()[0].counts;
    assert_eq!((counts.hits, counts.missed), (u64::from(HITS), 0));
    assert_eq!(events.len(), 2 * HITS as usize);
    assert!(events.iter().all(|event| event.regs.rflags & IF != 0));
}

#[test]
fn an_emulated_sti_holds_interrupts_off_for_one_instruction() {
    if catch_mode("sti").is_none() {
        return;
    }
    let report = selfcheck::run().expect("it has just run");
    let holds_off = report
        .items
        .iter()
        .any(|item| item.what == "interrupts held off after sti" && item.verdict == Verdict::Good);
    // What follows `sti`, itself probed or not.
    for more in [&[][..], &["p probed+6"]] {
        let (_folder, mut config) = build(|kernel| {
            kernel.start_recording()?;
            let (plain, function) = (kernel.label(), kernel.label());
            for function in [plain, function] {
                let a = kernel.asm();
                a.cli()?;
                a.mov(rbx, APIC)?;
                a.mov(dword_ptr(rbx + ICR), SELF_INTERRUPT)?;
                a.call(function)?;
                exit(a)?;
                a.cli()?;
            }
            kernel.asm().mov(al, 42)?;
            kernel.asm().ret()?;
            for (name, label) in [("plain", plain), ("probed", function)] {
                kernel.function(name, label)?;
                let a = kernel.asm();
                a.sti()?;
                a.imul_2(rax, rbx)?;
                a.nop()?;
                a.nop()?;
                a.ret()?;
            }
            kernel.record(&[0x40], true)
        });
        config.probes = vec![with_faults("p probed+5", Mechanism::Emulated)];
        config.probes.extend(more.iter().map(|text| stepped(text)));
        let (machine, _) = finished(config);
        let records = records(&machine);
        let [plain, displaced] = records[..] else {
            panic!("{records:#x?}")
        };
        // Past `sti` and the instruction behind it, or later on hosts that emulate the guest.
        let [plain, displaced] = [(plain, "plain"), (displaced, "probed")]
            .map(|(record, name)| record.rip.wrapping_sub(symbol(&machine, name)));
        if plain == 10 && holds_off {
            assert_eq!(displaced, 10, "{more:?} {records:#x?}");
        }
        assert!(displaced >= 6, "{more:?} {records:#x?}");
    }
}

#[test]
fn a_post_handler_shows_what_the_instruction_left() {
    if catch_mode("post-handlers").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        let function = kernel.label();
        let a = kernel.asm();
        a.mov(rax, RAX)?;
        a.mov(ebx, 3)?;
        a.stc()?;
        a.call(function)?;
        a.mov(al, 42)?;
        a.ret()?;
        kernel.function("probed", function)?;
        let mut taken = kernel.label();
        let a = kernel.asm();
        a.adc(rax, rbx)?; // +5, boosted without a post-handler
        a.sub(rbx, 3)?; // +8, emulated
        a.je(taken)?; // +12
        a.nop()?;
        a.set_label(&mut taken)?;
        a.ret() // +15
    });
    config.probes = [5, 8, 12, 15]
        .map(|offset| {
            let mut spec = probe(&format!("p probed+{offset}"));
            spec.actions.post = true;
            spec
        })
        .into();
    let (machine, events) = finished(config);
    let start = symbol(&machine, "probed");
    let mechanisms: Vec<_> = machine.probes().iter().map(|p| p.mechanism).collect();
    assert_eq!(
        mechanisms,
        [
            Some(Mechanism::Stepped),
            Some(Mechanism::Emulated),
            Some(Mechanism::Emulated),
            Some(Mechanism::Emulated)
        ]
    );
    let posts: Vec<&Event> = events
        .iter()
        .filter(|e| e.kind == EventKind::Post)
        .collect();
    let [adc, sub, je, ret] = posts[..] else {
        panic!("{events:#x?}")
    };
    assert_eq!((adc.regs.rip, adc.regs.rax), (start + 8, RAX + 4));
    assert_eq!(adc.regs.rflags & 1, 0);
    assert_eq!((sub.regs.rip, sub.regs.rbx), (start + 12, 0));
    assert_eq!(sub.regs.rflags & 0x40, 0x40);
    assert_eq!(je.regs.rip, start + 15);
    let main = symbol(&machine, "main");
    assert!((main..main + 64).contains(&ret.regs.rip), "{ret:#x?}");
    assert_eq!(ret.regs.rsp, je.regs.rsp + 8);
}

#[test]
fn a_return_probe_is_refused_where_tasks_cannot_be_told_apart() {
    if catch_mode("return probes").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        let function = kernel.label();
        let a = kernel.asm();
        a.call(function)?;
        a.mov(al, 42)?;
        a.ret()?;
        kernel.function("probed", function)?;
        kernel.asm().nop()?;
        kernel.asm().ret()
    });
    config.probes = vec![probe("r probed"), probe("p probed")];
    let (machine, events) = finished(config);
    let [refused, placed] = &machine.probes()[..] else {
        panic!("two probes")
    };
    let ProbeState::Refused(why) = &refused.state else {
        panic!("{refused:?}")
    };
    assert!(why.contains("layout of the guest's tasks"), "{why}");
    assert_eq!(
        (&placed.state, placed.counts.hits),
        (&ProbeState::Placed, 1)
    );
    assert_eq!(events.len(), 1);
}
