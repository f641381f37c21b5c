//! Turns exits into hits. There are three ways in which a planted int3 reaches user space. Int3s that are not ours
//! are reflected to the guest.
//!
//! | mode             | exit                                  | RIP                          |
//! |------------------|---------------------------------------|------------------------------|
//! | `debug-exit`     | `KVM_EXIT_DEBUG`, exception 3         | the int3                     |
//! | `emulation-exit` | `KVM_EXIT_INTERNAL_ERROR`, bytes `cc…`| the int3                     |
//! | `idt-gate`       | `KVM_EXIT_IO` at the guest's #BP entry| the patched entry            |
//!
//! In `idt-gate` the processor has pushed an exception frame. Undoing that push gives exactly the state of the hit.
//! Invariants: an int3 that is not ours leaves the guest in the state in which it would be without us. While a
//! stepped copy runs, IDTR points at the table of the exception window, and every exception of the copy exits at
//! one of the table's stubs.
//!
//! Each of those stubs is an `out` in every mode, and so is the trampoline, to which functions with a return probe
//! return. They exit with `KVM_EXIT_IO`, with RIP at or after the `out`.

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

/// Catches the hits of one vCPU.
#[derive(Debug)]
pub(crate) struct Catcher {
    pub(crate) mode: CatchMode,
    pub(crate) handler: HitHandler,
    pub(crate) clock: HostClock,
    /// Base of the guest's own IDT, while the IDT of the exception window is in force.
    own_idt: Option<u64>,
    /// GS base in kernel mode. Known after the first hit since the vCPU last parked, if nothing is stepped.
    kernel_gs: Option<u64>,
    /// Whether hits may access memory of the running process.
    reaches_process: bool,
    /// Whether hits wait for room rather than be lost.
    pub(crate) waits_for_room: bool,
}

/// Outcome of most hits.
const PLAIN: Outcome = Outcome::Resume { shadow: false };

