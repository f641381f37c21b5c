//! The programs of the self-check, and what their exits mean.
//!
//! Each function creates one micro-guest, runs it and returns the observation: the expected outcome, or a
//! description of what happened instead. [`MicroGuestError`] means that the guest could not be created at all.

use std::time::Duration;

use hvprobe_arch::Gpa;
use kvm_bindings::{
    KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_USE_HW_BP, KVM_GUESTDBG_USE_SW_BP, kvm_guest_debug,
};

use super::micro_guest::{MicroGuest, MicroGuestError, Stop, USER_CODE, USER_DATA, kvm_error};
use crate::catch_mode::CatchMode;
use crate::entry;

/// RIP after a guest's `out` has exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutRip {
    /// At the `out`. KVM advances RIP at the next entry, unless RIP is changed.
    AtInstruction,
    /// After the `out`.
    AfterInstruction,
}

/// Observation: the expected outcome, or a description of what happened instead.
pub(super) type Seen<T> = Result<Result<T, String>, MicroGuestError>;

/// Time limit of a program. Every program takes far less, even on an emulated host.
pub(super) const LIMIT: Duration = Duration::from_secs(5);

const CODE: Gpa = Gpa(0x1_0000);

/// Port by which programs report their end.
pub(super) const END: u8 = 0x10;
/// Base of the ports that report exceptions; the vector is added.
const EXCEPTION: u8 = 0x40;

const DB: u8 = 1;
const BP: u8 = 3;

/// Exceptions that a broken SYSCALL may raise: #UD, #NP, #SS, #GP, #PF.
const FAULTS: [u8; 5] = [6, 11, 12, 13, 14];

/// Finds out how an int3 at privilege level 0 reaches user space.
pub(super) fn int3() -> Seen<CatchMode> {
    let code = [
        0x90, // nop
        0xcc, // int3
        0xe6, END,  // out END, al
        0xf4, // hlt
    ];
    let int3 = CODE.0 + 1;
    let mut guest = guest(&code)?;
    guest.report_exception(BP, EXCEPTION + BP)?;
    if let Err(refused) = debug(&guest, KVM_GUESTDBG_USE_SW_BP, [0; 8]) {
        return Ok(Err(refused));
    }
    let (stop, rip) = run(&mut guest)?;
    Ok(match stop {
        Stop::Debug { exception: 3, .. } if rip == int3 => Ok(CatchMode::DebugExit),
        Stop::EmulationFailed { ref bytes } if rip == int3 && bytes.first() == Some(&0xcc) => {
            Ok(CatchMode::EmulationExit)
        }
        Stop::Out { port, .. } if port == u16::from(EXCEPTION + BP) => Ok(CatchMode::IdtGate),
        other => Err(words(&other, rip)),
    })
}

/// Checks that a breakpoint in a debug register stops before its instruction.
pub(super) fn hw_breakpoint() -> Seen<()> {
    let code = [
        0x48, 0xff, 0xc0, // inc rax
        0x48, 0xff, 0xc0, // inc rax
        0xe6, END,  // out END, al
        0xf4, // hlt
    ];
    let at = CODE.0 + 3;
    let mut guest = guest(&code)?;
    guest.report_exception(DB, EXCEPTION + DB)?;
    // DR0 holds the address; DR7 enables it globally, for execution (SDM vol. 3, 18.2.4).
    let mut registers = [0; 8];
    registers[0] = at;
    registers[7] = 0x602;
    if let Err(refused) = debug(&guest, KVM_GUESTDBG_USE_HW_BP, registers) {
        return Ok(Err(refused));
    }
    let (stop, rip) = run(&mut guest)?;
    Ok(match stop {
        Stop::Debug { exception: 1, .. } if rip == at => Ok(()),
        other => Err(words(&other, rip)),
    })
}

/// Checks that `out` exits, and finds out the RIP of the exit.
pub(super) fn out() -> Seen<OutRip> {
    let code = [
        0xb0, 0x5a, // mov al, 0x5a
        0xe6, END,  // out END, al
        0xf4, // hlt
    ];
    let mut guest = guest(&code)?;
    let (stop, rip) = run(&mut guest)?;
    Ok(match stop {
        Stop::Out { port, ref data } if port == u16::from(END) && data == &[0x5a] => {
            match rip.checked_sub(CODE.0) {
                Some(2) => Ok(OutRip::AtInstruction),
                Some(4) => Ok(OutRip::AfterInstruction),
                _ => Err(format!("RIP {rip:#x} is neither at nor after it")),
            }
        }
        other => Err(words(&other, rip)),
    })
}

