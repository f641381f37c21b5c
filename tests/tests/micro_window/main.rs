//! Tests that a guest sees a fault or an interrupt at an instruction that is displaced by a probe as it sees it
//! when the instruction runs at its own address. Runs on any KVM.

mod faults;
mod interrupts;

use hvprobe_hit::event::EventKind;
use hvprobe_machine::{EndReason, Event, Machine, MachineConfig, Mechanism, ProbeSpec, ProbeState};
use hvprobe_tests::micro::host::{build, catch_mode, result, run, symbol};
use hvprobe_tests::micro::recorder::records;
use hvprobe_tests::micro::{Asm, MicroKernel, OWN_BREAKPOINTS, PMD, RESULTS, UNMAPPED};
use hvprobe_tests::rig::probe;
use iced_x86::code_asm::registers::*;
use iced_x86::code_asm::{CodeAssembler, CodeLabel, ptr, qword_ptr};

const IF: u64 = 1 << 9;

const RAX: u64 = 0x0123_4567_89ab_cdef;

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

/// Defines the function `probed`: a five-byte nop, `instruction`, a nop and a return.
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
            // The handler maps the address, which resolves the fault.
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
fn a_return_probe_is_refused_where_tasks_cannot_be_distinguished() {
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