/// What the vCPU waits for before it continues with [`Catcher::resume`]; `None` if it continues at once.
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

    /// Adopts the probe table and the kernel view that a parked vCPU has received.
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

    /// Learns GS base in kernel mode, and stops sharing the system registers, unless something may be stepped.
    /// Without steps, hits need no other system register. Linux gives each processor one GS base for kernel mode
    /// when it starts, the address of its per-CPU area (`switch_gdt_and_percpu_base` in
    /// arch/x86/kernel/cpu/common.c). Only the entry code from user mode runs with another one, and there the
    /// kernel forbids probes. So the value at the first hit holds for all hits.
    fn learn(&mut self, cpu: &mut CpuFd) {
        if self.kernel_gs.is_none() && cpu.knows_sregs() && !self.handler.can_step() {
            self.kernel_gs = Some(cpu.sregs().gs.base);
            cpu.share_sregs(false);
        }
    }

    /// Returns GS base in kernel mode. The last exit must be from kernel mode.
    pub(crate) fn kernel_gs(&self, cpu: &mut CpuFd) -> u64 {
        self.kernel_gs.unwrap_or_else(|| cpu.sregs().gs.base)
    }

    /// Handles an int3 exit in `debug-exit` or `emulation-exit`; RIP is the int3.
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

    /// Handles a hit of the int3 or the trampoline at `at`, with the registers in the `kvm_run` page.
    #[inline]
    fn hit(&mut self, cpu: &mut CpuFd, ram: &GuestRam, at: Gva) -> Outcome {
        let gs_base = self.kernel_gs(cpu);
        if self.reaches_process {
            return self.hit_reaching(cpu, ram, at, gs_base);
        }
        let around = surroundings(gs_base, ram, &self.clock, None);
        self.handler.hit(at, cpu.regs_mut(), &around)
    }

    /// Like [`Catcher::hit`], for hits that may need CR3.
    #[inline(never)]
    fn hit_reaching(&mut self, cpu: &mut CpuFd, ram: &GuestRam, at: Gva, gs_base: u64) -> Outcome {
        let mut regs = cpu.regs();
        let outcome = cpu.with_cr3(|cr3| {
            let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
            self.handler.hit(at, &mut regs, &around)
        });
        *cpu.regs_mut() = regs;
        outcome
    }

    /// Reflects an int3 of the guest's own: raises its #BP in the guest.
    #[cold]
    fn reflect(&mut self, cpu: &mut CpuFd) -> Result<(), kvm_ioctls::Error> {
        if self.mode == CatchMode::EmulationExit {
            // KVM does not know the instruction's length here, and pushes RIP unchanged. So advance RIP.
            let regs = cpu.regs_mut();
            regs.rip = regs.rip.wrapping_add(1);
            cpu.give_regs();
        }
        cpu.inject(vector::BREAKPOINT, None)?;
        // Shared until an exit that is not an int3 of the guest's own: such int3s often follow each other.
        cpu.share_events(true);
        // Learn only from kernel mode: in user mode GS base has another value.
        if cpu.in_kernel() {
            self.learn(cpu);
        }
        Ok(())
    }

    /// Handles an exit at the patched #BP entry in `idt-gate`. Returns `None` when RIP is not at the gate of the
    /// kernel that we know.
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
            let outcome = cpu.with_cr3(|cr3| {
                let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
                self.handler.hit(int3, &mut before, &around)
            });
            if outcome != Outcome::Foreign {
                *cpu.regs_mut() = before;
                return self.carry_out(cpu, outcome).map(Some);
            }
        }
        if !self.handler.knows_kernel() {
            // The guest has replaced the kernel that this entry was in.
            return Ok(None);
        }
        gate.head.apply(&mut regs);
        cpu.set_regs(&regs);
        Ok(Some(None))
    }

    /// Handles a function's return to the trampoline. Returns `None` when RIP is elsewhere, or when the call is
    /// unknown. In the latter case the guest continues after the `out`, where it meets an int3.
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

    /// Handles a hit of a stub of the exception window. Returns `None` when RIP is at none of them, or when no
    /// copy is being stepped.
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
        let outcome = cpu.with_cr3(|cr3| {
            let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
            self.handler
                .exception(vector, Gva(own_idt), &mut regs, &around)
        });
        if outcome == Outcome::Foreign {
            // The guest itself has installed the stub as a handler.
            self.adjust_window(cpu);
            return Ok(None);
        }
        *cpu.regs_mut() = regs;
        self.carry_out(cpu, outcome).map(Some)
    }

    /// Abandons a step that does not end, so that the vCPU can be stopped.
    pub(crate) fn abandon(&mut self, cpu: &mut CpuFd, ram: &GuestRam) {
        let mut regs = cpu.regs();
        let gs_base = self.kernel_gs(cpu);
        let around = surroundings(gs_base, ram, &self.clock, None);
        self.handler.abandon(&mut regs, &around);
        cpu.set_regs(&regs);
        self.adjust_window(cpu);
    }

    /// Returns the question that the held hit has for a client.
    pub(crate) fn question(&self, cpu: &mut CpuFd, ram: &GuestRam) -> Option<Inquiry> {
        let (regs, gs_base) = (cpu.regs(), self.kernel_gs(cpu));
        cpu.with_cr3(|cr3| {
            let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
            self.handler.question(&regs, &around)
        })
    }

    /// Continues a hit that was held, as `decision` says.
    pub(crate) fn resume(
        &mut self,
        cpu: &mut CpuFd,
        ram: &GuestRam,
        decision: &Decision,
    ) -> Result<Waits, kvm_ioctls::Error> {
        let (mut regs, gs_base) = (cpu.regs(), self.kernel_gs(cpu));
        let outcome = cpu.with_cr3(|cr3| {
            let around = surroundings(gs_base, ram, &self.clock, Some(cr3));
            self.handler.resume(decision, &mut regs, &around)
        });
        *cpu.regs_mut() = regs;
        self.carry_out(cpu, outcome)
    }

    /// Lets the guest continue as `outcome` says, with the registers in the `kvm_run` page.
    #[inline]
    fn carry_out(&mut self, cpu: &mut CpuFd, outcome: Outcome) -> Result<Waits, kvm_ioctls::Error> {
        let ends_shadow = self.handler.ends_shadow();
        // GS base is known only if nothing is stepped, so there is no exception window to close.
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
                // The processor sets RF in the frames of faults (SDM vol. 3, 17.3.1.1); KVM does not for
                // injected faults.
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

    /// Opens or closes the exception window, as the handler requires.
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

    /// If the vCPU is on its way from an int3 to the gate, takes it back to the int3. Then the change for which the
    /// vCPU parks may remove the int3 or the gate. Called before parking in `idt-gate`.
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
