//! One virtual CPU's file descriptor, with every ioctl counted.
//!
//! General registers travel in the shared `kvm_run` page (`KVM_CAP_SYNC_REGS`, KVM API 8.x
//! "sync_regs"), so reading them after an exit and changing them before the next entry cost no ioctl;
//! so do system registers, and exceptions, interrupts and NMIs on their way, but only while they are
//! wanted at each exit. Invariants: what is not in the
//! page is fetched before anybody sees it; a register change is either marked dirty in that page or written by
//! `KVM_SET_REGS`, never both.

use std::cell::Cell;
use std::mem::offset_of;

use hvprobe_arch::Regs;
use hvprobe_arch::trap::{DOORBELL_PORT, GATE_PORT, ROOM_PORT};
use hvprobe_devices::{DeviceEvent, Ports};
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
/// Interrupts are held off for one instruction because of `sti`.
const SHADOW_INT_STI: u8 = KVM_X86_SHADOW_INT_STI.to_le_bytes()[0];

/// Type of an available 64-bit TSS (SDM vol. 3, table 3-2).
const TSS_AVAILABLE: u8 = 9;
const GATE: u16 = GATE_PORT as u16;
const DOORBELL: u16 = DOORBELL_PORT as u16;
const ROOM: u16 = ROOM_PORT as u16;

/// How often the kernel was called for one virtual CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ioctls {
    /// `KVM_RUN`.
    pub run: u64,
    /// Every other.
    pub other: u64,
}

/// What a virtual CPU's own ioctls tell of its clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The guest's TSC.
    pub tsc: u64,
    /// `MSR_KVM_SYSTEM_TIME_NEW`: where KVM tells the guest of its clock.
    pub kvmclock: u64,
}

/// Why the guest stopped, as far as the loop cares.
#[derive(Debug)]
pub enum Exit {
    /// A device was accessed, or nothing needs doing; go on.
    Handled,
    /// A device ended the machine.
    Device(DeviceEvent),
    /// A byte was written to the port of our patches; RIP tells whether by one of them.
    Gate,
    /// A byte was written to the port that detours write to when the ring fills up.
    Doorbell,
    /// A byte was written to the port that detours ask for room at.
    Room,
    /// `KVM_EXIT_DEBUG` with this exception number.
    Debug {
        /// Its number.
        exception: u32,
    },
    /// KVM could not go on; for a failed emulation the bytes at RIP.
    InternalError {
        /// KVM's reason.
        suberror: u32,
        /// The bytes, and how many of them are valid.
        bytes: Option<([u8; 15], u8)>,
    },
    /// A triple fault.
    Shutdown,
    /// The entry failed, with the processor's reason.
    FailEntry(u64),
    /// A signal.
    Interrupted,
    /// Nothing we know.
    Unknown(String),
}

/// Where the guest went on, the last times: all that is left of it where KVM resets the processor
/// after a triple fault.
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

/// A virtual CPU of KVM.
#[derive(Debug)]
pub struct CpuFd {
    fd: VcpuFd,
    mode: CatchMode,
    ioctls: Ioctls,
    /// Whether KVM puts the system registers into the page at each exit.
    shares_sregs: bool,
    /// Whether the page has those of the last exit.
    knows_sregs: bool,
    /// Likewise for what is on its way to the guest.
    shares_events: bool,
    knows_events: bool,
    trail: Trail,
}

