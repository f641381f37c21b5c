//! Carrying out the displaced instruction, and the exception window around a stepped copy.
//!
//! A stepped copy runs with interrupts held off and with an interrupt descriptor table of ours, so it ends in one
//! of two ways: at the int3 after it, or with an exception, whose frame then refers to the slot. The guest sees
//! that exception as if the instruction had raised it in its place: the frame's RIP is the probepoint (or the
//! instruction after it, when the copy was complete), and the exception table finds its entry. Invariant: in both
//! cases, the guest continues with RFLAGS.IF as it was at the probepoint.

use hvprobe_arch::insn::{Effect, Memory as _, MemoryFault, SlotCode, SlotKind};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::WalkError;
use hvprobe_arch::regs::rflags;
use hvprobe_arch::trap::GATE_SIZE;
use hvprobe_arch::trap::vector::{
    BREAKPOINT, GENERAL_PROTECTION, INTERRUPTS, MACHINE_CHECK, NMI, PAGE_FAULT,
};
use hvprobe_arch::{Gva, Regs};

use super::context::Scene;
use super::outcome::{Fault, Outcome};
use super::report::{Seen, Taken};
use super::state::{HitState, InFlight};
use super::table::{Role, Site};
use crate::clock::Clock;
use crate::event::EventKind;

/// Page-fault error code: the access was a write (SDM vol. 3, 4.7).
const PF_WRITE: u32 = 1 << 1;

/// Offsets in the frame that the processor pushes in 64-bit mode (SDM vol. 3, 6.14.2).
const FRAME_RFLAGS: u64 = 16;
const FRAME_RSP: u64 = 24;

/// Offset of RIP in the kernel's `struct pt_regs` (arch/x86/include/asm/ptrace.h). It is the same in all kernels,
/// because debuggers depend on it.
const PT_REGS_IP: u64 = 128;