/// Checks that SYSCALL at privilege level 3 continues at the address in LSTAR, at privilege level 0.
pub(super) fn syscall() -> Seen<()> {
    const STACK: u32 = 0x1_f000;
    const USER: u8 = 0x20;
    const KERNEL: u8 = 0x30;
    let stack = STACK.to_le_bytes();
    let user = (CODE.0 + u64::from(USER)).to_le_bytes();
    let mut code = [0xf4; 0x40];
    code[..0x11].copy_from_slice(&[
        0x6a,
        USER_DATA.to_le_bytes()[0], // push USER_DATA
        0x68,
        stack[0],
        stack[1],
        stack[2],
        stack[3], // push STACK
        0x6a,
        0x02, // push 2 (RFLAGS)
        0x6a,
        USER_CODE.to_le_bytes()[0], // push USER_CODE
        0x68,
        user[0],
        user[1],
        user[2],
        user[3], // push CODE + USER
        0x48,
    ]);
    code[0x11] = 0xcf; // iretq, with the 0x48 above
    code[usize::from(USER)..][..4].copy_from_slice(&[
        0x0f, 0x05, // syscall
        0x0f, 0x0b, // ud2
    ]);
    code[usize::from(KERNEL)..][..5].copy_from_slice(&[
        0x8c, 0xc8, // mov eax, cs
        0xe6, END,  // out END, al
        0xf4, // hlt
    ]);
    let mut guest = guest(&code)?;
    for vector in FAULTS {
        guest.report_exception(vector, EXCEPTION + vector)?;
    }
    const EFER: u32 = 0xc000_0080;
    const STAR: u32 = 0xc000_0081;
    const LSTAR: u32 = 0xc000_0082;
    const FMASK: u32 = 0xc000_0084;
    // Enables long mode and SYSCALL.
    const EFER_ENABLED: u64 = 1 << 10 | 1 << 8 | 1;
    // Bases of the selectors that SYSCALL and SYSRET load (SDM vol. 2, SYSCALL).
    let star = u64::from(entry::CODE) << 32 | u64::from(entry::DATA | 3) << 48;
    guest.set_msrs(&[
        (EFER, EFER_ENABLED),
        (STAR, star),
        (LSTAR, CODE.0 + u64::from(KERNEL)),
        (FMASK, 0x200),
    ])?;
    let (stop, rip) = run(&mut guest)?;
    Ok(match stop {
        Stop::Out { port, ref data }
            if port == u16::from(END) && data == &entry::CODE.to_le_bytes()[..1] =>
        {
            Ok(())
        }
        Stop::Out { port, ref data } if port == u16::from(END) && !data.is_empty() => Err(format!(
            "it arrives still at privilege level {}",
            data[0] & 3
        )),
        other => Err(words(&other, rip)),
    })
}

fn guest(code: &[u8]) -> Result<MicroGuest, MicroGuestError> {
    MicroGuest::new(CODE, code)
}

fn debug(guest: &MicroGuest, flags: u32, registers: [u64; 8]) -> Result<(), String> {
    let mut debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | flags,
        ..Default::default()
    };
    debug.arch.debugreg = registers;
    guest
        .vcpu
        .set_guest_debug(&debug)
        .map_err(|error| format!("KVM refuses it: {error}"))
}

/// Runs `guest`. Returns how the run ended, and RIP.
fn run(guest: &mut MicroGuest) -> Result<(Stop, u64), MicroGuestError> {
    let stop = guest.run(LIMIT);
    let regs = guest.vcpu.get_regs();
    Ok((stop, regs.map_err(kvm_error("read the registers"))?.rip))
}

/// Describes an unexpected end of a run, with RIP.
pub(super) fn words(stop: &Stop, rip: u64) -> String {
    let what = match stop {
        Stop::Out { port, .. } if *port == u16::from(END) => "nothing happened".to_owned(),
        Stop::Out { port, .. } => match port.checked_sub(EXCEPTION.into()) {
            Some(1) => "the guest got #DB".to_owned(),
            Some(3) => "the guest got #BP".to_owned(),
            Some(6) => "the guest got #UD".to_owned(),
            Some(13) => "the guest got #GP".to_owned(),
            Some(14) => "the guest got #PF".to_owned(),
            _ => format!("the guest wrote to port {port:#x}"),
        },
        Stop::Debug { exception, .. } => format!("debug exit with exception {exception}"),
        Stop::EmulationFailed { bytes } => format!("KVM could not emulate {bytes:02x?}"),
        Stop::InterruptWindow => "an interrupt could be delivered".to_owned(),
        Stop::Halted => "the guest halted".to_owned(),
        Stop::TripleFault => "the guest triple-faulted".to_owned(),
        Stop::TimedOut => "the guest hung".to_owned(),
        Stop::Other(other) => format!("KVM stopped: {other}"),
    };
    format!("{what} (RIP {rip:#x})")
}
