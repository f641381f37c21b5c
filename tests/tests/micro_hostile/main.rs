//! Tests guests that attack the probes in them: they change our patches, our hidden memory, and their own tables
//! and stacks. The host must continue, and must be able to unregister the probes and to stop the machine. Runs on
//! any KVM.

mod region;
mod tables;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_arch::Gva;
use hvprobe_arch::trap::{DOORBELL_PORT, GATE_PORT, ROOM_PORT};
use hvprobe_machine::{
    EndReason, Ending, Event, Machine, MachineConfig, Mechanism, ProbeSpec, ProbeState, State,
};
use hvprobe_spec::Hold;
use hvprobe_tests::micro::host::{build, catch_mode, hangs_not, result, run, symbol, within_limit};
use hvprobe_tests::micro::{Asm, MicroKernel, OWN_BREAKPOINTS, PMD, WINDOW};
use hvprobe_tests::rig::{Running, probe};
use iced_x86::code_asm::registers::*;
use iced_x86::code_asm::{CodeAssembler, CodeLabel, byte_ptr, ptr, qword_ptr};

/// Offset of the slots in the hidden region. These guests know it.
const SLOTS: u64 = 0x3000;
/// Size of a slot.
const SLOT: u64 = 32;

/// Address at which a guest that has found the hidden region maps it for writing.
const WRITABLE: u64 = WINDOW + (33 << 21);

/// Exit status of a guest that reached its end.
const DONE: u8 = 42;

fn with(definition: &str, mechanism: Mechanism) -> ProbeSpec {
    ProbeSpec {
        mechanism: Some(mechanism),
        ..probe(definition)
    }
}

/// Returns three probes, one for each mechanism with an exit: on `emulated`, on `boosted`, whose copy is in slot 0,
/// and on `stepped`, whose copy is in slot 1.
fn one_each() -> Vec<ProbeSpec> {
    vec![
        with("p emulated+5", Mechanism::Emulated),
        with("p boosted+5", Mechanism::Boosted),
        with("p stepped+5", Mechanism::Stepped),
    ]
}

/// Functions probed by [`one_each`].
struct Probed {
    emulated: CodeLabel,
    boosted: CodeLabel,
    stepped: CodeLabel,
}

impl Probed {
    fn new(kernel: &mut MicroKernel) -> Self {
        Self {
            emulated: kernel.label(),
            boosted: kernel.label(),
            stepped: kernel.label(),
        }
    }

    fn call(&self, a: &mut CodeAssembler) -> Asm<()> {
        a.call(self.emulated)?;
        a.call(self.boosted)?;
        a.call(self.stepped)
    }

    /// Defines the functions: `emulated` with `push rbx`, which is emulated, and the other two with a
    /// multiplication, which is not.
    fn define(&self, kernel: &mut MicroKernel) -> Asm<()> {
        kernel.function("emulated", self.emulated)?;
        kernel.asm().push(rbx)?;
        kernel.asm().pop(rbx)?;
        kernel.asm().ret()?;
        for (name, label) in [("boosted", self.boosted), ("stepped", self.stepped)] {
            kernel.function(name, label)?;
            kernel.asm().imul_2(rax, rbx)?;
            kernel.asm().nop()?;
            kernel.asm().ret()?;
        }
        Ok(())
    }
}

fn done(a: &mut CodeAssembler) -> Asm<()> {
    a.mov(al, u32::from(DONE))?;
    a.ret()
}

/// Defines `checkpoint`, a function where a probe holds the guest until the host resumes it. That probe is
/// registered last.
fn checkpoint(kernel: &mut MicroKernel, label: CodeLabel) -> Asm<()> {
    kernel.function("checkpoint", label)?;
    kernel.asm().nop()?;
    kernel.asm().ret()
}

fn holding() -> ProbeSpec {
    let mut spec = probe("p checkpoint+5");
    spec.actions.hold = Some(Hold::Stop);
    spec
}

/// Waits until the guest has reached its checkpoint or has ended. Returns the machine's state.
fn at_checkpoint(machine: &Arc<Machine>) -> State {
    let machine = Arc::clone(machine);
    within_limit("the way to the checkpoint", move || {
        let mut status = machine.status();
        while !(matches!(status.state, State::Stopped(_)) || status.stopped_at.is_some()) {
            status = machine.wait_change(&status);
        }
        status.state
    })
}

/// Unregisters all probes, one by one, and stops the machine.
fn dismantle(machine: &Arc<Machine>) -> Ending {
    let machine = Arc::clone(machine);
    hangs_not("taking probes out and stopping", move || {
        for probe in machine.probes() {
            // Fails if the machine has ended.
            let _ = machine.unregister(&[probe.id]);
        }
        machine.stop()
    })
}

