//! Walks a stack.
//!
//! Invariants: a word is read only from the function's own stack, above its stack pointer, or from another stack to
//! which the tables lead. The number of stacks is limited. The first frame is where the walk begins, and the
//! callers follow, from the innermost on. Every caller is an address in kernel text.

use std::sync::Arc;

use hvprobe_arch::{Gva, Regs};

use super::modules::{ModuleTables, Search};
use super::orc::Orc;
use super::rule::{Base, Caller, Frame, Rbp, Register, Rule};
use super::surroundings::Surroundings;

/// Maximum number of changes to another stack. It is above the number of stacks that can be nested: that of a task,
/// that of interrupts, and one for each kind of exception that has its own (arch/x86/include/asm/cpu_entry_area.h).
const MOST_STACKS: usize = 8;
/// Length in bytes of the largest stacks: `THREAD_SIZE` and `IRQ_STACK_SIZE`
/// (arch/x86/include/asm/page_64_types.h).
const STACK: u64 = 16 << 10;
/// Lowest address of text of the kernel and its modules (`__START_KERNEL_map`).
const KERNEL_TEXT: u64 = 0xffff_ffff_8000_0000;
/// Lowest address of the kernel's half of the address space.
const KERNEL_HALF: u64 = 1 << 63;

/// Where to begin unwinding.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// The registers with which unwinding begins.
    pub regs: &'a Regs,
    /// Whether a call has returned to RIP. Otherwise, RIP is the next instruction of an interrupted function.
    pub returned: bool,
}

/// The current function's registers, as far as they are known.
struct State<'a> {
    ip: Gva,
    sp: Gva,
    bp: u64,
    /// Whether `ip` is the next instruction of an interrupted function. Otherwise, `ip` is a return address.
    interrupted: bool,
    others: Others<'a>,
    stacks: usize,
    modules: Search,
}

/// Where the current function's registers are, except for RIP, RSP and RBP.
#[derive(Clone, Copy)]
enum Others<'a> {
    Here(&'a Regs),
    /// In the `struct pt_regs` at this address.
    At(Gva),
    Unknown,
}

/// Unwinds stacks of a kernel.
#[derive(Clone, Debug)]
pub struct Unwinder {
    orc: Arc<Orc>,
    modules: Option<ModuleTables>,
}

impl Unwinder {
    /// Creates an unwinder from the unwind tables of the kernel and, if they are known, those of its modules.
    #[must_use]
    pub fn new(orc: Arc<Orc>, modules: Option<ModuleTables>) -> Self {
        Self { orc, modules }
    }

    /// Writes the addresses on the stack to `into`: first that at which the walk begins, then the return addresses,
    /// from the innermost on. All but the first are in the highest 2 GiB. Returns the number of addresses, and
    /// whether the stack may have more, because `into` is full or because the next caller cannot be found.
    /// Allocates nothing. Reads at most five words for each address, and in total at most some thousand words of
    /// the guest's modules.
    pub fn walk(
        &self,
        guest: &(impl Surroundings + ?Sized),
        start: Start<'_>,
        into: &mut [Gva],
    ) -> (usize, bool) {
        let mut state = State {
            ip: Gva(start.regs.rip),
            sp: Gva(start.regs.rsp),
            bp: start.regs.rbp,
            interrupted: !start.returned,
            others: Others::Here(start.regs),
            stacks: 0,
            modules: Search::new(),
        };
        let mut count = 0;
        for frame in into {
            *frame = state.ip;
            count += 1;
            match state.step(self, guest) {
                Step::Caller => {}
                Step::End => return (count, false),
                Step::Lost => return (count, true),
            }
        }
        (count, true)
    }
}

/// Result of a step from a function to its caller.
enum Step {
    Caller,
    /// There is no caller.
    End,
    /// The caller cannot be found.
    Lost,
}

