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
//! in without us. While a stepped copy runs, the processor has the interrupt descriptor table of the
//! exception window, and every exception of the copy reaches us at one of its stubs.
//!
//! Those stubs, and the trampoline that functions with a return probe return to, are an `out` in every
//! mode: `KVM_EXIT_IO`, RIP at it or behind it.

use std::sync::Arc;

use hvprobe_arch::regs::rflags;
use hvprobe_arch::trap::vector;
use hvprobe_arch::{Gva, Regs};
use hvprobe_hit::table::ProbeTable;
use hvprobe_hit::{Held, HitHandler, Inquiry, KernelView, Outcome, Surroundings};
use hvprobe_spec::Decision;
use hvprobe_vm::CatchMode;
use hvprobe_vm::memory::GuestRam;
use hvprobe_vm::vcpu::CpuFd;

use crate::clock::host::HostClock;
use crate::gate::Gate;

/// The catching side of one virtual CPU.
#[derive(Debug)]
pub(crate) struct Catcher {
    pub(crate) mode: CatchMode,
    pub(crate) handler: HitHandler,
    pub(crate) clock: HostClock,
    /// Where the guest's own interrupt descriptor table is, while the exception window's is in
    /// force.
    own_idt: Option<u64>,
    /// GS base in kernel mode, once a hit has shown it since the virtual CPU last parked.
    kernel_gs: Option<u64>,
    /// Whether hits may reach for memory of the process.
    reaches_process: bool,
    /// Whether hits wait for room rather than be lost.
    pub(crate) waits_for_room: bool,
}

/// What most hits come to.
const PLAIN: Outcome = Outcome::Resume { shadow: false };

/// What the virtual CPU waits for before it goes on with [`Catcher::resume`].
pub(crate) type Waits = Option<Held>;

impl Catcher {
    pub(crate) fn new(mode: CatchMode, handler: HitHandler, clock: HostClock) -> Self {
        Self {
            mode,
            handler,
            clock,
            own_idt: None,
            kernel_gs: None,
            reaches_process: false,
            waits_for_room: false,
        }
    }

    /// Takes over what a virtual CPU goes on with after it was parked.
    pub(crate) fn adopt(
        &mut self,
        cpu: &mut CpuFd,
        table: Arc<ProbeTable>,
        view: Option<KernelView>,
    ) {
        self.handler.adopt(table, view);
        self.kernel_gs = None;
        self.reaches_process = self.handler.reaches_process();
        self.waits_for_room = self.handler.waits_for_room();
        cpu.share_sregs(self.handler.can_hit());
    }

    /// What a hit wants of the system registers is GS base, and where nothing is stepped nothing
    /// else. Linux gives each processor one for the kernel's own when it starts, the address of its
    /// per-CPU area (`switch_gdt_and_percpu_base` in arch/x86/kernel/cpu/common.c); only the way in
    /// from user mode runs with another, where the kernel forbids probes. So the first hit tells it
    /// for all.
    fn learn(&mut self, cpu: &mut CpuFd) {
        if self.kernel_gs.is_none() && cpu.knows_sregs() && !self.handler.can_step() {
            self.kernel_gs = Some(cpu.sregs().gs.base);
            cpu.share_sregs(false);
        }
    }

    /// GS base in kernel mode, which the last exit was from.
    pub(crate) fn kernel_gs(&self, cpu: &mut CpuFd) -> u64 {
        self.kernel_gs.unwrap_or_else(|| cpu.sregs().gs.base)
    }

    /// An int3 exit in `debug-exit` or `emulation-exit`; RIP is the int3.
    pub(crate) fn int3(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
    ) -> Result<Waits, kvm_ioctls::Error> {
        let mut outcome = Outcome::Foreign;
        if cpu.in_kernel() {
            let at = Gva(cpu.regs_mut().rip);
            outcome = self.hit(cpu, ram, at);
        }
        if outcome == Outcome::Foreign {
            self.reflect(cpu)?;
            return Ok(None);
        }
        self.carry_out(cpu, outcome)
    }

    /// The int3 or the trampoline at `at` was reached, with the registers that are in the page.
    #[inline]
    fn hit(&mut self, cpu: &mut CpuFd, ram: &GuestRam, at: Gva) -> Outcome {
        let gs_base = self.kernel_gs(cpu);
        if self.reaches_process {
            return self.hit_reaching(cpu, ram, at, gs_base);
        }
        let around = surroundings(gs_base, ram, &self.clock, None);
        self.handler.hit(at, cpu.regs_mut(), &around)
    }

