//! Check of the exception window: whether a fault in a displaced instruction can be delivered as a fault of the
//! original.
//!
//! While a copy of an instruction runs, IDTR points at an interrupt descriptor table of ours (the *exception
//! window*), whose handlers are `out` instructions. So a fault exits, and the host can correct the exception frame
//! on the guest's stack before the guest's own handler sees it. The program below raises one exception of each kind
//! in the window. The exits are handled by the same calls as in machines ([`CpuFd`]), and everything that the guest
//! could notice is checked.
//!
//! | from | what |
//! |---|---|
//! | 0x10000 | program |
//! | 0x20000 | the window's IDT |
//! | 0x21000 | its handlers, [`STRIDE`] bytes each |

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gpa, Regs};
use kvm_bindings::{Msrs, kvm_dtable, kvm_msr_entry, kvm_sregs};

use super::guests::{END, LIMIT, Seen, words};
use super::micro_guest::{MicroGuest, MicroGuestError, Stop, kvm_error};
use crate::catch_mode::CatchMode;
use crate::memory::GuestRam;
use crate::vcpu::fd::CpuFd;

const CODE: u64 = 0x1_0000;
/// The guest's own handler for exceptions with an error code.
const WITH_ERROR_CODE: u64 = CODE + 0x10;
/// The guest's own handler for exceptions without an error code.
const WITHOUT: u64 = CODE + 0x20;
/// Address at which the guest continues after its handler.
const RESUME: u64 = CODE + 0x30;
/// Address of the instruction under test.
const COPY: u64 = CODE + 0x40;

/// The window's IDT.
const WINDOW: u64 = 0x2_0000;
/// The window's handlers.
const STUBS: u64 = 0x2_1000;
/// Distance between handlers, in bytes. It is more than the length of an `out`, so RIP after the `out` of one
/// handler differs from the address of the next handler.
const STRIDE: u64 = 4;
/// The port that the window's handlers write to.
const PORT: u8 = 0x90;

/// Values of the base registers. All differ, and no other register has them, so a mix-up shows.
const FS_BASE: u64 = 0x1234_5000;
const GS_BASE: u64 = 0xffff_8880_1234_5000;
const OTHER_GS_BASE: u64 = 0x7fff_1234_5000;
/// IA32_KERNEL_GS_BASE (SDM vol. 4, table 2-2).
const MSR_KERNEL_GS_BASE: u32 = 0xc000_0102;

/// An instruction that raises an exception when RBX is `operand`.
struct Case {
    name: &'static str,
    code: &'static [u8],
    operand: u64,
    vector: u8,
    error_code: Option<u64>,
}

const CASES: [Case; 5] = [
    Case {
        name: "#PF",
        code: &[0x48, 0x8b, 0x03], // mov rax, [rbx]
        operand: 1 << 32,
        vector: 14,
        error_code: Some(0),
    },
    Case {
        name: "#PF of a write",
        code: &[0x48, 0x89, 0x03], // mov [rbx], rax
        operand: (1 << 32) + 0x123,
        vector: 14,
        error_code: Some(2),
    },
    Case {
        name: "#GP",
        code: &[0x48, 0x8b, 0x03], // mov rax, [rbx]
        operand: 1 << 63,
        vector: 13,
        error_code: Some(0),
    },
    Case {
        name: "#DE",
        code: &[0x48, 0xf7, 0xf3], // div rbx
        operand: 0,
        vector: 0,
        error_code: None,
    },
    Case {
        name: "#UD",
        code: &[0x0f, 0x0b], // ud2
        operand: 0,
        vector: 6,
        error_code: None,
    },
];

/// Checks that the exceptions of all [`CASES`] are caught in the window and can be delivered to the guest, and that
/// an int3 still arrives as in `mode`.
pub(super) fn exceptions(mode: CatchMode) -> Seen<()> {
    let mut guest = match Guest::new(mode)? {
        Ok(guest) => guest,
        Err(seen) => return Ok(Err(seen)),
    };
    for case in &CASES {
        if let Err(seen) = guest.fault(case)? {
            return Ok(Err(format!("{}: {seen}", case.name)));
        }
    }
    if let Err(seen) = guest.int3(mode)? {
        return Ok(Err(format!("int3: {seen}")));
    }
    guest.other_gs_base()
}

/// Checks that interrupts can be held off for one instruction, as after `sti`.
pub(super) fn interrupt_shadow(mode: CatchMode) -> Seen<()> {
    let mut guest = match Guest::new(mode)? {
        Ok(guest) => guest,
        Err(seen) => return Ok(Err(seen)),
    };
    guest.ram.write(Gpa(COPY), &[0x90, 0x90, 0x90, 0xf4])?;
    // KVM exits as soon as an interrupt could be delivered.
    guest.cpu.fd_mut().get_kvm_run().request_interrupt_window = 1;
    for (hold_off, expected) in [(false, COPY), (true, COPY + 1)] {
        let mut regs = guest.cpu.regs();
        regs.rip = COPY;
        regs.rflags = rflags::FIXED | rflags::IF;
        guest.cpu.set_regs(&regs);
        if hold_off {
            guest
                .cpu
                .hold_off_interrupts_once()
                .map_err(kvm_error("set the interrupt shadow"))?;
        }
        let stop = guest.run();
        let rip = guest.cpu.regs().rip;
        if stop != Stop::InterruptWindow || rip != expected {
            let seen = words(&stop, rip);
            return Ok(Err(if hold_off {
                seen
            } else {
                format!("it cannot be seen here: {seen}")
            }));
        }
    }
    Ok(Ok(()))
}