impl State<'_> {
    fn step(&mut self, by: &Unwinder, guest: &(impl Surroundings + ?Sized)) -> Step {
        let Unwinder { orc, modules } = by;
        if !self.interrupted && orc.is_trampoline(self.ip) {
            return Step::Lost;
        }
        // A call may be the last instruction of its function. Then the return address is already in the next
        // function.
        let at = if self.interrupted {
            self.ip
        } else {
            self.ip.wrapping_sub(1)
        };
        let rule = if orc.covers(at) {
            orc.find(at).copied()
        } else {
            let of_module =
                |modules: &ModuleTables| modules.find(at, orc.format(), &mut self.modules, guest);
            modules.as_ref().and_then(of_module)
        };
        match rule {
            Some(Rule::End) => Step::End,
            Some(Rule::Caller(caller)) => self.caller(caller, guest).unwrap_or(Step::Lost),
            Some(Rule::Unknown) | None => Step::Lost,
        }
    }

    /// Makes the caller the current function; `None` if the caller cannot be found.
    fn caller(&mut self, caller: Caller, guest: &(impl Surroundings + ?Sized)) -> Option<Step> {
        let offset = i64::from(caller.offset);
        let frame = match caller.base {
            Base::Register(register) => self.register(register, guest)?.wrapping_add_signed(offset),
            Base::AtRbp => self.word(Gva(self.bp.wrapping_add_signed(offset)), guest)?,
            Base::AtRsp => self.word(self.sp, guest)?.wrapping_add_signed(offset),
        };
        let frame = Gva(frame);
        let rbp = match caller.rbp {
            Rbp::Kept => None,
            Rbp::Above(offset) => {
                let at = Gva(frame.0.wrapping_add_signed(offset.into()));
                let is_near = frame.0.abs_diff(at.0) < STACK && at.0 >= KERNEL_HALF;
                Some(is_near.then(|| guest.word(at)).flatten()?)
            }
            Rbp::Beside(offset) => {
                let at = self.bp.wrapping_add_signed(offset.into());
                Some(self.word(Gva(at), guest)?)
            }
        };
        let (ip, rbp) = match caller.frame {
            Frame::Call => {
                let slot = frame.wrapping_sub(8);
                self.enter(slot)?;
                let found = Gva(guest.word(slot)?);
                self.enter(frame)?;
                self.others = Others::Unknown;
                (guest.returns_to(found, slot)?, rbp)
            }
            Frame::Registers | Frame::Iret => {
                /// Offset of RIP in `struct pt_regs`; CS, RFLAGS and RSP follow.
                const RIP: u64 = 128;
                let (rip, others) = match caller.frame {
                    Frame::Registers => (frame.wrapping_add(RIP), Others::At(frame)),
                    Frame::Iret | Frame::Call => (frame, Others::Unknown),
                };
                self.enter(rip)?;
                let word = |n: u64| guest.word(rip.wrapping_add(n * 8));
                let (ip, code, sp) = (word(0)?, word(1)?, word(3)?);
                if code & 3 != 0 {
                    // The interrupted code was that of a process in user mode.
                    return Some(Step::End);
                }
                let rbp = rbp.or_else(|| read(others, Register::Rbp, guest));
                self.enter(Gva(sp))?;
                self.others = others;
                (Gva(ip), rbp)
            }
        };
        let (ip, pushed) = guest.in_place(ip);
        if pushed > 0 {
            self.enter(self.sp.wrapping_add(pushed))?;
        }
        if ip.0 < KERNEL_TEXT {
            return None;
        }
        self.ip = ip;
        self.bp = rbp.unwrap_or(self.bp);
        // Code that has pushed words stands for an instruction, so `ip` is not a return address.
        self.interrupted = caller.interrupted || pushed > 0;
        Some(Step::Caller)
    }

    /// Returns the word at `at`, which must be on the stack of the current function.
    fn word(&self, at: Gva, guest: &(impl Surroundings + ?Sized)) -> Option<u64> {
        guest.word(self.inside(at)?)
    }

    /// Returns `at` if it is on the stack of the current function, at or above the stack pointer.
    fn inside(&self, at: Gva) -> Option<Gva> {
        let above = at.0.checked_sub(self.sp.0)?;
        (above < STACK && at.0 >= KERNEL_HALF).then_some(at)
    }

    /// Moves the stack pointer to `at`: further up on the same stack, or to another stack. `None` if `at` is not in
    /// the kernel's half of the address space, or if there have been too many changes to another stack.
    fn enter(&mut self, at: Gva) -> Option<()> {
        if at.0 < KERNEL_HALF {
            return None;
        }
        if self.inside(at).is_none() {
            self.stacks += 1;
        }
        self.sp = at;
        (self.stacks <= MOST_STACKS).then_some(())
    }

    fn register(&self, register: Register, guest: &(impl Surroundings + ?Sized)) -> Option<u64> {
        match register {
            Register::Rsp => Some(self.sp.0),
            Register::Rbp => Some(self.bp),
            other => read(self.others, other, guest),
        }
    }
}

/// Returns a register of the current function from `others`; `None` if it is not known.
fn read(
    others: Others<'_>,
    register: Register,
    guest: &(impl Surroundings + ?Sized),
) -> Option<u64> {
    match others {
        Others::Here(regs) => Some(match register {
            Register::Rsp => regs.rsp,
            Register::Rbp => regs.rbp,
            Register::Rdx => regs.rdx,
            Register::Rdi => regs.rdi,
            Register::R10 => regs.r10,
            Register::R13 => regs.r13,
        }),
        // `struct pt_regs` (arch/x86/include/asm/ptrace.h).
        Others::At(frame) => guest.word(frame.wrapping_add(match register {
            Register::R13 => 16,
            Register::Rbp => 32,
            Register::R10 => 56,
            Register::Rdx => 96,
            Register::Rdi => 112,
            Register::Rsp => 152,
        })),
        Others::Unknown => None,
    }
}
