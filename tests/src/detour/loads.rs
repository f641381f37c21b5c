//! Code that loads from memory and recovers from a fault, as the kernel's does (arch/x86/lib/getuser.S).
//!
//! `stac` and `clac` are not allowed in user mode, so in their place each load counts its calls. Loads for the
//! kernel's half have code and counters of their own, separate from those for processes, so the counts show which
//! load was called.

use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Readers;
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, byte_ptr, dword_ptr, qword_ptr, registers::*, word_ptr};

use super::arena::Arena;
use super::traps::{self, Known};

/// Number of sizes: 1, 2, 4 and 8 bytes.
const SIZES: usize = 4;
/// Number of address halves: the kernel's and the processes'.
const HALVES: usize = 2;
/// Distance between loads in bytes. The fixup code is after all loads.
const APART: u64 = 64;
/// Distance between the first arguments of two successive loads, see [`Loads::call_at_faults`].
const CALLS_APART: usize = 64;
/// Index of the first counter of calls.
const COUNTERS: u64 = 700;
/// `-EFAULT`
const FAULT: i64 = -14;

/// Numbers of calls or faults: by half, then by size.
pub type Calls = [[u64; SIZES]; HALVES];

/// Loads in an arena, and the handling of their faults.
#[derive(Debug)]
pub struct Loads<'a> {
    arena: &'a Arena,
    readers: Readers,
    /// Registrations of the loads, by number: all sizes of the kernel's half, then all sizes of the processes'.
    faults: Vec<Known>,
}

impl<'a> Loads<'a> {
    /// Writes the loads and a fixup. The kernel's half begins at `kernel_half`, and the addresses of processes
    /// end at `process_end`.
    ///
    /// # Errors
    /// When the code cannot be assembled.
    pub fn new(arena: &'a Arena, kernel_half: Gva, process_end: Gva) -> Result<Self, IcedError> {
        let fixup = place(arena, SIZES * HALVES);
        Self::with_fixup(arena, kernel_half, process_end, fixup)?.write_fixup(fixup)
    }

    /// Writes the loads. After a fault, the caller's code at `fixup` runs: it must set RDX to zero and RAX to an
    /// error, and return.
    ///
    /// # Errors
    /// When the code cannot be assembled.
    pub fn with_fixup(
        arena: &'a Arena,
        kernel_half: Gva,
        process_end: Gva,
        fixup: Gva,
    ) -> Result<Self, IcedError> {
        let mut loads = Self {
            arena,
            readers: Readers {
                kernel: [Gva(0); SIZES],
                process: [Gva(0); SIZES],
                kernel_half,
                process_end,
                current: arena.task().current,
                disabled: arena.disabled(),
            },
            faults: Vec::new(),
        };
        for number in 0..SIZES * HALVES {
            let at = place(arena, number);
            let load = loads.write(at, number)?;
            loads.faults.push(traps::know(load, fixup));
            match number.checked_sub(SIZES) {
                None => loads.readers.kernel[number] = at,
                Some(size) => loads.readers.process[size] = at,
            }
        }
        Ok(loads)
    }

    /// Writes the code of load `number`; returns the address of the instruction that loads.
    fn write(&self, at: Gva, number: usize) -> Result<Gva, IcedError> {
        let mut a = CodeAssembler::new(64)?;
        a.lock().inc(qword_ptr(self.counter(number).0))?;
        let before = a.assemble(at.0)?.len() as u64;
        match number % SIZES {
            0 => a.movzx(edx, byte_ptr(rax))?,
            1 => a.movzx(edx, word_ptr(rax))?,
            2 => a.mov(edx, dword_ptr(rax))?,
            _ => a.mov(rdx, qword_ptr(rax))?,
        }
        a.xor(eax, eax)?;
        a.ret()?;
        let code = a.assemble(at.0)?;
        assert!(code.len() as u64 <= APART, "{}", code.len());
        self.arena.write(at, &code);
        let counter = self.arena.word(self.counter(number));
        counter.store(0, Ordering::SeqCst);
        Ok(at.wrapping_add(before))
    }

    fn write_fixup(self, at: Gva) -> Result<Self, IcedError> {
        let mut a = CodeAssembler::new(64)?;
        Self::fixup(&mut a)?;
        self.arena.write(at, &a.assemble(at.0)?);
        Ok(self)
    }

    /// Assembles the kernel's fixup for a fault.
    ///
    /// # Errors
    /// When the code cannot be assembled.
    pub fn fixup(a: &mut CodeAssembler) -> Result<(), IcedError> {
        a.xor(edx, edx)?;
        a.mov(rax, FAULT)?;
        a.ret()
    }

    fn counter(&self, number: usize) -> Gva {
        self.arena.counter(COUNTERS + number as u64)
    }

    /// Addresses of the loads, as detours use them.
    #[must_use]
    pub fn readers(&self) -> Readers {
        self.readers
    }

    /// Returns the number of calls of each load.
    #[must_use]
    pub fn calls(&self) -> Calls {
        self.all(|number| self.arena.word(self.counter(number)).load(Ordering::SeqCst))
    }

    /// Returns the number of faults of each load.
    #[must_use]
    pub fn faults(&self) -> Calls {
        self.all(|number| self.faults.get(number).map_or(0, Known::hits))
    }

    fn all(&self, count: impl Fn(usize) -> u64) -> Calls {
        std::array::from_fn(|half| std::array::from_fn(|size| count(half * SIZES + size)))
    }

    /// Makes each fault call `function` before the fixup runs. The arguments for load n count up from `argument` +
    /// n * `CALLS_APART`.
    pub fn call_at_faults(&self, function: traps::Function, argument: u64) {
        for (known, argument) in self.faults.iter().zip((argument..).step_by(CALLS_APART)) {
            known.calls(function, argument);
        }
    }

    /// Sets `pagefault_disabled` of the current task to `count`, and the bytes after it to a fixed pattern.
    pub fn set_disabled(&self, count: i32) {
        let [a, b, c, d] = count.to_le_bytes();
        let word = [a, b, c, d, 0x5a, 0x5a, 0x5a, 0x5a];
        self.disabled_word()
            .store(u64::from_le_bytes(word), Ordering::SeqCst);
    }

    /// Returns the word that consists of `pagefault_disabled` and the four bytes after it.
    #[must_use]
    pub fn disabled(&self) -> u64 {
        self.disabled_word().load(Ordering::SeqCst)
    }

    fn disabled_word(&self) -> &AtomicU64 {
        let (task, offset) = (self.arena.current().0, self.arena.disabled());
        self.arena
            .word(Gva(task.wrapping_add_signed(offset.into())))
    }
}

/// Address of load `number`.
fn place(arena: &Arena, number: usize) -> Gva {
    arena.loads().wrapping_add(number as u64 * APART)
}
