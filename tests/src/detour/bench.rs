//! Runs code with the registers and flags that a test sets.
//!
//! The code is entered by a jump. So that it can return like a function, the test writes the address of an exit to
//! the word that RSP points at. The code leaves through one of the [`EXITS`], where the bench saves all registers
//! before it changes any.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmRegister64, AsmRegisterXmm, AsmRegisterYmm, CodeAssembler, dword_ptr, ptr, qword_ptr,
    registers::*,
};
use std::sync::atomic::Ordering;

use hvprobe_arch::Gva;
use hvprobe_arch::regs::{Gpr, Regs, rflags};

use super::arena::Arena;
use crate::differential::random::Random;

/// Number of exits.
pub const EXITS: u64 = 3;
/// Distance between the stubs of the exits.
const EXIT: u64 = 32;
/// Offsets of the bench's code in the arena's first page.
const ENTER: u64 = 0;
const EXITS_AT: u64 = 0x800;
const LEAVE: u64 = 0x900;

/// Index of the first word ([`Arena::counter`]) of the state to enter with: registers, then flags, then vectors.
const IN: u64 = 512;
/// Index of the first word of the state at the exit.
const OUT: u64 = 544;
/// Index of the word for the host's stack pointer.
const HOST: u64 = 576;
/// Offsets in a state, in bytes.
const FLAGS: u64 = 16 * 8;
const TARGET: u64 = FLAGS + 8;
const LEFT_BY: u64 = FLAGS + 16;
const VECTORS: u64 = 3 * 64;

/// Flags that tests set: the arithmetic ones, the direction and the alignment check.
pub const CHOSEN: u64 = rflags::ARITHMETIC | rflags::DF | rflags::AC;

/// Registers, flags and vector registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// General registers and flags; RIP is not used.
    pub regs: Regs,
    /// YMM0 to YMM15, or their lower halves without AVX.
    pub vectors: [[u64; 4]; 16],
}

/// State and exit with which the code left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// State at the exit.
    pub state: State,
    /// Number of the exit.
    pub exit: u64,
}

/// Code in an arena that runs other code with a given state.
#[derive(Debug)]
pub struct Bench<'a> {
    arena: &'a Arena,
    has_avx: bool,
}

impl State {
    /// Returns a random state with the stack pointer `rsp_is`.
    pub fn random(random: &mut Random, rsp_is: Gva) -> Self {
        let mut state = Self {
            regs: Regs::default(),
            vectors: [[0; 4]; 16],
        };
        for register in Gpr::ALL {
            state.regs.set(register, random.value());
        }
        for word in state.vectors.iter_mut().flatten() {
            *word = random.next();
        }
        state.regs.rsp = rsp_is.0;
        state.regs.rflags = random.next() & CHOSEN;
        if !rsp_is.0.is_multiple_of(8) {
            state.regs.rflags &= !rflags::AC;
        }
        state
    }
}

impl<'a> Bench<'a> {
    /// Writes the bench's code into `arena`, and points the GS base of the calling thread to that arena's per-CPU
    /// data.
    ///
    /// # Errors
    /// When the bench's code cannot be assembled.
    pub fn new(arena: &'a Arena) -> Result<Self, IcedError> {
        arena.enter();
        let has_avx = std::is_x86_feature_detected!("avx");
        let bench = Self { arena, has_avx };
        let code = bench.entering()?;
        arena.write(bench.code(ENTER), &code);
        for exit in 0..EXITS {
            let at = bench.exit(exit);
            let mut a = CodeAssembler::new(64)?;
            a.mov(
                dword_ptr(bench.output(LEFT_BY)),
                u32::try_from(exit).unwrap_or(0),
            )?;
            a.jmp(bench.code(LEAVE).0)?;
            arena.write(at, &a.assemble(at.0)?);
        }
        let code = bench.leaving()?;
        arena.write(bench.code(LEAVE), &code);
        Ok(bench)
    }