impl HitState {
    /// Lets the displaced instruction take effect.
    #[inline]
    pub(super) fn carry_out<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        index: u32,
        site: &Site,
        taken: &Taken,
        regs: &mut Regs,
    ) -> Outcome {
        if let Some(detour) = &site.detour {
            // The tail runs the copies of everything that the jump displaced.
            regs.rip = detour.tail().0;
            return Outcome::Resume { shadow: false };
        }
        let Some(slot) = &site.slot else {
            return self.emulate(scene, site, taken, regs);
        };
        if slot.kind() == SlotKind::Trapped {
            self.flight = Some(InFlight {
                site: index,
                rsp: regs.rsp,
                interrupts: regs.rflags & rflags::IF,
                taken: *taken,
            });
            regs.rflags &= !rflags::IF;
        }
        regs.rip = slot.at().0;
        Outcome::Resume { shadow: false }
    }

    #[inline]
    fn emulate<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        site: &Site,
        taken: &Taken,
        regs: &mut Regs,
    ) -> Outcome {
        let mut memory = scene.memory();
        match site.displaced.emulate(regs, &mut memory) {
            Ok(effect) => {
                if site.posts {
                    self.post_handlers(scene, site, regs, taken);
                }
                Outcome::Resume {
                    shadow: effect == Effect::Shadow,
                }
            }
            Err(fault) => {
                let fault = exception_of(&fault, memory.wrote);
                let kind = EventKind::Fault {
                    vector: fault.vector,
                    error_code: fault.error_code,
                };
                self.faulted(scene, site, kind, regs, taken);
                Outcome::Fault(fault)
            }
        }
    }

    /// Handles the int3 at the end of a slot: the copy ran.
    pub(super) fn slot_end<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        index: u32,
        slot: &SlotCode,
        at: Gva,
        regs: &mut Regs,
    ) -> Outcome {
        let Some(site) = scene.table.site(index) else {
            return Outcome::Foreign;
        };
        let Some(end) = site.displaced.trap_end(slot, at) else {
            return Outcome::Foreign;
        };
        regs.rip = end.0;
        if let Some(flight) = self.flight.take_if(|flight| flight.site == index) {
            regs.rflags |= flight.interrupts;
            self.post_handlers(scene, site, regs, &flight.taken);
        }
        Outcome::Resume { shadow: false }
    }

    pub(super) fn exception<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        vector: u8,
        own_idt: Gva,
        regs: &mut Regs,
    ) -> Outcome {
        if is_abrupt(vector)
            && let Some(outcome) = self.overtaking(scene, vector, own_idt, regs)
        {
            return outcome;
        }
        // Any exception ends the copy.
        let Some((flight, site, slot)) = self.flight.take().and_then(|flight| {
            let site = scene.table.site(flight.site)?;
            Some((flight, site, site.slot.as_ref()?))
        }) else {
            return Outcome::Foreign;
        };
        let frame = Gva(regs.rsp).wrapping_add(if has_error_code(vector) { 8 } else { 0 });
        let (Some(rip), Some(flags), Some(rsp)) = (
            scene.read_u64(frame),
            scene.read_u64(frame.wrapping_add(FRAME_RFLAGS)),
            scene.read_u64(frame.wrapping_add(FRAME_RSP)),
        ) else {
            return Outcome::Foreign;
        };
        let mut before = Regs {
            rip,
            rflags: flags,
            rsp,
            ..*regs
        };
        let int3 = Gva(rip.wrapping_sub(1));
        if vector == BREAKPOINT && site.displaced.trap_end(slot, int3).is_some() {
            *regs = before;
            self.flight = Some(flight);
            return self.slot_end(scene, flight.site, slot, int3, regs);
        }
        let error_code = has_error_code(vector)
            .then(|| scene.read_u64(Gva(regs.rsp)))
            .flatten()
            .and_then(|code| u32::try_from(code & u64::from(u32::MAX)).ok());
        let in_place = site.displaced.in_place(slot, Gva(rip));
        before.rip = in_place.map_or(rip, |at| at.0);
        before.rflags |= flight.interrupts;
        // The processor sets RF in the frame of a fault (SDM vol. 3, 17.3.1.1), where the guest finds it. Handlers
        // see it clear, as it was when the instruction ran.
        let seen = Regs {
            rflags: before.rflags & !rflags::RF,
            ..before
        };
        if in_place != Some(site.displaced.at()) {
            // The copy was complete, but the exception came before the int3 after it.
            self.post_handlers(scene, site, &seen, &flight.taken);
        } else if is_abrupt(vector) {
            // The guest comes back to the probepoint with interrupts still held off, so the next thing that it runs
            // is the int3 there. The handlers have run, and do not run again.
            before.rflags &= !rflags::IF;
            self.put_off = Some(flight);
        } else {
            let kind = EventKind::Fault { vector, error_code };
            self.faulted(scene, site, kind, &seen, &flight.taken);
        }
        let Some(handler) = gate_handler(scene, own_idt, vector) else {
            if vector == NMI || vector >= INTERRUPTS {
                self.put_off = None;
                return Outcome::Foreign;
            }
            // The guest's own table cannot be read. So the exception is raised again without the window, and has
            // the effect that it would have had without us.
            *regs = before;
            return Outcome::Fault(Fault {
                vector,
                error_code,
                address: None,
            });
        };
        let mut memory = scene.memory();
        // The processor has just written the frame. If the guest has unmapped its page meanwhile, the guest sees
        // the slot's address.
        let _ = memory.write_u64(frame, before.rip);
        let _ = memory.write_u64(frame.wrapping_add(FRAME_RFLAGS), before.rflags);
        regs.rip = handler;
        Outcome::Resume { shadow: false }
    }

    /// Handles an NMI or machine check that came after the guest had reached the stub of another exception, but
    /// before it exited there. Handles the other exception first, and then changes the frame of this one as if it
    /// had come where the guest continues after the other. Returns `None` if it came anywhere else.
    fn overtaking<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        vector: u8,
        own_idt: Gva,
        regs: &mut Regs,
    ) -> Option<Outcome> {
        let frame = Gva(regs.rsp);
        let rip = scene.read_u64(frame)?;
        let first = scene.table.fixtures()?.vector(Gva(rip))?;
        let handler = gate_handler(scene, own_idt, vector)?;
        // If one abrupt exception seems to have come inside the stub of another, the guest has forged the frame.
        if is_abrupt(first) {
            return None;
        }
        let mut before = Regs {
            rip,
            rflags: scene.read_u64(frame.wrapping_add(FRAME_RFLAGS))?,
            rsp: scene.read_u64(frame.wrapping_add(FRAME_RSP))?,
            ..*regs
        };
        let outcome = self.exception(scene, first, own_idt, &mut before);
        if !matches!(outcome, Outcome::Resume { .. }) {
            return Some(Outcome::Foreign);
        }
        let mut memory = scene.memory();
        // The processor has just written the frame.
        let _ = memory.write_u64(frame, before.rip);
        let _ = memory.write_u64(frame.wrapping_add(FRAME_RFLAGS), before.rflags);
        let _ = memory.write_u64(frame.wrapping_add(FRAME_RSP), before.rsp);
        regs.rip = handler;
        Some(outcome)
    }

    /// Handles a fault of the guest's kernel, which is about to look for an entry in its exception table. The
    /// registers of the fault are at `pt_regs`. If the fault was in a copy that ran without an exit, replaces
    /// their RIP with the address of the instruction itself, which the kernel then looks up and prints.
    #[inline(never)]
    pub(super) fn fault_of_copy<M: PhysMemory + ?Sized, C: Clock>(
        &self,
        scene: &Scene<'_, M, C>,
        pt_regs: Gva,
    ) {
        let ip = pt_regs.wrapping_add(PT_REGS_IP);
        let rip = scene.read_u64(ip).map(Gva);
        let Some((at, site)) = rip.and_then(|rip| scene.table.in_place(rip)) else {
            return;
        };
        if scene.memory().write_u64(ip, at.0).is_ok() && at == site.displaced.at() {
            for member in &site.members {
                member.counters.fault(self.vcpu);
            }
        }
    }

    /// Reports the state after the displaced instruction to the probes that asked for it.
    #[inline(never)]
    fn post_handlers<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        site: &Site,
        regs: &Regs,
        taken: &Taken,
    ) {
        for (index, member) in site.members.iter().enumerate() {
            if let Role::Probe(actions) = &member.role
                && actions.post
                && !taken.is_muted(index)
            {
                let seen = Seen::new(self.vcpu, member.id, actions, regs, taken);
                seen.report(
                    scene,
                    &mut self.events,
                    || EventKind::Post,
                    &actions.capture,
                );
            }
        }
    }

    /// Counts a fault of the displaced instruction, and reports it to the probes that asked for it.
    #[inline(never)]
    fn faulted<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        site: &Site,
        kind: EventKind,
        regs: &Regs,
        taken: &Taken,
    ) {
        for (index, member) in site.members.iter().enumerate() {
            member.counters.fault(self.vcpu);
            if let Role::Probe(actions) = &member.role
                && actions.faults
                && !taken.is_muted(index)
            {
                let seen = Seen::new(self.vcpu, member.id, actions, regs, taken);
                seen.report(scene, &mut self.events, || kind, &actions.capture);
            }
        }
    }
}

