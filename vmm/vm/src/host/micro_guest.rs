//! Micro-guests: bare 64-bit programs, each in its own VM, which show what the host's KVM does.
//!
//! Invariants: the first 4 GiB are mapped onto themselves, readable, writable and executable at every privilege
//! level; [`MicroGuest::RAM`] bytes of them are memory. There are no interrupt controllers, so `hlt` ends a
//! run, and an exception without a handler is a triple fault. A run always ends: a watchdog interrupts
//! `KVM_RUN` after the time limit.
//!
//! | from | what |
//! |---|---|
//! | 0x1000 | GDT |
//! | 0x1100 | TSS with the stack for exceptions taken at privilege level 3 |
//! | 0x2000 | IDT |
//! | 0x3000 | handlers written by [`MicroGuest::report_exception`] |
//! | 0x8ff0 | top of the stack at privilege level 0 |
//! | 0x9000 | page tables |
//! | 0x10000 and up | the program |

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use kvm_bindings::{CpuId, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::entry::{self, pte};
use crate::layout;
use crate::memory::{GuestRam, MIN_RAM, MemoryError};
use crate::vcpu::config;
use crate::vcpu::failure::{EMULATION, InternalError};
use crate::vm::CpuError;

/// Selector of the code segment at privilege level 3, for `iretq` and SYSRET.
pub(crate) const USER_CODE: u16 = 0x28 | 3;
/// Selector of the data segment at privilege level 3.
pub(crate) const USER_DATA: u16 = 0x20 | 3;

const TASK: u16 = 0x30;
const TSS: Gpa = Gpa(0x1100);
const TSS_SIZE: u16 = 104;
const IDT: Gpa = Gpa(0x2000);
const HANDLERS: Gpa = Gpa(0x3000);

/// Error of creating a micro-guest.
#[derive(Debug, thiserror::Error)]
pub enum MicroGuestError {
    /// The vCPU could not be set up.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The memory could not be set up.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The program does not fit the memory.
    #[error("the micro-guest's program does not fit its memory")]
    Program(#[from] OutOfRange),
    /// KVM refused a step of the setup.
    #[error("kvm failed to {what} of a micro-guest")]
    Kvm {
        /// The step.
        what: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
}

pub(crate) fn kvm_error(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> MicroGuestError {
    move |source| MicroGuestError::Kvm { what, source }
}

/// End of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The program wrote to a port.
    Out {
        /// The port.
        port: u16,
        /// The bytes written; more than one value for a string instruction.
        data: Vec<u8>,
    },
    /// `KVM_EXIT_DEBUG`.
    Debug {
        /// Exception number: 1 or 3.
        exception: u32,
        /// The address KVM reports.
        pc: u64,
        /// The debug status register KVM reports.
        dr6: u64,
    },
    /// KVM could not emulate an instruction.
    EmulationFailed {
        /// The instruction's first bytes, if KVM reports them.
        bytes: Vec<u8>,
    },
    /// An interrupt could be delivered; reported only on request.
    InterruptWindow,
    /// The program executed `hlt`.
    Halted,
    /// An exception had no handler.
    TripleFault,
    /// The program ran longer than the time limit.
    TimedOut,
    /// Anything else, as KVM describes it.
    Other(String),
}

/// A VM with one vCPU that is about to execute a program.
#[derive(Debug)]
pub(crate) struct MicroGuest {
    pub(crate) vcpu: VcpuFd,
    pub(crate) ram: GuestRam,
}

impl MicroGuest {
    /// Size of the memory in bytes.
    pub(crate) const RAM: u64 = MIN_RAM;

    /// Creates a guest that is about to execute `code` at privilege level 0, with interrupts off. `code` is placed
    /// at `code_at`.
    ///
    /// # Errors
    /// When KVM is missing or refuses a step, or the code does not fit.
    pub(crate) fn new(code_at: Gpa, code: &[u8]) -> Result<Self, MicroGuestError> {
        let kvm = Kvm::new().map_err(kvm_error("open /dev/kvm"))?;
        let vm = kvm
            .create_vm()
            .map_err(kvm_error("create the virtual machine"))?;
        let ram = GuestRam::new(Self::RAM)?;
        ram.register(&vm)?;
        ram.write(code_at, code)?;
        write_tables(&ram)?;

        let vcpu = vm.create_vcpu(0).map_err(kvm_error("create the vCPU"))?;
        let cpuid: CpuId = config::cpuid(&kvm, 0, 1)?;
        vcpu.set_cpuid2(&cpuid).map_err(kvm_error("set CPUID"))?;
        config::set_entry(&vcpu, code_at, Gpa(0))?;
        let mut sregs = vcpu
            .get_sregs()
            .map_err(kvm_error("read the system registers"))?;
        sregs.gdt.limit = GDT_BYTES - 1;
        sregs.idt.base = IDT.0;
        sregs.idt.limit = 0xfff;
        sregs.tr = kvm_segment {
            base: TSS.0,
            limit: (TSS_SIZE - 1).into(),
            selector: TASK,
            // A busy 64-bit TSS.
            type_: 0xb,
            present: 1,
            ..Default::default()
        };
        vcpu.set_sregs(&sregs)
            .map_err(kvm_error("set the system registers"))?;
        Ok(Self { vcpu, ram })
    }

    /// Sets the handler of exceptions of `vector` to `handler`, at privilege level 0.
    ///
    /// # Errors
    /// When the IDT is not in RAM, which does not happen.
    pub(crate) fn set_handler(&self, vector: u8, handler: Gpa) -> Result<(), MicroGuestError> {
        self.set_handler_in(IDT, vector, handler)
    }

    /// Like [`MicroGuest::set_handler`], but for the IDT at `idt`.
    ///
    /// # Errors
    /// When the table is not in RAM.
    pub(crate) fn set_handler_in(
        &self,
        idt: Gpa,
        vector: u8,
        handler: Gpa,
    ) -> Result<(), MicroGuestError> {
        // An interrupt gate that privilege level 3 may also use (SDM vol. 3, 6.14.1).
        const GATE: u64 = 0xee << 40;
        let low = handler.0 & 0xffff
            | u64::from(entry::CODE) << 16
            | GATE
            | (handler.0 >> 16 & 0xffff) << 48;
        let at = idt.wrapping_add(u64::from(vector) * 16);
        let gate = [low, handler.0 >> 32].map(u64::to_le_bytes);
        Ok(self.ram.write(at, gate.as_flattened())?)
    }

    /// Sets a handler of exceptions of `vector` that writes to `port` and then halts. When the run ends, RSP points
    /// at the exception frame.
    ///
    /// # Errors
    /// When the handler or the IDT is not in RAM, which does not happen.
    pub(crate) fn report_exception(&self, vector: u8, port: u8) -> Result<(), MicroGuestError> {
        let handler = HANDLERS.wrapping_add(u64::from(vector) * 16);
        // out port, al ; hlt
        self.ram.write(handler, &[0xe6, port, 0xf4])?;
        self.set_handler(vector, handler)
    }

    /// Sets model-specific registers, given as pairs of number and value.
    ///
    /// # Errors
    /// When KVM refuses one of them.
    pub(crate) fn set_msrs(&self, values: &[(u32, u64)]) -> Result<(), MicroGuestError> {
        Ok(config::write_msrs(&self.vcpu, values)?)
    }

    /// Runs the guest until it exits or `limit` has passed.
    pub(crate) fn run(&mut self, limit: Duration) -> Stop {
        Self::run_vcpu(&mut self.vcpu, limit)
    }

    /// Like [`MicroGuest::run`], for a vCPU that was moved out of its `MicroGuest`.
    pub(crate) fn run_vcpu(vcpu: &mut VcpuFd, limit: Duration) -> Stop {
        install_wake_signal();
        let expired = AtomicBool::new(false);
        let (done, waiting) = mpsc::channel();
        // SAFETY: `pthread_self` has no preconditions.
        let runner = Runner(unsafe { libc::pthread_self() });
        thread::scope(|scope| {
            let expired = &expired;
            scope.spawn(move || watch(&waiting, limit, &runner, expired));
            let stop = loop {
                match vcpu.run() {
                    Ok(VcpuExit::InternalError) => break internal_error(vcpu),
                    Ok(exit) => break stop(exit),
                    Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                        if expired.load(Ordering::Relaxed) {
                            break Stop::TimedOut;
                        }
                    }
                    Err(error) => break Stop::Other(error.to_string()),
                }
            };
            drop::<Sender<()>>(done);
            stop
        })
    }
}

fn internal_error(vcpu: &mut VcpuFd) -> Stop {
    let failure = InternalError::of(vcpu);
    if failure.suberror != EMULATION {
        return Stop::Other(format!("internal error {}", failure.suberror));
    }
    let bytes = failure.bytes.map(|(code, len)| code[..len.into()].to_vec());
    Stop::EmulationFailed {
        bytes: bytes.unwrap_or_default(),
    }
}

fn stop(exit: VcpuExit<'_>) -> Stop {
    match exit {
        VcpuExit::IoOut(port, data) => Stop::Out {
            port,
            data: data.to_vec(),
        },
        VcpuExit::Debug(debug) => Stop::Debug {
            exception: debug.exception,
            pc: debug.pc,
            dr6: debug.dr6,
        },
        VcpuExit::IrqWindowOpen => Stop::InterruptWindow,
        VcpuExit::Hlt => Stop::Halted,
        VcpuExit::Shutdown => Stop::TripleFault,
        other => Stop::Other(format!("{other:?}")),
    }
}

/// The thread in `KVM_RUN`.
struct Runner(libc::pthread_t);

/// Waits until the run is over. Once `limit` has passed, sets `expired` and signals the runner again and again.
fn watch(over: &Receiver<()>, limit: Duration, runner: &Runner, expired: &AtomicBool) {
    /// Interval of the signals. They are repeated because a signal that arrives just before `KVM_RUN` has no
    /// effect.
    const AGAIN: Duration = Duration::from_millis(10);
    let mut wait = limit;
    while over.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        expired.store(true, Ordering::Relaxed);
        // SAFETY: the runner joins this thread before it leaves `run_vcpu`, so the runner is alive. The signal has
        // a handler.
        unsafe { libc::pthread_kill(runner.0, wake_signal()) };
        wait = AGAIN;
    }
}

/// Returns the signal that interrupts `KVM_RUN`. It differs from the signal that kicks vCPUs of machines, whose
/// handler does more.
fn wake_signal() -> libc::c_int {
    SIGRTMIN() + 1
}

fn install_wake_signal() {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(error) = register_signal_handler(wake_signal(), nothing) {
            tracing::error!(%error, "micro-guests cannot be timed out");
        }
    });
}