    /// Returns the arena of the bench.
    #[must_use]
    pub fn arena(&self) -> &'a Arena {
        self.arena
    }

    /// Returns the address of exit `index`.
    #[must_use]
    pub fn exit(&self, index: u64) -> Gva {
        self.code(EXITS_AT + EXIT * index)
    }

    fn code(&self, offset: u64) -> Gva {
        self.arena.entry().wrapping_add(offset)
    }

    fn input(&self, offset: u64) -> u64 {
        self.arena.counter(IN).0 + offset
    }

    fn output(&self, offset: u64) -> u64 {
        self.arena.counter(OUT).0 + offset
    }

    /// Assembles the code that loads a state and jumps to the code to run. It is called like a function.
    fn entering(&self) -> Result<Vec<u8>, IcedError> {
        let mut a = CodeAssembler::new(64)?;
        for register in [rbx, rbp, r12, r13, r14, r15] {
            a.push(register)?;
        }
        a.mov(qword_ptr(self.arena.counter(HOST).0), rsp)?;
        for ((ymm, xmm), offset) in VECTOR.into_iter().zip((VECTORS..).step_by(32)) {
            match self.has_avx {
                true => a.vmovdqu(ymm, ptr(self.input(offset)))?,
                false => a.movdqu(xmm, ptr(self.input(offset)))?,
            }
        }
        a.mov(rsp, self.input(FLAGS))?;
        a.popfq()?;
        for (register, offset) in GPRS.into_iter().zip((0..).step_by(8)) {
            a.mov(register, qword_ptr(self.input(offset)))?;
        }
        a.jmp(qword_ptr(self.input(TARGET)))?;
        a.assemble(self.code(ENTER).0)
    }

    /// Assembles the code that stores a state and returns to [`Self::run`].
    fn leaving(&self) -> Result<Vec<u8>, IcedError> {
        let mut a = CodeAssembler::new(64)?;
        for (register, offset) in GPRS.into_iter().zip((0..).step_by(8)) {
            a.mov(qword_ptr(self.output(offset)), register)?;
        }
        a.mov(rsp, self.output(FLAGS + 8))?;
        a.pushfq()?;
        for ((ymm, xmm), offset) in VECTOR.into_iter().zip((VECTORS..).step_by(32)) {
            match self.has_avx {
                true => a.vmovdqu(ptr(self.output(offset)), ymm)?,
                false => a.movdqu(ptr(self.output(offset)), xmm)?,
            }
        }
        a.mov(rsp, qword_ptr(self.arena.counter(HOST).0))?;
        if self.has_avx {
            a.vzeroupper()?;
        }
        a.push(0x202)?;
        a.popfq()?;
        for register in [r15, r14, r13, r12, rbp, rbx] {
            a.pop(register)?;
        }
        a.ret()?;
        a.assemble(self.code(LEAVE).0)
    }

    /// Runs the code at `target`, beginning with `state`, until it leaves through an exit.
    pub fn run(&self, target: Gva, state: &State) -> Left {
        let word = |at: u64| self.arena.word(Gva(at));
        for (register, offset) in Gpr::ALL.into_iter().zip((0..).step_by(8)) {
            word(self.input(offset)).store(state.regs.get(register), Ordering::SeqCst);
        }
        let flags = state.regs.rflags | rflags::FIXED | rflags::IF;
        word(self.input(FLAGS)).store(flags, Ordering::SeqCst);
        word(self.input(TARGET)).store(target.0, Ordering::SeqCst);
        for (value, offset) in state.vectors.iter().flatten().zip((VECTORS..).step_by(8)) {
            word(self.input(offset)).store(*value, Ordering::SeqCst);
        }
        let entering = self.arena.code(self.code(ENTER));
        // SAFETY: the code keeps the C calling convention, provided that the code at `target` leaves through an
        // exit. All tests are written so.
        let enter: extern "C" fn() = unsafe { std::mem::transmute(entering) };
        enter();
        let mut left = State {
            regs: Regs::default(),
            vectors: [[0; 4]; 16],
        };
        for (register, offset) in Gpr::ALL.into_iter().zip((0..).step_by(8)) {
            let value = word(self.output(offset)).load(Ordering::SeqCst);
            left.regs.set(register, value);
        }
        left.regs.rflags = word(self.output(FLAGS)).load(Ordering::SeqCst);
        for (value, offset) in left
            .vectors
            .iter_mut()
            .flatten()
            .zip((VECTORS..).step_by(8))
        {
            *value = word(self.output(offset)).load(Ordering::SeqCst);
        }
        let exit = word(self.output(LEFT_BY)).load(Ordering::SeqCst) & 0xffff_ffff;
        Left { state: left, exit }
    }
}

/// General registers in the order of their numbers.
#[rustfmt::skip]
const GPRS: [AsmRegister64; 16] = [
    rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
];

#[rustfmt::skip]
const VECTOR: [(AsmRegisterYmm, AsmRegisterXmm); 16] = [
    (ymm0, xmm0), (ymm1, xmm1), (ymm2, xmm2), (ymm3, xmm3),
    (ymm4, xmm4), (ymm5, xmm5), (ymm6, xmm6), (ymm7, xmm7),
    (ymm8, xmm8), (ymm9, xmm9), (ymm10, xmm10), (ymm11, xmm11),
    (ymm12, xmm12), (ymm13, xmm13), (ymm14, xmm14), (ymm15, xmm15),
];
