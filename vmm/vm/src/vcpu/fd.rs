//! The file descriptor of one vCPU, with every ioctl counted.
//!
//! General registers travel in the `kvm_run` page that is shared with KVM (`KVM_CAP_SYNC_REGS`, KVM API 8.x
//! "sync_regs"), so reading them after an exit and changing them before the next entry takes no ioctl. On request,
//! KVM also puts the system registers and the vCPU events (exceptions, interrupts and NMIs that are pending or
//! injected) into the page at each exit.
//!
//! Invariants: state that the page does not hold is fetched before it is read. A register change is either marked
//! dirty in the page or written by `KVM_SET_REGS`, never both.

use std::cell::Cell;
use std::mem::offset_of;

use hvprobe_arch::Regs;
use hvprobe_arch::trap::{DOORBELL_PORT, GATE_PORT, ROOM_PORT};
use hvprobe_devices::{DeviceEvent, Devices, Space};
use kvm_bindings::{
    KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_USE_SW_BP, KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE,
    KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW, KVM_X86_SHADOW_INT_STI, Msrs,
    kvm_guest_debug, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
};
use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};
use tracing::warn;

use super::failure::InternalError;
use crate::catch_mode::CatchMode;

/// IA32_TIME_STAMP_COUNTER (SDM vol. 4, table 2-2).
const MSR_TSC: u32 = 0x10;
/// `MSR_KVM_SYSTEM_TIME_NEW` (arch/x86/include/uapi/asm/kvm_para.h).
const MSR_KVMCLOCK: u32 = 0x4b56_4d01;
/// Interrupt shadow of `sti`: interrupts are held off for one instruction.
const SHADOW_INT_STI: u8 = KVM_X86_SHADOW_INT_STI.to_le_bytes()[0];

/// Type of an available 64-bit TSS (SDM vol. 3, table 3-2).
const TSS_AVAILABLE: u8 = 9;
const GATE: u16 = GATE_PORT as u16;
const DOORBELL: u16 = DOORBELL_PORT as u16;
const ROOM: u16 = ROOM_PORT as u16;

/// Number of ioctls made for one vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ioctls {
    /// `KVM_RUN`.
    pub run: u64,
    /// All other ioctls.
    pub other: u64,
}

/// Clock state of a vCPU, as [`CpuFd::counters`] reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The guest's TSC.
    pub tsc: u64,
    /// Value of `MSR_KVM_SYSTEM_TIME_NEW`: the guest physical address at which KVM publishes the clock. Bit 0 is
    /// set if KVM publishes it.
    pub kvmclock: u64,
}

/// An exit of the guest. The variants are the kinds that the run loop distinguishes.
#[derive(Debug)]
pub enum Exit {
    /// A device access that is complete, or an exit that needs no work.
    Handled,
    /// The guest wrote to a device to reset the machine or to power it off.
    Device(DeviceEvent),
    /// An `out` to the port of our patches. RIP shows whether the `out` is that of a patch or the guest's own.
    Gate,
    /// An `out` to the port by which a detour reports that the ring fills up.
    Doorbell,
    /// An `out` to the port by which a detour asks for room in the ring.
    Room,
    /// `KVM_EXIT_DEBUG`.
    Debug {
        /// Exception number.
        exception: u32,
    },
    /// `KVM_EXIT_INTERNAL_ERROR`: KVM could not continue.
    InternalError {
        /// KVM's reason.
        suberror: u32,
        /// Bytes of the instruction that could not be emulated, and the number of valid bytes; `None` if KVM does
        /// not report them.
        bytes: Option<([u8; 15], u8)>,
    },
    /// A triple fault.
    Shutdown,
    /// The entry failed, with the hardware's reason.
    FailEntry(u64),
    /// A signal interrupted `KVM_RUN`.
    Interrupted,
    /// Any other exit.
    Unknown(String),
}

/// RIP at the last entries. On hosts whose KVM resets the processor after a triple fault, this is all that remains
/// of the guest's position.
#[derive(Debug, Default)]
struct Trail {
    rips: [u64; 16],
    next: u8,
}

impl Trail {
    #[inline]
    fn note(&mut self, rip: u64) {
        self.rips[usize::from(self.next) % self.rips.len()] = rip;
        self.next = self.next.wrapping_add(1);
    }

    fn newest_first(&self) -> impl Iterator<Item = u64> {
        let newest = usize::from(self.next.wrapping_sub(1)) % self.rips.len();
        let (newer, older) = self.rips.split_at(newest + 1);
        newer.iter().rev().chain(older.iter().rev()).copied()
    }
}