/// Maps the hidden region at [`WRITABLE`]. Changes RAX and RBX.
fn find_hidden(a: &mut CodeAssembler) -> Asm<()> {
    a.mov(rbx, PMD)?;
    a.mov(rax, qword_ptr(rbx))?;
    a.or(rax, 0x83)?;
    a.mov(qword_ptr(rbx + 33 * 8), rax)
}

/// Flushes the TLB. Changes RAX.
fn flush(a: &mut CodeAssembler) -> Asm<()> {
    a.mov(rax, cr3)?;
    a.mov(cr3, rax)
}

/// Boots, waits until the guest ends itself, and checks that no host thread panicked.
fn ended(config: MachineConfig) -> (Arc<Machine>, Ending, Vec<Event>) {
    let (machine, ending, events) = run(config);
    if let EndReason::Crash(report) = &ending.reason {
        assert!(!report.contains("panicked"), "{report}");
    }
    // A machine that has ended still accepts requests.
    assert_eq!(dismantle(&machine), ending);
    (machine, ending, events)
}

fn is_done(ending: &Ending) -> bool {
    (&ending.reason, ending.guest_status) == (&EndReason::Reset, Some(DONE))
}

#[test]
fn text_that_the_guest_rewrites_is_left_to_it() {
    if catch_mode("rewritten text").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        let (probed, here) = (Probed::new(kernel), kernel.label());
        let a = kernel.asm();
        probed.call(a)?;
        // Writes another instruction, `clc`, over two probepoints. Over that of `stepped` it writes the int3 that
        // is already there.
        for function in [probed.emulated, probed.boosted] {
            a.lea(rcx, ptr(function))?;
            a.mov(byte_ptr(rcx + 5), 0xf8)?;
        }
        a.lea(rcx, ptr(probed.stepped))?;
        a.mov(byte_ptr(rcx + 5), 0xcc)?;
        a.call(here)?;
        a.call(probed.stepped)?;
        done(a)?;
        probed.define(kernel)?;
        checkpoint(kernel, here)
    });
    config.probes = one_each();
    config.probes.push(holding());
    let mut running = Running::boot(config);
    let machine = running.machine.clone();
    assert_eq!(at_checkpoint(&machine), State::Paused);
    let probes = machine.probes();
    let states: Vec<_> = probes.iter().map(|probe| probe.state.clone()).collect();
    assert_eq!(
        states,
        [
            ProbeState::Gone,
            ProbeState::Gone,
            ProbeState::Placed,
            ProbeState::Placed
        ]
    );
    let enabled = machine
        .disable(&[probes[0].id])
        .and_then(|()| machine.enable(&[probes[0].id]));
    assert!(enabled.is_err(), "armed over what the guest wrote");
    let taken = machine.register(&[probe("p emulated+5")]);
    assert!(taken.is_err(), "{taken:?}");
    let ids: Vec<_> = probes.iter().map(|probe| probe.id).collect();
    machine
        .unregister(&ids[..3])
        .expect("they can be taken out");
    let byte = |name: &str| {
        let mut byte = [0];
        let at = Gva(symbol(&machine, name) + 5);
        machine.read_kernel(at, &mut byte).expect("text is mapped");
        byte[0]
    };
    assert_eq!(
        [byte("emulated"), byte("boosted"), byte("stepped")],
        [0xf8, 0xf8, 0x48]
    );
    machine.resume().expect("it goes on");
    let _ = within_limit("the guest", move || running.finish());
    let ending = machine.wait();
    assert!(is_done(&ending), "{ending:?}");
    assert_eq!(result(&machine, OWN_BREAKPOINTS), 0);
}

#[test]
fn guests_whose_steps_never_end_can_be_stopped() {
    if catch_mode("endless steps").is_none() {
        return;
    }
    if std::env::var("HVPROBE_RIG").is_ok_and(|rig| rig == "bochs") {
        // The processor of Bochs is not interrupted in a guest that was entered with interrupts off, so the host's
        // kernel would never run again.
        eprintln!("skipped: endless steps need a processor that is interrupted in a guest");
        return;
    }
    // `jmp .` instead of the copy.
    const FOREVER: u32 = 0xfeeb;
    for removed_first in [true, false] {
        let (_folder, mut config) = build(|kernel| {
            let probed = Probed::new(kernel);
            let a = kernel.asm();
            probed.call(a)?;
            find_hidden(a)?;
            a.mov(rbx, WRITABLE + SLOTS + SLOT)?;
            a.mov(iced_x86::code_asm::word_ptr(rbx), FOREVER)?;
            flush(a)?;
            a.call(probed.stepped)?;
            done(a)?;
            probed.define(kernel)
        });
        config.probes = one_each();
        let running = Running::boot(config);
        let machine = running.machine.clone();
        within_limit("the second hit", move || {
            let mut running = running;
            running.wait_for_events(4);
        });
        let since = Instant::now();
        if removed_first {
            let taken = Arc::clone(&machine);
            hangs_not("taking the probe out", move || {
                let ids: Vec<_> = taken.probes().iter().map(|probe| probe.id).collect();
                taken.unregister(&ids).expect("it can be taken out");
            });
        }
        let ending = hangs_not("stopping", move || machine.stop());
        assert!(since.elapsed() < Duration::from_secs(20), "{ending:?}");
        // Without the probe, the guest continues in place.
        let went_on = is_done(&ending);
        assert!(went_on || ending.reason == EndReason::Stopped, "{ending:?}");
    }
}