struct Guest {
    cpu: CpuFd,
    ram: GuestRam,
    /// The system registers, which must not change.
    sregs: kvm_sregs,
}

impl Guest {
    /// Creates a guest, and runs it to its first exit outside the window.
    fn new(mode: CatchMode) -> Seen<Self> {
        let mut code = [0xf4; 0x40];
        code[..2].copy_from_slice(&[0xe6, END]); // out END, al
        code[0x10..0x18].copy_from_slice(&[
            0x5b, // pop rbx
            0x48, 0x8b, 0x0c, 0x24, // mov rcx, [rsp]
            0x48, 0xcf, // iretq
            0xf4,
        ]);
        code[0x20..0x27].copy_from_slice(&[
            0x48, 0x8b, 0x0c, 0x24, // mov rcx, [rsp]
            0x48, 0xcf, // iretq
            0xf4,
        ]);
        code[0x30..0x34].copy_from_slice(&[
            0x9c, // pushfq
            0x5a, // pop rdx
            0xe6, END, // out END, al
        ]);
        let micro = MicroGuest::new(Gpa(CODE), &code)?;
        for vector in 0..32 {
            // In the guest's own table, only the exceptions of the cases have handlers. Any other ends the run.
            if let Some(case) = CASES.iter().find(|case| case.vector == vector) {
                micro.set_handler(vector, Gpa(own_handler(case)))?;
            }
            let stub = STUBS + u64::from(vector) * STRIDE;
            micro.ram.write(Gpa(stub), &[0xe6, PORT, 0xf4])?;
            micro.set_handler_in(Gpa(WINDOW), vector, Gpa(stub))?;
        }
        let sregs = micro.vcpu.get_sregs();
        let mut sregs = sregs.map_err(kvm_error("read the system registers"))?;
        sregs.fs.base = FS_BASE;
        sregs.gs.base = GS_BASE;
        micro
            .vcpu
            .set_sregs(&sregs)
            .map_err(kvm_error("set the system registers"))?;
        micro.set_msrs(&[(MSR_KERNEL_GS_BASE, OTHER_GS_BASE)])?;
        let MicroGuest { vcpu, ram, .. } = micro;
        let cpu = CpuFd::new(vcpu, mode).map_err(kvm_error("prepare the vCPU"))?;
        let mut guest = Self { cpu, ram, sregs };
        let stop = guest.run();
        guest.sregs = *guest.cpu.sregs();
        let rip = guest.cpu.regs().rip;
        Ok(match stop {
            Stop::Out { port, .. } if port == u16::from(END) => Ok(guest),
            other => Err(words(&other, rip)),
        })
    }

    fn run(&mut self) -> Stop {
        MicroGuest::run_vcpu(self.cpu.fd_mut(), LIMIT)
    }

    /// Runs `code` as a copy in the window, with RBX set to `operand`. Returns how the run ended, and the registers
    /// before it.
    fn run_in_window(
        &mut self,
        code: &[u8],
        operand: u64,
    ) -> Result<(Stop, Regs), MicroGuestError> {
        self.ram.write(Gpa(COPY), code)?;
        let regs = Regs {
            rbx: operand,
            rcx: 0,
            rdx: 0,
            rip: COPY,
            rflags: rflags::FIXED | rflags::CF,
            ..self.cpu.regs()
        };
        self.cpu.set_regs(&regs);
        self.cpu.set_idt_base(WINDOW);
        Ok((self.run(), regs))
    }