/// Abandons a step that was interrupted by an NMI, and restores the guest's IF flag for its return to the
/// instruction. Linux returns from an NMI through a copy of the frame that the processor pushed (`asm_exc_nmi` in
/// arch/x86/entry/entry_64.S), so the flag is restored in every frame on the stack that returns to the instruction.
pub(super) fn come_back<M: PhysMemory + ?Sized, C: Clock>(
    scene: &Scene<'_, M, C>,
    flight: &InFlight,
    regs: &mut Regs,
) {
    let Some(site) = scene.table.site(flight.site) else {
        return;
    };
    let at = site.displaced.at();
    if (Gva(regs.rip), regs.rsp) == (at, flight.rsp) {
        // The guest has come back to the instruction, and has not continued.
        regs.rflags |= flight.interrupts;
        return;
    }
    // The last three words. If the next word is the RSP of a frame, they are its RIP, CS and RFLAGS.
    let mut frame = [Gva(0); 3];
    scene.words_above(Gva(regs.rsp), |place, word| {
        let [rip, _, flags] = frame;
        if rip == at && word.0 == flight.rsp {
            let flags = flags.0 | flight.interrupts;
            let place = place.wrapping_sub(FRAME_RSP - FRAME_RFLAGS);
            // The word has just been read.
            let _ = scene.memory().write_u64(place, flags);
        }
        frame = [frame[1], frame[2], word];
    });
}

/// Returns the exception that an access or a jump raises in kernel mode (SDM vol. 3, 4.7 and 6.15): a page fault if
/// nothing is mapped there, a general protection fault if the address is not canonical.
fn exception_of(fault: &MemoryFault, write: bool) -> Fault {
    if matches!(fault.cause, WalkError::NonCanonical { .. }) {
        Fault {
            vector: GENERAL_PROTECTION,
            error_code: Some(0),
            address: None,
        }
    } else {
        Fault {
            vector: PAGE_FAULT,
            error_code: Some(if write { PF_WRITE } else { 0 }),
            address: Some(fault.at),
        }
    }
}

/// Returns whether exception `vector` may come even while interrupts are held off.
fn is_abrupt(vector: u8) -> bool {
    matches!(vector, NMI | MACHINE_CHECK)
}

/// Returns whether the processor pushes an error code with exception `vector` (SDM vol. 3, table 6-1; 29 and 30
/// are AMD's, APM vol. 2, 8.2).
fn has_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30)
}

/// Returns the handler of `vector` in the interrupt descriptor table at `idt` (SDM vol. 3, 6.14.1).
fn gate_handler<M: PhysMemory + ?Sized, C: Clock>(
    scene: &Scene<'_, M, C>,
    idt: Gva,
    vector: u8,
) -> Option<u64> {
    let gate = idt.wrapping_add(u64::from(vector) * GATE_SIZE as u64);
    let low = scene.read_u64(gate)?;
    let high = scene.read_u64(gate.wrapping_add(8))?;
    Some(low & 0xffff | low >> 32 & 0xffff_0000 | high << 32)
}