    /// The same where CR3 may be asked for.
    #[inline(never)]
    fn hit_reaching(&mut self, cpu: &mut CpuFd, ram: &GuestRam, at: Gva, gs_base: u64) -> Outcome {
        let mut regs = cpu.regs();
        let outcome = cpu.telling_cr3(|cr3| {
            let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
            self.handler.hit(at, &mut regs, &around)
        });
        *cpu.regs_mut() = regs;
        outcome
    }

    /// Gives the guest an int3 of its own.
    #[cold]
    fn reflect(&mut self, cpu: &mut CpuFd) -> Result<(), kvm_ioctls::Error> {
        if self.mode == CatchMode::EmulationExit {
            // Nothing knows the length of the instruction there, so the frame gets RIP as it is.
            let regs = cpu.regs_mut();
            regs.rip = regs.rip.wrapping_add(1);
            cpu.give_regs();
        }
        cpu.inject(vector::BREAKPOINT, None)?;
        // Until another exit: a guest's own probes meet one after the other.
        cpu.share_events(true);
        // User mode has a GS base of its own.
        if cpu.in_kernel() {
            self.learn(cpu);
        }
        Ok(())
    }

    /// The patched #BP entry was reached in `idt-gate`. `None` when RIP is not the gate.
    pub(crate) fn gate(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
        gate: &Gate,
    ) -> Result<Option<Waits>, kvm_ioctls::Error> {
        let mut regs = cpu.regs();
        let at = gate.head.at().0;
        // Hosts differ in whether RIP has passed the `out`.
        if (regs.rip != at && regs.rip != at.wrapping_add(2)) || !cpu.in_kernel() {
            return Ok(None);
        }
        let read = |at, into: &mut [u8]| self.handler.read(ram, at, into);
        if let Some(mut before) = Gate::before(read, &regs) {
            let (int3, gs_base) = (Gva(before.rip), self.kernel_gs(cpu));
            let outcome = cpu.telling_cr3(|cr3| {
                let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
                self.handler.hit(int3, &mut before, &around)
            });
            if outcome != Outcome::Foreign {
                *cpu.regs_mut() = before;
                return self.carry_out(cpu, outcome).map(Some);
            }
        }
        if !self.handler.knows_kernel() {
            // The guest left the kernel with that entry for another.
            return Ok(None);
        }
        gate.head.apply(&mut regs);
        cpu.set_regs(&regs);
        Ok(Some(None))
    }

    /// A function returned to the trampoline. `None` when RIP is elsewhere, or nobody knows of the
    /// call: then the guest goes on behind the `out`, where it meets an int3.
    pub(crate) fn returned(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
    ) -> Result<Option<Waits>, kvm_ioctls::Error> {
        let Some(at) = self.handler.trampoline(Gva(cpu.regs_mut().rip)) else {
            return Ok(None);
        };
        match self.hit(cpu, ram, at) {
            Outcome::Foreign => Ok(None),
            outcome => self.carry_out(cpu, outcome).map(Some),
        }
    }

    /// A stub of the exception window was reached. `None` when RIP is at none, or no copy is
    /// being stepped.
    pub(crate) fn exception(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
    ) -> Result<Option<Waits>, kvm_ioctls::Error> {
        let mut regs = cpu.regs();
        let (Some(vector), Some(own_idt)) = (self.handler.vector(Gva(regs.rip)), self.own_idt)
        else {
            return Ok(None);
        };
        let gs_base = self.kernel_gs(cpu);
        let outcome = cpu.telling_cr3(|cr3| {
            let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
            self.handler
                .exception(vector, Gva(own_idt), &mut regs, &around)
        });
        if outcome == Outcome::Foreign {
            // The guest has the stub for its handler, as it has made it.
            self.adjust_window(cpu);
            return Ok(None);
        }
        *cpu.regs_mut() = regs;
        self.carry_out(cpu, outcome).map(Some)
    }

