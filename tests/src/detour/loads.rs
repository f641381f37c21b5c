//! Code that loads from memory and lives through a fault, as a kernel has it (arch/x86/lib/getuser.S).
//!
//! User mode may not use `stac` and `clac`; in their place each load counts how often it is called. And
//! those for the kernel's half are other code than those for processes, so that counts tell which ones
//! were called.

use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Readers;
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, byte_ptr, dword_ptr, qword_ptr, registers::*, word_ptr};

use super::arena::Arena;
use super::traps::{self, Known};

/// How many sizes there are: 1, 2, 4 and 8 bytes.
const SIZES: usize = 4;
/// How many halves the addresses have: the kernel's and the processes'.
const HALVES: usize = 2;
/// The distance between loads in bytes. What comes after a fault is behind all of them.
const APART: u64 = 64;
/// The distance between the numbers that loads call a function with.
const CALLS_APART: usize = 64;
/// Which counters count calls.
const COUNTERS: u64 = 700;
/// `-EFAULT`
const FAULT: i64 = -14;

/// How often something was done or has happened: by half, then by size.
pub type Calls = [[u64; SIZES]; HALVES];

/// Loads in an arena, and what is done when they fault.
#[derive(Debug)]
pub struct Loads<'a> {
    arena: &'a Arena,
    readers: Readers,
    /// In the order of their numbers, in which sizes follow each other in each half.
    faults: Vec<Known>,
}

impl<'a> Loads<'a> {
    /// Writes them. The kernel's half begins at `kernel_half`, and the addresses of processes end at
    /// `process_end`.
    ///
    /// # Errors
    /// When they cannot be assembled.
    pub fn new(arena: &'a Arena, kernel_half: Gva, process_end: Gva) -> Result<Self, IcedError> {
        let fixup = place(arena, SIZES * HALVES);
        Self::with_fixup(arena, kernel_half, process_end, fixup)?.write_fixup(fixup)
    }

    /// The same with somebody's code for after a fault: it has to make RDX zero and RAX an error, and to
    /// return.
    ///
    /// # Errors
    /// When they cannot be assembled.
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

    /// Writes the code whose number this is, and tells where its load is.
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

    /// What the kernel does after a fault.
    ///
    /// # Errors
    /// When it cannot be assembled.
    pub fn fixup(a: &mut CodeAssembler) -> Result<(), IcedError> {
        a.xor(edx, edx)?;
        a.mov(rax, FAULT)?;
        a.ret()
    }

    fn counter(&self, number: usize) -> Gva {
        self.arena.counter(COUNTERS + number as u64)
    }

    /// How detours find them.
    #[must_use]
    pub fn readers(&self) -> Readers {
        self.readers
    }

    /// How often each was called.
    #[must_use]
    pub fn calls(&self) -> Calls {
        self.all(|number| self.arena.word(self.counter(number)).load(Ordering::SeqCst))
    }

    /// How often each has faulted.
    #[must_use]
    pub fn faults(&self) -> Calls {
        self.all(|number| self.faults.get(number).map_or(0, Known::hits))
    }

    fn all(&self, count: impl Fn(usize) -> u64) -> Calls {
        std::array::from_fn(|half| std::array::from_fn(|size| count(half * SIZES + size)))
    }

    /// From now on each fault calls `function` first, with numbers from `argument` on for each load.
    pub fn call_at_faults(&self, function: traps::Function, argument: u64) {
        for (known, argument) in self.faults.iter().zip((argument..).step_by(CALLS_APART)) {
            known.calls(function, argument);
        }
    }

    /// Makes `pagefault_disabled` this in the current task, and what is behind it something else.
    pub fn set_disabled(&self, count: i32) {
        let [a, b, c, d] = count.to_le_bytes();
        let word = [a, b, c, d, 0x5a, 0x5a, 0x5a, 0x5a];
        self.disabled_word()
            .store(u64::from_le_bytes(word), Ordering::SeqCst);
    }

    /// That and what is behind it.
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

/// Where the code of the load `number` is.
fn place(arena: &Arena, number: usize) -> Gva {
    arena.loads().wrapping_add(number as u64 * APART)
}