/// The guest itself writes to the ports of detours and stubs.
#[test]
fn ports_of_ours_are_nobodys_where_the_guest_writes_to_them_itself() {
    const UNLIKELY: u64 = 0x0123_4567_89ab_cdef;
    const CHANGED: u32 = 7;
    let Some(mode) = catch_mode("our ports") else {
        return;
    };
    let (_folder, mut config) = build(|kernel| {
        let probed = Probed::new(kernel);
        let (mut again, mut changed) = (kernel.label(), kernel.label());
        let a = kernel.asm();
        a.mov(r12d, 1000)?;
        a.mov(r13, UNLIKELY)?;
        a.set_label(&mut again)?;
        for port in [GATE_PORT, DOORBELL_PORT, ROOM_PORT] {
            a.mov(rax, r13)?;
            a.out(i32::from(port), al)?;
            a.cmp(rax, r13)?;
            a.jne(changed)?;
        }
        a.dec(r12d)?;
        a.jnz(again)?;
        probed.call(a)?;
        done(a)?;
        a.set_label(&mut changed)?;
        a.mov(al, CHANGED)?;
        a.ret()?;
        probed.define(kernel)
    });
    config.probes = one_each();
    let (machine, ending, events) = ended(config);
    assert!(is_done(&ending), "{mode:?}: {ending:?}");
    assert_eq!(events.len(), 3);
    for probe in machine.probes() {
        assert_eq!((probe.counts.hits, probe.counts.missed), (1, 0));
    }
}

fn first_line(ending: &Ending) -> String {
    let text = format!("{} {:?}", ending.reason, ending.guest_status);
    text.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn probes_come_and_go_while_the_guest_rewrites_the_text_around_them() {
    if catch_mode("self-modifying code").is_none() {
        return;
    }
    let (_folder, config) = build(|kernel| {
        let (probed, mut again) = (Probed::new(kernel), kernel.label());
        let a = kernel.asm();
        a.xor(r12d, r12d)?;
        a.set_label(&mut again)?;
        probed.call(a)?;
        // Writes to the last byte of the entry nop and to a byte after the probepoint, and sometimes to the
        // probepoint itself.
        a.inc(r12d)?;
        for function in [probed.emulated, probed.boosted, probed.stepped] {
            let mut not_now = a.create_label();
            a.lea(rcx, ptr(function))?;
            a.mov(byte_ptr(rcx + 4), r12b)?;
            a.mov(byte_ptr(rcx + 9), 0x90)?;
            a.test(r12d, 0x1f)?;
            a.jnz(not_now)?;
            // Writes back the first byte that it reads at the probepoint.
            a.mov(al, byte_ptr(rcx + 5))?;
            a.mov(byte_ptr(rcx + 5), al)?;
            a.set_label(&mut not_now)?;
        }
        a.jmp(again)?;
        probed.define(kernel)
    });
    let running = Running::boot(config);
    running.wait_live();
    let machine = running.machine.clone();
    let busy = Arc::clone(&machine);
    hangs_not("a hundred changes", move || {
        for round in 0..100 {
            let registered = busy.register(&one_each());
            let Ok(ids) = registered else {
                // The text may have changed meanwhile, or may no longer be instructions.
                continue;
            };
            let mut changed = Ok(());
            if round % 3 == 0 {
                changed = busy.disable(&ids);
                // Fails if the guest has just written the int3 back.
                let _ = busy.enable(&ids);
            }
            // If the guest writes our int3 back after we have removed the probe, the int3 is its own, and the guest
            // ends there.
            if let Err(error) = changed.and_then(|()| busy.unregister(&ids)) {
                assert_eq!(error.to_string(), "the machine has ended");
                return;
            }
        }
    });
    let ending = dismantle(&machine);
    assert!(
        matches!(
            ending.reason,
            EndReason::Stopped | EndReason::Reset | EndReason::TripleFault(_)
        ),
        "{ending:?}"
    );
}