/// A KVM vCPU.
#[derive(Debug)]
pub struct CpuFd {
    fd: VcpuFd,
    mode: CatchMode,
    ioctls: Ioctls,
    /// Whether KVM puts the system registers into the `kvm_run` page at each exit.
    shares_sregs: bool,
    /// Whether the page holds the system registers of the last exit.
    knows_sregs: bool,
    /// Whether KVM puts the vCPU events into the page at each exit.
    shares_events: bool,
    /// Whether the page holds the vCPU events of the last exit.
    knows_events: bool,
    /// Whether KVM still has to complete the port or memory access of the last exit.
    owes_io: bool,
    trail: Trail,
}

impl CpuFd {
    /// Wraps a configured vCPU whose int3s are caught in `mode`.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn new(mut fd: VcpuFd, mode: CatchMode) -> Result<Self, kvm_ioctls::Error> {
        fd.set_sync_valid_reg(SyncReg::Register);
        fd.set_sync_valid_reg(SyncReg::SystemRegister);
        let debug = match mode {
            // On `emulation-exit` hosts this flag has no effect, but declares our use of int3 to KVM.
            CatchMode::DebugExit | CatchMode::EmulationExit => {
                KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP
            }
            CatchMode::IdtGate => 0,
        };
        let mut cpu = Self {
            fd,
            mode,
            ioctls: Ioctls::default(),
            shares_sregs: true,
            knows_sregs: true,
            shares_events: false,
            knows_events: false,
            owes_io: false,
            trail: Trail::default(),
        };
        cpu.set_debug(debug)?;
        Ok(cpu)
    }

    /// Returns the descriptor itself, for ioctls that are not counted.
    #[inline]
    pub fn fd_mut(&mut self) -> &mut VcpuFd {
        &mut self.fd
    }

    /// Returns the number of ioctls so far.
    #[inline]
    #[must_use]
    pub fn ioctls(&self) -> Ioctls {
        self.ioctls
    }

    /// Runs the guest until it exits, and carries out its device accesses.
    #[inline]
    pub fn run(&mut self, devices: &Devices) -> Exit {
        self.ioctls.run += 1;
        self.knows_sregs = self.shares_sregs;
        self.knows_events = self.shares_events;
        self.trail.note(self.fd.sync_regs_mut().regs.rip);
        let exit = self.fd.run();
        self.owes_io = matches!(
            exit,
            Ok(VcpuExit::IoIn(..)
                | VcpuExit::IoOut(..)
                | VcpuExit::MmioRead(..)
                | VcpuExit::MmioWrite(..))
        );
        match exit {
            Ok(VcpuExit::IoOut(GATE, [_])) => Exit::Gate,
            Ok(VcpuExit::IoOut(DOORBELL, [_])) => Exit::Doorbell,
            Ok(VcpuExit::IoOut(ROOM, [_])) => Exit::Room,
            Ok(VcpuExit::IoOut(port, data)) => written(devices, Space::Port, port.into(), data),
            Ok(VcpuExit::IoIn(port, data)) => {
                devices.read(Space::Port, port.into(), data);
                Exit::Handled
            }
            Ok(VcpuExit::MmioWrite(at, data)) => written(devices, Space::Memory, at, data),
            Ok(VcpuExit::MmioRead(at, data)) => {
                devices.read(Space::Memory, at, data);
                Exit::Handled
            }
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => Exit::Handled,
            Ok(VcpuExit::Debug(debug)) => Exit::Debug {
                exception: debug.exception,
            },
            Ok(VcpuExit::InternalError) => {
                let InternalError { suberror, bytes } = InternalError::of(&mut self.fd);
                Exit::InternalError { suberror, bytes }
            }
            Ok(VcpuExit::Shutdown | VcpuExit::SystemEvent(..)) => Exit::Shutdown,
            Ok(VcpuExit::FailEntry(reason, _)) => Exit::FailEntry(reason),
            Ok(other) => Exit::Unknown(format!("{other:?}")),
            Err(error) if error.errno() == libc::EINTR || error.errno() == libc::EAGAIN => {
                Exit::Interrupted
            }
            Err(error) => Exit::Unknown(format!("KVM_RUN failed: {error}")),
        }
    }

    /// Returns RIP at the last entries, newest first.
    pub fn trail(&self) -> impl Iterator<Item = u64> {
        self.trail.newest_first()
    }

    /// Returns the general registers at the last exit.
    #[inline]
    pub fn regs(&mut self) -> Regs {
        *self.regs_mut()
    }

    /// Returns the general registers at the last exit, to be changed. The guest gets the changes at its next entry
    /// if [`CpuFd::give_regs`] is called.
    #[inline]
    pub fn regs_mut(&mut self) -> &mut Regs {
        let regs: *mut kvm_regs = &raw mut self.fd.sync_regs_mut().regs;
        // SAFETY: `Regs` and `kvm_regs` are both eighteen 64-bit integers in the same order, as asserted below. The
        // result borrows `self`, as the reference to the page does.
        unsafe { &mut *regs.cast() }
    }

    /// Sets whether KVM puts the system registers into the page at each later exit. If it does, each exit is
    /// slower: KVM collects eight segments, on VMX by four reads of the VMCS each (`__get_sregs` in
    /// arch/x86/kvm/x86.c). If it does not, [`CpuFd::sregs`] takes an ioctl.
    #[inline]
    pub fn share_sregs(&mut self, share: bool) {
        self.shares_sregs = share;
        if share {
            self.fd.set_sync_valid_reg(SyncReg::SystemRegister);
        } else {
            self.fd.clear_sync_valid_reg(SyncReg::SystemRegister);
        }
    }

    /// Returns whether the page holds the system registers, so that [`CpuFd::sregs`] takes no ioctl.
    #[inline]
    pub fn knows_sregs(&self) -> bool {
        self.knows_sregs
    }

    /// Returns the system registers at the last exit.
    #[inline]
    pub fn sregs(&mut self) -> &kvm_sregs {
        if !self.knows_sregs {
            self.ioctls.other += 1;
            match self.fd.get_sregs() {
                Ok(sregs) => self.fd.sync_regs_mut().sregs = sregs,
                // KVM has no reason to refuse this.
                Err(error) => warn!(%error, "the system registers of an earlier exit are used"),
            }
            self.knows_sregs = true;
        }
        &self.fd.sync_regs_mut().sregs
    }

    /// Calls `act` with a function that returns CR3 at the last exit; `None` if KVM refuses. That function takes an
    /// ioctl unless the page holds the system registers.
    #[inline]
    pub fn with_cr3<T>(&mut self, act: impl FnOnce(&dyn Fn() -> Option<u64>) -> T) -> T {
        let known = self.knows_sregs.then(|| self.fd.sync_regs_mut().sregs.cr3);
        let (asked, fd) = (Cell::new(0), &self.fd);
        let ask = || {
            asked.set(asked.get() + 1);
            Some(fd.get_sregs().ok()?.cr3)
        };
        let result = act(&|| known.or_else(ask));
        self.ioctls.other += asked.get();
        result
    }

    /// Returns whether the last exit was from kernel mode.
    #[inline]
    pub fn in_kernel(&mut self) -> bool {
        if self.knows_sregs {
            // CPL is the DPL of SS (SDM vol. 3, 5.5).
            self.sregs().ss.dpl == 0
        } else {
            // User mode cannot execute the kernel's pages (SDM vol. 3, 4.6.1). So an int3 or `out` there was
            // executed in kernel mode.
            in_kernel_half(self.fd.sync_regs_mut().regs.rip)
        }
    }

    /// Sets the guest's registers for its next entry. No ioctl.
    #[inline]
    pub fn set_regs(&mut self, regs: &Regs) {
        *self.regs_mut() = *regs;
        self.give_regs();
    }

    /// Applies the changes made through [`CpuFd::regs_mut`] at the next entry. No ioctl.
    #[inline]
    pub fn give_regs(&mut self) {
        self.fd.set_sync_dirty_reg(SyncReg::Register);
    }

    /// Sets the guest's registers at once by an ioctl, for later ioctls that read them.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn set_regs_now(&mut self, regs: &Regs) -> Result<(), kvm_ioctls::Error> {
        self.ioctls.other += 1;
        self.fd.clear_sync_dirty_reg(SyncReg::Register);
        *self.regs_mut() = *regs;
        let regs = self.fd.sync_regs_mut().regs;
        self.fd.set_regs(&regs)
    }

    fn set_debug(&mut self, control: u32) -> Result<(), kvm_ioctls::Error> {
        self.ioctls.other += 1;
        self.fd.set_guest_debug(&kvm_guest_debug {
            control,
            ..Default::default()
        })
    }

    /// Raises exception `vector` at the next entry, as if by the instruction at RIP.
    ///
    /// # Errors
    /// When KVM refuses.
    #[inline]
    pub fn inject(&mut self, vector: u8, error_code: Option<u32>) -> Result<(), kvm_ioctls::Error> {
        self.change_events(|events| {
            events.exception.injected = 1;
            events.exception.nr = vector;
            events.exception.has_error_code = u8::from(error_code.is_some());
            events.exception.error_code = error_code.unwrap_or(0);
        })
    }

    /// Sets whether KVM puts the vCPU events into the page at each later exit. If it does not, changing them takes
    /// an ioctl.
    #[inline]
    pub fn share_events(&mut self, share: bool) {
        if self.shares_events == share {
            return;
        }
        self.shares_events = share;
        if share {
            self.fd.set_sync_valid_reg(SyncReg::VcpuEvents);
        } else {
            self.fd.clear_sync_valid_reg(SyncReg::VcpuEvents);
        }
    }

    /// Changes the vCPU events of the last exit, with effect from the next entry. Leaves pending NMIs alone,
    /// because an NMI may have arrived since the exit.
    #[inline]
    fn change_events(
        &mut self,
        change: impl FnOnce(&mut kvm_vcpu_events),
    ) -> Result<(), kvm_ioctls::Error> {
        if !self.knows_events {
            self.ioctls.other += 1;
            self.fd.sync_regs_mut().events = self.fd.get_vcpu_events()?;
            self.knows_events = true;
        }
        let events = &mut self.fd.sync_regs_mut().events;
        events.flags &= !KVM_VCPUEVENT_VALID_NMI_PENDING;
        change(events);
        // KVM applies the events after the registers, if both are dirty (`sync_regs` in arch/x86/kvm/x86.c).
        self.fd.set_sync_dirty_reg(SyncReg::VcpuEvents);
        Ok(())
    }

    /// Injects an NMI, which the guest takes as soon as it can. Skips a vCPU that the guest has not started: it
    /// takes no NMI, and `KVM_RUN` would return at once as long as one is pending (`kvm_vcpu_has_events` in
    /// arch/x86/kvm/x86.c).
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn raise_nmi(&mut self) -> Result<(), kvm_ioctls::Error> {
        self.ioctls.other += 1;
        let state = self.fd.get_mp_state()?.mp_state;
        if matches!(state, KVM_MP_STATE_RUNNABLE | KVM_MP_STATE_HALTED) {
            self.ioctls.other += 1;
            self.fd.nmi()?;
        }
        Ok(())
    }

    /// Sets CR2, the address of the last page fault.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn set_cr2(&mut self, address: u64) -> Result<(), kvm_ioctls::Error> {
        self.ioctls.other += 1;
        let sregs = self.sregs_to_set();
        sregs.cr2 = address;
        let sregs = *sregs;
        self.fd.set_sregs(&sregs)
    }

    /// Points IDTR at another table from the next entry on, and returns the base at the last exit. The limit
    /// and all other system registers stay as at the last exit. No ioctl.
    #[inline]
    pub fn set_idt_base(&mut self, base: u64) -> u64 {
        let own = std::mem::replace(&mut self.sregs_to_set().idt.base, base);
        self.fd.set_sync_dirty_reg(SyncReg::SystemRegister);
        own
    }

    /// Returns the system registers of the last exit, adjusted so that KVM takes them back without side
    /// effects.
    #[inline]
    fn sregs_to_set(&mut self) -> &mut kvm_sregs {
        self.sregs();
        let mode = self.mode;
        let sregs = &mut self.fd.sync_regs_mut().sregs;
        // At an exit with an interrupt in flight, KVM sets the interrupt's bit here. In this page it never clears a
        // bit (`__get_sregs` in arch/x86/kvm/x86.c since 5.14). If the bit went back to KVM, it would raise the
        // interrupt again. Clearing it loses nothing, because KVM itself keeps an interrupt that is in flight.
        sregs.interrupt_bitmap = [0; 4];
        // On SVM, KVM reports every TSS as busy. The SVM on which int3s do not exit is that of QEMU. There `ltr`
        // leaves an available TSS in TR, and user mode may access ports only while TR holds one (`helper_check_io`
        // in target/i386/tcg).
        if mode == CatchMode::IdtGate {
            sregs.tr.type_ = TSS_AVAILABLE;
        }
        sregs
    }

    /// Holds off maskable interrupts until the next instruction is over, as `sti` does. Valid only if RFLAGS.IF is
    /// set at the next entry: otherwise a processor may refuse the entry (SDM vol. 3, 26.3.1.5).
    ///
    /// # Errors
    /// When KVM refuses.
    #[inline]
    pub fn hold_off_interrupts_once(&mut self) -> Result<(), kvm_ioctls::Error> {
        self.set_shadow(SHADOW_INT_STI)
    }

    /// Ends the interrupt shadow of [`CpuFd::hold_off_interrupts_once`] or of the guest's own `sti`.
    ///
    /// # Errors
    /// When KVM refuses.
    #[inline]
    pub fn end_shadow(&mut self) -> Result<(), kvm_ioctls::Error> {
        self.set_shadow(0)
    }

    #[inline]
    fn set_shadow(&mut self, shadow: u8) -> Result<(), kvm_ioctls::Error> {
        self.change_events(|events| {
            events.flags |= KVM_VCPUEVENT_VALID_SHADOW;
            events.interrupt.shadow = shadow;
        })
    }

    /// Returns whether the last exit was an access to a port or to a device's memory that KVM still has to
    /// complete. KVM sets the register that the instruction reads, and moves RIP past the instruction, only when
    /// the vCPU runs again (KVM API, section 5: "the corresponding operations are complete (and guest state is
    /// consistent) only after userspace has re-entered the kernel with `KVM_RUN`"). Until then RIP does not show
    /// where the guest continues, and the text there must not change, because KVM may decode it again.
    #[inline]
    #[must_use]
    pub fn owes_io(&self) -> bool {
        self.owes_io
    }

    /// Makes the next [`CpuFd::run`] complete the [access](CpuFd::owes_io) and return before the guest runs. It may
    /// return with another access, the next piece of a string instruction.
    pub fn run_no_further(&mut self) {
        self.fd.set_kvm_immediate_exit(1);
    }

    /// Makes KVM complete the port access of the last exit without running the guest, so that RIP is after the
    /// instruction on every host.
    pub fn complete_io(&mut self) {
        self.fd.set_kvm_immediate_exit(1);
        self.ioctls.run += 1;
        // With `immediate_exit` set, `KVM_RUN` returns EINTR before it enters the guest.
        let _ = self.fd.run();
        self.owes_io = false;
        self.fd.set_kvm_immediate_exit(0);
    }

    /// Marks the guest as having been paused, so that its watchdogs restart when it continues
    /// (`pvclock_touch_watchdogs` in arch/x86/kernel/pvclock.c). Has no effect on a guest without kvmclock.
    pub fn mark_paused(&mut self) {
        self.ioctls.other += 1;
        match self.fd.kvmclock_ctrl() {
            Ok(()) => {}
            Err(error) if error.errno() == libc::EINVAL => {}
            Err(error) => warn!(%error, "the guest may take a pause for a lockup"),
        }
    }

    /// Returns the guest's TSC and the address at which KVM publishes its clock; `None` if KVM refuses. One ioctl.
    pub fn counters(&mut self) -> Option<Counters> {
        self.ioctls.other += 1;
        let entry = |index| kvm_msr_entry {
            index,
            ..Default::default()
        };
        let mut msrs = Msrs::from_entries(&[entry(MSR_TSC), entry(MSR_KVMCLOCK)]).ok()?;
        let read = self.fd.get_msrs(&mut msrs).ok()?;
        let value = |n: usize| (n < read).then(|| msrs.as_slice()[n].data);
        Some(Counters {
            tsc: value(0)?,
            kvmclock: value(1).unwrap_or(0),
        })
    }
}