/// The entry GDT with four more descriptors: data and code of privilege level 3, then the TSS in two halves.
const GDT: [u64; 8] = [
    0,
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x00cf_f300_0000_ffff,
    0x00af_fb00_0000_ffff,
    0x0000_8900_0000_0000 | TSS.0 << 16 | (TSS_SIZE as u64 - 1),
    0,
];
const GDT_BYTES: u16 = 8 * 8;

fn write_tables(ram: &GuestRam) -> Result<(), OutOfRange> {
    ram.write(layout::GDT, GDT.map(u64::to_le_bytes).as_flattened())?;
    // RSP0 is the only field in use (SDM vol. 3, 7.7).
    ram.write(TSS.wrapping_add(4), &layout::STACK.0.to_le_bytes())?;
    entry::write_page_tables(ram, pte::USER)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: Gpa = Gpa(0x1_0000);
    const LIMIT: Duration = Duration::from_secs(10);

    /// Creates a guest with the program `code`; `None` on hosts without KVM.
    fn guest(code: &[u8]) -> Option<MicroGuest> {
        match MicroGuest::new(CODE, code) {
            Ok(guest) => Some(guest),
            Err(MicroGuestError::Kvm { what, source }) if what.contains("/dev/kvm") => {
                println!("skipped: cannot {what}: {source}");
                None
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    #[test]
    fn a_program_writes_to_a_port_and_halts() {
        // mov al, 7 ; out 0x10, al ; hlt
        let Some(mut guest) = guest(&[0xb0, 7, 0xe6, 0x10, 0xf4]) else {
            return;
        };
        let out = Stop::Out {
            port: 0x10,
            data: vec![7],
        };
        assert_eq!(guest.run(LIMIT), out);
        assert_eq!(guest.run(LIMIT), Stop::Halted);
    }

    #[test]
    fn an_endless_loop_is_taken_out() {
        // jmp to itself
        let Some(mut guest) = guest(&[0xeb, 0xfe]) else {
            return;
        };
        assert_eq!(guest.run(Duration::from_millis(50)), Stop::TimedOut);
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, CODE.0);
    }

    #[test]
    fn an_exception_without_a_handler_is_a_triple_fault() {
        // ud2
        let Some(mut guest) = guest(&[0x0f, 0x0b]) else {
            return;
        };
        assert_eq!(guest.run(LIMIT), Stop::TripleFault);
    }

    #[test]
    fn an_exception_with_a_handler_is_reported_with_its_frame() {
        // nop ; ud2
        let Some(mut guest) = guest(&[0x90, 0x0f, 0x0b]) else {
            return;
        };
        guest.report_exception(6, 0x46).unwrap();
        assert!(matches!(guest.run(LIMIT), Stop::Out { port: 0x46, .. }));
        let rsp = guest.vcpu.get_regs().unwrap().rsp;
        assert_eq!(guest.ram.read_u64(Gpa(rsp)).unwrap(), CODE.0 + 1);
    }

    #[test]
    fn memory_outlives_its_owner_no_longer_than_kvm_knows_it() {
        // jmp to itself
        let Some(mut guest) = guest(&[0xeb, 0xfe]) else {
            return;
        };
        guest.run(Duration::from_millis(1));
        let MicroGuest { vcpu, ram, .. } = guest;
        let mut vcpu = vcpu;
        drop(ram);
        // The vCPU cannot fetch its code any more. Any exit is right, as long as this process does not crash.
        vcpu.set_kvm_immediate_exit(1);
        assert!(vcpu.run().is_err());
    }
}