impl CpuFd {
    /// Takes over a configured virtual CPU whose int3s are to be caught in `mode`.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn new(mut fd: VcpuFd, mode: CatchMode) -> Result<Self, kvm_ioctls::Error> {
        fd.set_sync_valid_reg(SyncReg::Register);
        fd.set_sync_valid_reg(SyncReg::SystemRegister);
        let debug = match mode {
            // On `emulation-exit` hosts the request changes nothing, but tells KVM what we do.
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
            trail: Trail::default(),
        };
        cpu.set_debug(debug)?;
        Ok(cpu)
    }

    /// The descriptor itself, for what is not counted.
    #[inline]
    pub fn fd_mut(&mut self) -> &mut VcpuFd {
        &mut self.fd
    }

    /// How often the kernel was called so far.
    #[inline]
    #[must_use]
    pub fn ioctls(&self) -> Ioctls {
        self.ioctls
    }

    /// Runs the guest until it exits. Accesses to devices are carried out here.
    #[inline]
    pub fn run(&mut self, devices: &Ports) -> Exit {
        self.ioctls.run += 1;
        self.knows_sregs = self.shares_sregs;
        self.knows_events = self.shares_events;
        self.trail.note(self.fd.sync_regs_mut().regs.rip);
        match self.fd.run() {
            Ok(VcpuExit::IoOut(GATE, [_])) => Exit::Gate,
            Ok(VcpuExit::IoOut(DOORBELL, [_])) => Exit::Doorbell,
            Ok(VcpuExit::IoOut(ROOM, [_])) => Exit::Room,
            Ok(VcpuExit::IoOut(port, data)) => match devices.write(port, data) {
                Some(event) => Exit::Device(event),
                None => Exit::Handled,
            },
            Ok(VcpuExit::IoIn(port, data)) => {
                devices.read(port, data);
                Exit::Handled
            }
            // No device has memory of its own; the bus answers with all ones.
            Ok(VcpuExit::MmioRead(_, data)) => {
                data.fill(0xff);
                Exit::Handled
            }
            Ok(VcpuExit::MmioWrite(..) | VcpuExit::Intr | VcpuExit::IrqWindowOpen) => Exit::Handled,
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

    /// Where the guest went on, the last times it was entered, newest first.
    pub fn trail(&self) -> impl Iterator<Item = u64> {
        self.trail.newest_first()
    }

    /// The general registers at the last exit.
    #[inline]
    pub fn regs(&mut self) -> Regs {
        *self.regs_mut()
    }

    /// The general registers at the last exit, where the guest gets them from at its next entry once
    /// [`CpuFd::give_regs`] says so.
    #[inline]
    pub fn regs_mut(&mut self) -> &mut Regs {
        let regs: *mut kvm_regs = &raw mut self.fd.sync_regs_mut().regs;
        // SAFETY: both are eighteen integers of 64 bits in the same order, as is asserted below, and
        // the borrow is that of the page.
        unsafe { &mut *regs.cast() }
    }

    /// Whether KVM is to put the system registers into the page at each exit from now on. It costs
    /// each exit: KVM collects eight segments, on VMX by four reads of the VMCS each (`__get_sregs` in
    /// arch/x86/kvm/x86.c). Without, [`CpuFd::sregs`] takes an ioctl.
    #[inline]
    pub fn share_sregs(&mut self, share: bool) {
        self.shares_sregs = share;
        if share {
            self.fd.set_sync_valid_reg(SyncReg::SystemRegister);
        } else {
            self.fd.clear_sync_valid_reg(SyncReg::SystemRegister);
        }
    }

    /// Whether [`CpuFd::sregs`] takes no ioctl now.
    #[inline]
    pub fn knows_sregs(&self) -> bool {
        self.knows_sregs
    }

    /// The system registers at the last exit.
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

    /// Calls `act` with what tells CR3 at the last exit: an ioctl, unless the page has it.
    #[inline]
    pub fn telling_cr3<T>(&mut self, act: impl FnOnce(&dyn Fn() -> Option<u64>) -> T) -> T {
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

    /// Whether the last exit was from kernel mode.
    #[inline]
    pub fn in_kernel(&mut self) -> bool {
        if self.knows_sregs {
            // CPL is the DPL of SS (SDM vol. 3, 5.5).
            self.sregs().ss.dpl == 0
        } else {
            // The kernel's pages are closed to user mode, which could not have come to an int3 or
            // an `out` there (SDM vol. 3, 4.6.1).
            in_kernel_half(self.fd.sync_regs_mut().regs.rip)
        }
    }

    /// Gives the guest these registers at its next entry. No ioctl.
    #[inline]
    pub fn set_regs(&mut self, regs: &Regs) {
        *self.regs_mut() = *regs;
        self.give_regs();
    }

    /// Gives the guest at its next entry what [`CpuFd::regs_mut`] has been made. No ioctl.
    #[inline]
    pub fn give_regs(&mut self) {
        self.fd.set_sync_dirty_reg(SyncReg::Register);
    }

    /// Gives the guest these registers now, for ioctls that look at them.
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

    /// Whether KVM is to put what is on its way to the guest into the page at each exit from now on.
    /// Without, what changes it takes an ioctl.
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

    /// Changes what is on its way to the guest, as it was at the last exit, at the next entry. An NMI
    /// may have come meanwhile: what is pending is left alone.
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
        // After the registers, if these are given too (`sync_regs` in arch/x86/kvm/x86.c).
        self.fd.set_sync_dirty_reg(SyncReg::VcpuEvents);
        Ok(())
    }

    /// Has the guest take an NMI as soon as it can. A virtual CPU that the guest has not started takes
    /// none; and as long as one waits for it, `KVM_RUN` would return at once (`kvm_vcpu_has_events` in
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

    /// Points IDTR at another table from the next entry on; returns where the one of the last exit
    /// is. Its limit stays. No ioctl. All other system registers are as at the last exit.
    #[inline]
    pub fn set_idt_base(&mut self, base: u64) -> u64 {
        let own = std::mem::replace(&mut self.sregs_to_set().idt.base, base);
        self.fd.set_sync_dirty_reg(SyncReg::SystemRegister);
        own
    }

    /// The system registers of the last exit as they have to be for KVM to take them back unchanged.
    #[inline]
    fn sregs_to_set(&mut self) -> &mut kvm_sregs {
        self.sregs();
        let mode = self.mode;
        let sregs = &mut self.fd.sync_regs_mut().sregs;
        // KVM sets a bit here at an exit with an interrupt on its way, clears none in this page
        // (`__get_sregs` in arch/x86/kvm/x86.c since 5.14), and would raise that interrupt again.
        // It still knows of one that is on its way.
        sregs.interrupt_bitmap = [0; 4];
        // KVM reports every TSS as busy on SVM. QEMU, whose SVM is the one without exits for int3,
        // lets user mode access ports only under an available one, which is what `ltr` left in its
        // register (`helper_check_io` in target/i386/tcg).
        if mode == CatchMode::IdtGate {
            sregs.tr.type_ = TSS_AVAILABLE;
        }
        sregs
    }

    /// Holds maskable interrupts off until the next instruction is over, as `sti` does. Valid only
    /// with RFLAGS.IF set at the next entry, as a processor may refuse to enter otherwise (SDM vol.
    /// 3, 26.3.1.5).
    ///
    /// # Errors
    /// When KVM refuses.
    #[inline]
    pub fn hold_off_interrupts_once(&mut self) -> Result<(), kvm_ioctls::Error> {
        self.set_shadow(SHADOW_INT_STI)
    }

    /// Ends what [`CpuFd::hold_off_interrupts_once`] or the guest's own `sti` began.
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

    /// Lets KVM finish the port access of the last exit without running the guest, so that RIP is
    /// after the instruction on every host.
    pub fn complete_io(&mut self) {
        self.fd.set_kvm_immediate_exit(1);
        self.ioctls.run += 1;
        // With immediate_exit set, KVM_RUN returns EINTR before it enters the guest.
        let _ = self.fd.run();
        self.fd.set_kvm_immediate_exit(0);
    }

    /// Lets the guest know, when it goes on, that it stood still: its watchdogs begin anew then
    /// (`pvclock_touch_watchdogs` in arch/x86/kernel/pvclock.c). One without kvmclock cannot be told.
    pub fn tell_stopped(&mut self) {
        self.ioctls.other += 1;
        match self.fd.kvmclock_ctrl() {
            Ok(()) => {}
            Err(error) if error.errno() == libc::EINVAL => {}
            Err(error) => warn!(%error, "the guest may take a pause for a lockup"),
        }
    }

    /// The guest's time-stamp counter, and where KVM tells the guest of its clock. One ioctl.
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

/// Whether `at` is in the half of the addresses that is the kernel's.
#[inline]
fn in_kernel_half(at: u64) -> bool {
    at >> 63 == 1
}

/// That [`Regs`] lies in memory as `kvm_regs` does.
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
