//! From an exit to a hit: the three ways a planted int3 reaches us, and the way back for int3s
//! that are not ours.
//!
//! | mode             | exit                                  | RIP                          |
//! |------------------|---------------------------------------|------------------------------|
//! | `debug-exit`     | `KVM_EXIT_DEBUG`, exception 3         | the int3                     |
//! | `emulation-exit` | `KVM_EXIT_INTERNAL_ERROR`, bytes `cc…`| the int3                     |
//! | `idt-gate`       | `KVM_EXIT_IO` at the guest's #BP entry| the patched entry            |
//!
//! In `idt-gate` the processor has pushed an exception frame; undoing that push gives exactly the
//! state of the hit. Invariant: an int3 that is not ours leaves the guest in the state it would be
//! in without us.

use hvprobe_arch::insn::GateHead;
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::{Gva, Regs};
use hvprobe_introspect::probe::hit::{Access, HitHandler, Outcome, Stepped, Surroundings};

use super::clock::HostClock;
use super::cpu_fd::CpuFd;
use crate::CatchMode;
use crate::memory::GuestRam;

/// #DB, #BP and #PF (SDM vol. 3, table 6-1).
const VECTOR_BP: u8 = 3;
const VECTOR_PF: u8 = 14;
/// Page-fault error code: the access was a write (SDM vol. 3, 4.7).
const PF_WRITE: u32 = 1 << 1;

/// What the #BP entry of the guest's IDT looks like, for `idt-gate`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gate {
    pub(super) head: GateHead,
    pub(super) tables: PageTables,
}

/// The exception frame the processor pushes in 64-bit mode (SDM vol. 3, 6.14.2).
struct Frame {
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
}

impl Gate {
    fn frame(&self, ram: &GuestRam, regs: &Regs) -> Option<Frame> {
        let mut raw = [0; 40];
        self.tables.read(ram, Gva(regs.rsp), &mut raw).ok()?;
        let word = |n: usize| {
            raw[n * 8..n * 8 + 8]
                .try_into()
                .map_or(0, u64::from_le_bytes)
        };
        Some(Frame {
            rip: word(0),
            cs: word(1),
            rflags: word(2),
            rsp: word(3),
        })
    }

    /// The registers before the processor delivered the #BP of a kernel-mode int3, with RIP at
    /// the int3; `None` for a #BP from user mode, which is never ours.
    fn before(&self, ram: &GuestRam, regs: &Regs) -> Option<Regs> {
        let frame = self.frame(ram, regs).filter(|frame| frame.cs & 3 == 0)?;
        Some(Regs {
            rip: frame.rip.wrapping_sub(1),
            rsp: frame.rsp,
            rflags: frame.rflags,
            ..*regs
        })
    }
}

/// The catching side of one virtual CPU.
#[derive(Debug)]
pub(super) struct Catcher {
    pub(super) mode: CatchMode,
    pub(super) handler: HitHandler,
    pub(super) clock: HostClock,
}

impl Catcher {
    /// An int3 exit in `debug-exit` or `emulation-exit`; RIP is the int3.
    pub(super) fn int3(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
    ) -> Result<(), kvm_ioctls::Error> {
        let mut regs = cpu.regs();
        let at = Gva(regs.rip);
        let outcome = if cpu.in_kernel() {
            self.handler
                .hit(at, &mut regs, &surroundings(cpu, ram, &self.clock))
        } else {
            Outcome::Foreign
        };
        if outcome == Outcome::Foreign {
            return self.reflect(cpu, regs);
        }
        carry_out(cpu, outcome, &regs)
    }

    /// Gives the guest an int3 of its own.
    fn reflect(&self, cpu: &mut CpuFd, mut regs: Regs) -> Result<(), kvm_ioctls::Error> {
        if self.mode == CatchMode::EmulationExit {
            // Nothing knows the length of the instruction there, so the frame gets RIP as it is.
            regs.rip = regs.rip.wrapping_add(1);
        }
        cpu.set_regs_now(&regs)?;
        cpu.inject(VECTOR_BP, None)
    }

    /// The patched #BP entry was reached in `idt-gate`. `false` when RIP is not the gate.
    pub(super) fn gate(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
        gate: &Gate,
    ) -> Result<bool, kvm_ioctls::Error> {
        let mut regs = cpu.regs();
        let at = gate.head.at().0;
        // Hosts differ in whether RIP has passed the `out`.
        if (regs.rip != at && regs.rip != at.wrapping_add(2)) || !cpu.in_kernel() {
            return Ok(false);
        }
        if let Some(mut before) = gate.before(ram, &regs) {
            let int3 = Gva(before.rip);
            let outcome = self
                .handler
                .hit(int3, &mut before, &surroundings(cpu, ram, &self.clock));
            if outcome != Outcome::Foreign {
                carry_out(cpu, outcome, &before)?;
                return Ok(true);
            }
        }
        gate.head.apply(&mut regs);
        cpu.set_regs(&regs);
        Ok(true)
    }

    /// Before parking in `idt-gate`: a virtual CPU on its way from an int3 to the gate is taken
    /// back to the int3, so that the change it parks for may remove either.
    pub(super) fn rewind(cpu: &mut CpuFd, ram: &GuestRam, gate: &Gate) {
        let regs = cpu.regs();
        let mut byte = [0];
        if regs.rip == gate.head.at().0
            && cpu.in_kernel()
            && let Some(before) = gate.before(ram, &regs)
            && gate.tables.read(ram, Gva(before.rip), &mut byte).is_ok()
            && byte == [0xcc]
        {
            cpu.set_regs(&before);
        }
    }

    /// A single-step exit.
    pub(super) fn trap(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
    ) -> Result<(), kvm_ioctls::Error> {
        let mut regs = cpu.regs();
        let stepped = self
            .handler
            .stepped(&mut regs, &surroundings(cpu, ram, &self.clock));
        match stepped {
            Stepped::Done { more } => {
                cpu.set_regs(&regs);
                if !more {
                    cpu.end_step()?;
                }
            }
            Stepped::Again => {}
            Stepped::NotStepping => cpu.end_step()?,
        }
        Ok(())
    }

    /// Any other exit while stepping: if the guest has left the slot, the copy faulted, and
    /// interrupts must not stay blocked.
    pub(super) fn check_step(&mut self, cpu: &mut CpuFd) -> Result<(), kvm_ioctls::Error> {
        if self.handler.is_stepping() && self.handler.left_slot(cpu.regs().rip) {
            self.handler.abandon();
            cpu.end_step()?;
        }
        Ok(())
    }
}

fn surroundings<'a>(
    cpu: &mut CpuFd,
    ram: &'a GuestRam,
    clock: &'a HostClock,
) -> Surroundings<'a, GuestRam, HostClock> {
    Surroundings {
        mem: ram,
        clock,
        gs_base: cpu.sregs().gs.base,
    }
}

fn carry_out(cpu: &mut CpuFd, outcome: Outcome, regs: &Regs) -> Result<(), kvm_ioctls::Error> {
    match outcome {
        Outcome::Foreign => Ok(()),
        Outcome::Resume | Outcome::Retry => {
            cpu.set_regs(regs);
            Ok(())
        }
        Outcome::Step => {
            cpu.set_regs_now(regs)?;
            cpu.start_step()
        }
        Outcome::Fault(Access { at, write }) => {
            cpu.set_regs_now(regs)?;
            cpu.set_cr2(at.0)?;
            cpu.inject(VECTOR_PF, Some(if write { PF_WRITE } else { 0 }))
        }
    }
}