    /// Gives up on a step that does not come to its end; the virtual CPU may be stopped then.
    pub(crate) fn abandon(&mut self, cpu: &mut CpuFd, ram: &GuestRam) {
        let mut regs = cpu.regs();
        let gs_base = self.kernel_gs(cpu);
        let around = surroundings(gs_base, ram, &self.clock, None);
        self.handler.abandon(&mut regs, &around);
        cpu.set_regs(&regs);
        self.adjust_window(cpu);
    }

    /// What the hit that is held is to ask a client.
    pub(crate) fn question(&self, cpu: &mut CpuFd, ram: &GuestRam) -> Option<Inquiry> {
        let (regs, gs_base) = (cpu.regs(), self.kernel_gs(cpu));
        cpu.telling_cr3(|cr3| {
            let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
            self.handler.question(&regs, &around)
        })
    }

    /// Goes on with a hit that was held, as decided.
    pub(crate) fn resume(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
        decision: &Decision,
    ) -> Result<Waits, kvm_ioctls::Error> {
        let (mut regs, gs_base) = (cpu.regs(), self.kernel_gs(cpu));
        let outcome = cpu.telling_cr3(|cr3| {
            let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
            self.handler.resume(decision, &mut regs, &around)
        });
        *cpu.regs_mut() = regs;
        self.carry_out(cpu, outcome)
    }

    /// Has the guest go on as `outcome` says, with the registers that are in the page.
    #[inline]
    fn carry_out(&mut self, cpu: &mut CpuFd, outcome: Outcome) -> Result<Waits, kvm_ioctls::Error> {
        let ends_shadow = self.handler.ends_shadow();
        // GS base is known only where nothing is stepped, so that there is no window.
        if outcome == PLAIN && !ends_shadow && self.kernel_gs.is_some() {
            cpu.give_regs();
            cpu.share_events(false);
            return Ok(None);
        }
        self.carry_out_any(cpu, outcome, ends_shadow)
    }

    #[inline(never)]
    fn carry_out_any(
        &mut self,
        cpu: &mut CpuFd,
        outcome: Outcome,
        ends_shadow: bool,
    ) -> Result<Waits, kvm_ioctls::Error> {
        let mut waits = None;
        match outcome {
            Outcome::Foreign => {}
            Outcome::Resume { shadow } => {
                cpu.give_regs();
                if shadow {
                    cpu.hold_off_interrupts_once()?;
                } else if ends_shadow {
                    cpu.end_shadow()?;
                }
            }
            Outcome::Fault(fault) => {
                // The processor sets RF in the frames of faults (SDM vol. 3, 17.3.1.1); KVM does not
                // in those of faults it is told to inject.
                let regs = cpu.regs();
                cpu.set_regs_now(&Regs {
                    rflags: regs.rflags | rflags::RF,
                    ..regs
                })?;
                if let Some(address) = fault.address {
                    cpu.set_cr2(address.0)?;
                }
                cpu.inject(fault.vector, fault.error_code)?;
            }
            Outcome::Hold(held) => {
                cpu.give_regs();
                waits = Some(held);
            }
        }
        self.adjust_window(cpu);
        self.learn(cpu);
        Ok(waits)
    }

    /// Opens or closes the exception window, as the handler wants it.
    fn adjust_window(&mut self, cpu: &mut CpuFd) {
        match (self.handler.window(), self.own_idt) {
            (Some(ours), None) => self.own_idt = Some(cpu.set_idt_base(ours.0)),
            (None, Some(own)) => {
                cpu.set_idt_base(own);
                self.own_idt = None;
            }
            _ => {}
        }
    }

    /// Before parking in `idt-gate`: a virtual CPU on its way from an int3 to the gate is taken
    /// back to the int3, so that the change it parks for may remove either.
    pub(crate) fn rewind(cpu: &mut CpuFd, ram: &GuestRam, gate: &Gate) {
        let regs = cpu.regs();
        let read = |at, into: &mut [u8]| gate.tables.read(ram, at, into).is_ok();
        if cpu.in_kernel()
            && let Some(before) = gate.undone(read, &regs)
        {
            cpu.set_regs(&before);
        }
    }
}

fn surroundings<'a>(
    gs_base: u64,
    ram: &'a GuestRam,
    clock: &'a HostClock,
    cr3: Option<&'a dyn Fn() -> Option<u64>>,
) -> Surroundings<'a, GuestRam, HostClock> {
    Surroundings {
        mem: ram,
        clock,
        gs_base,
        cr3,
    }
}