/// Passes a write of the guest to the device that answers at `at`.
fn written(devices: &Devices, space: Space, at: u64, data: &[u8]) -> Exit {
    match devices.write(space, at, data) {
        Some(event) => Exit::Device(event),
        None => Exit::Handled,
    }
}

/// Returns whether `at` is in the kernel half of the address space.
#[inline]
fn in_kernel_half(at: u64) -> bool {
    at >> 63 == 1
}

/// Asserts that [`Regs`] has the memory layout of `kvm_regs`.
const _: () = {
    assert!(size_of::<Regs>() == size_of::<kvm_regs>());
    assert!(align_of::<Regs>() == align_of::<kvm_regs>());
    macro_rules! same {
        ($($register:ident)*) => {
            $(assert!(offset_of!(Regs, $register) == offset_of!(kvm_regs, $register));)*
        };
    }
    same!(rax rbx rcx rdx rsi rdi rsp rbp r8 r9 r10 r11 r12 r13 r14 r15 rip rflags);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trail_keeps_the_last_sixteen() {
        let mut trail = Trail::default();
        for rip in 1..=300 {
            trail.note(rip);
        }
        assert!(trail.newest_first().eq((285..=300).rev()));
        trail.note(301);
        assert!(trail.newest_first().eq((286..=301).rev()));
    }
}