    fn fault(&mut self, case: &Case) -> Seen<()> {
        let (stop, given) = self.run_in_window(case.code, case.operand)?;
        let mut regs = self.cpu.regs();
        if !at_stub(&stop, &regs, case.vector) {
            return Ok(Err(words(&stop, regs.rip)));
        }
        let error_code = case.error_code;
        let frame_at = regs.rsp + if error_code.is_some() { 8 } else { 0 };
        let mut frame = [0; 5];
        for (n, word) in (0..).zip(&mut frame) {
            *word = self.ram.read_u64(Gpa(frame_at + n * 8))?;
        }
        let [rip, cs, flags, rsp, ss] = frame;
        let sregs = *self.cpu.sregs();
        let pushed = error_code
            .map(|_| self.ram.read_u64(Gpa(regs.rsp)))
            .transpose()?;
        if rip != COPY || flags & (rflags::IF | rflags::CF) != rflags::CF || rsp != given.rsp {
            return Ok(Err(format!("the frame is {frame:x?}")));
        }
        if cs != u64::from(sregs.cs.selector) || ss != u64::from(sregs.ss.selector) {
            return Ok(Err(format!("the frame has selectors {cs:#x} and {ss:#x}")));
        }
        if pushed != error_code {
            return Ok(Err(format!("the error code is {pushed:x?}")));
        }
        if case.vector == 14 && sregs.cr2 != case.operand {
            return Ok(Err(format!("CR2 is {:#x}", sregs.cr2)));
        }
        if let Err(seen) = self.undisturbed(WINDOW) {
            return Ok(Err(seen));
        }

        self.ram.write(Gpa(frame_at), &RESUME.to_le_bytes())?;
        self.ram
            .write(Gpa(frame_at + 16), &(flags | rflags::IF).to_le_bytes())?;
        regs.rip = own_handler(case);
        self.cpu.set_regs(&regs);
        self.cpu.set_idt_base(self.sregs.idt.base);
        let stop = self.run();
        let after = self.cpu.regs();
        if !ended(&stop) {
            return Ok(Err(words(&stop, after.rip)));
        }
        let seen_by_guest = (after.rcx, after.rdx & rflags::IF, after.rsp);
        if seen_by_guest != (RESUME, rflags::IF, given.rsp) {
            return Ok(Err(format!("the guest's handler saw {seen_by_guest:x?}")));
        }
        if error_code.is_some_and(|code| code != after.rbx) {
            return Ok(Err(format!(
                "the guest's handler got code {:#x}",
                after.rbx
            )));
        }
        Ok(self.undisturbed(self.sregs.idt.base))
    }

    /// Checks that an int3 after a copied instruction is caught as in `mode`.
    fn int3(&mut self, mode: CatchMode) -> Seen<()> {
        // nop ; int3
        let (stop, given) = self.run_in_window(&[0x90, 0xcc], 0)?;
        let mut regs = self.cpu.regs();
        let caught = match mode {
            CatchMode::DebugExit => {
                matches!(stop, Stop::Debug { exception: 3, .. }) && regs.rip == COPY + 1
            }
            CatchMode::EmulationExit => {
                matches!(&stop, Stop::EmulationFailed { bytes } if bytes.first() == Some(&0xcc))
                    && regs.rip == COPY + 1
            }
            CatchMode::IdtGate => {
                at_stub(&stop, &regs, 3) && self.ram.read_u64(Gpa(regs.rsp))? == COPY + 2
            }
        };
        if !caught {
            return Ok(Err(words(&stop, regs.rip)));
        }
        regs.rip = RESUME;
        regs.rsp = given.rsp;
        self.cpu.set_regs(&regs);
        self.cpu.set_idt_base(self.sregs.idt.base);
        let stop = self.run();
        if !ended(&stop) {
            return Ok(Err(words(&stop, self.cpu.regs().rip)));
        }
        Ok(self.undisturbed(self.sregs.idt.base))
    }

    /// Checks that the base of IDTR is `idt`, and that all other system registers except CR2 have not changed.
    fn undisturbed(&mut self, idt: u64) -> Result<(), String> {
        let now = *self.cpu.sregs();
        let expected = kvm_sregs {
            idt: kvm_dtable {
                base: idt,
                ..self.sregs.idt
            },
            cr2: now.cr2,
            ..self.sregs
        };
        if now == expected {
            return Ok(());
        }
        Err(format!(
            "system registers changed from {expected:x?} to {now:x?}"
        ))
    }

    /// Checks that the base that SWAPGS exchanges has not changed.
    fn other_gs_base(&mut self) -> Seen<()> {
        let wanted = kvm_msr_entry {
            index: MSR_KERNEL_GS_BASE,
            ..Default::default()
        };
        let value = Msrs::from_entries(&[wanted]).ok().and_then(|mut msrs| {
            let read = self.cpu.fd_mut().get_msrs(&mut msrs).ok()?;
            (read == 1).then(|| msrs.as_slice()[0].data)
        });
        Ok(if value == Some(OTHER_GS_BASE) {
            Ok(())
        } else {
            Err(format!("the user's GS base changed to {value:x?}"))
        })
    }
}

fn own_handler(case: &Case) -> u64 {
    if case.error_code.is_some() {
        WITH_ERROR_CODE
    } else {
        WITHOUT
    }
}

/// Returns whether the guest has exited in the window's handler of `vector`. Hosts differ in whether RIP has passed
/// the `out`.
fn at_stub(stop: &Stop, regs: &Regs, vector: u8) -> bool {
    let stub = STUBS + u64::from(vector) * STRIDE;
    matches!(stop, Stop::Out { port, .. } if *port == u16::from(PORT))
        && (regs.rip == stub || regs.rip == stub + 2)
}

fn ended(stop: &Stop) -> bool {
    matches!(stop, Stop::Out { port, .. } if *port == u16::from(END))
}
