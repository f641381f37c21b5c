//! Pieces of code that detours and return code are made of.
//!
//! Registers: RAX and RDX are free everywhere between [`Emitter::save`] and [`Emitter::restore`].
//! RCX holds the new head from [`Emitter::reserve`] to [`Emitter::publish`], and the register that
//! the frame calls `cell` the record's address. What reads memory has RSI, RDI and R8, too, if it loops,
//! and so has what copies the stack.

use super::cold::{Slowly, Unread};
use super::record::{CPU, END, Header, IDENTITY, Layout, SOURCE_BITS, TSC, Values};
use super::{BuildError, CELL, Capture, RECORD_CELLS, Ring, TaskFields};
use crate::Gva;
use crate::condition::{Comparison, Condition};
use crate::regs::Gpr;
use crate::trap::{INT3, ROOM_PORT};
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, CodeLabel, dword_ptr, qword_ptr, registers::*,
};
use iced_x86::{BlockEncoderOptions, Code, IcedError, Instruction, MemoryOperand, Register};

/// Where code is assembled that refers to itself, by its address there: beyond the small numbers that
/// the assembler takes for labels.
pub(super) const ORIGIN: u64 = 1 << 40;
/// The bits of an address within its page.
const IN_PAGE: i32 = 0xfff;

/// What the code has pushed.
#[derive(Debug)]
pub(super) struct Frame {
    /// The registers, the first pushed first, before the flags. The first is RAX.
    pub(super) saved: &'static [Gpr],
    /// How many bytes were there already, below the stack pointer to record.
    pub(super) below: i32,
    /// The register that holds a record's address.
    pub(super) cell: AsmRegister64,
}

impl Frame {
    /// Where the stack pointer was, above RSP, where the flags are.
    pub(super) fn rsp(&self) -> i32 {
        let saved: i32 = self.saved.iter().map(|_| 8).sum();
        8 + saved + self.below
    }

    /// Where a register is, above RSP, if it was pushed.
    fn offset_of(&self, register: Gpr) -> Option<i32> {
        let behind = self
            .saved
            .iter()
            .rev()
            .position(|saved| *saved == register)?;
        i32::try_from(8 * (behind + 1)).ok()
    }
}

/// A cold piece of code that comes last: increments a counter and goes on.
struct Count {
    label: CodeLabel,
    counter: Gva,
    next: CodeLabel,
}

/// What becomes of a hit for which there is no room in the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Full {
    /// Counts those that are lost.
    pub(super) lost: Gva,
    /// Where the code goes on then.
    pub(super) next: CodeLabel,
    /// Whether the host is asked for room before.
    pub(super) waits: bool,
}

/// How many cells a record takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cells {
    /// Those that all records of the source have.
    pub(super) fixed: u16,
    /// For more: where the record has how many (u32). [`Emitter::reserve`] takes them from R8.
    pub(super) more: Option<usize>,
}

/// A cold piece of code: asks the host for room.
struct Asking {
    label: CodeLabel,
    again: CodeLabel,
    lost: CodeLabel,
}

/// The same for the doorbell.
struct Ringing {
    label: CodeLabel,
    next: CodeLabel,
}

/// An assembler with what is not yet written.
pub(super) struct Emitter<'a> {
    pub(super) a: CodeAssembler,
    frame: &'a Frame,
    ring: &'a Ring,
    counts: Vec<Count>,
    asking: Vec<Asking>,
    ringing: Vec<Ringing>,
    pub(super) unread: Vec<Unread>,
    pub(super) slowly: Vec<Slowly>,
    /// Calls, whose displacements depend on where the code will be.
    calls: Vec<(CodeLabel, Gva)>,
}

/// Code, and what of it is not known before there is a place for it.
pub(super) struct Assembled<const N: usize> {
    pub(super) code: Vec<u8>,
    /// Offsets of labels.
    pub(super) labels: [usize; N],
    /// Offsets of calls, and what they call.
    pub(super) calls: Vec<(usize, Gva)>,
}

/// `call rel32`, and its length.
pub(super) const CALL_REL32: u8 = 0xe8;
pub(super) const CALL: u8 = 5;

impl<'a> Emitter<'a> {
    pub(super) fn new(frame: &'a Frame, ring: &'a Ring) -> Result<Self, BuildError> {
        for (what, at) in [
            ("the ring's head", ring.head),
            ("the ring's limit", ring.limit),
            ("the ring's bell", ring.bell),
            ("the ring", ring.cells),
        ] {
            reachable(what, at)?;
        }
        let is_possible = ring.capacity.is_power_of_two()
            && (2 * u32::from(RECORD_CELLS)..=1 << 24).contains(&ring.capacity)
            && (1..ring.capacity).contains(&ring.watermark);
        if !is_possible {
            return Err(BuildError::Ring {
                capacity: ring.capacity,
                watermark: ring.watermark,
            });
        }
        Ok(Self {
            a: CodeAssembler::new(64)?,
            frame,
            ring,
            counts: Vec::new(),
            asking: Vec::new(),
            ringing: Vec::new(),
            unread: Vec::new(),
            slowly: Vec::new(),
            calls: Vec::new(),
        })
    }

    /// Pushes registers and flags.
    pub(super) fn save(&mut self) -> Result<(), BuildError> {
        for register in self.frame.saved {
            self.a.push(name(*register))?;
        }
        self.a.pushfq()?;
        Ok(())
    }

    /// Puts the arithmetic flags and the registers back; no instruction here changes another flag.
    /// (`popfq` would take longer than all of this.)
    pub(super) fn restore(&mut self) -> Result<(), BuildError> {
        let a = &mut self.a;
        a.pop(rax)?;
        a.xchg(al, ah)?;
        // OF is bit 11: 8 in the second byte, and 8 + 0x78 overflows.
        a.and(al, 8)?;
        a.add(al, 0x78)?;
        a.sahf()?;
        for register in self.frame.saved.iter().rev() {
            a.pop(name(*register))?;
        }
        Ok(())
    }

    /// Goes to `escape` unless the stack words up to number `highest` are in RSP's page.
    pub(super) fn check_page(&mut self, highest: u16, escape: CodeLabel) -> Result<(), BuildError> {
        let limit = IN_PAGE + 1 - 8 * (i32::from(highest) + 1);
        if limit < 0 {
            return Err(BuildError::FarWord { index: highest });
        }
        let a = &mut self.a;
        a.lea(eax, qword_ptr(rsp + self.frame.rsp()))?;
        a.and(eax, IN_PAGE)?;
        a.cmp(eax, limit)?;
        a.ja(escape)?;
        Ok(())
    }

    /// Goes to `otherwise` unless `condition` holds.
    pub(super) fn check(
        &mut self,
        condition: &Condition,
        otherwise: CodeLabel,
    ) -> Result<(), BuildError> {
        let saved = self.frame.offset_of(condition.register);
        let above = self.frame.rsp();
        let a = &mut self.a;
        let register = match (condition.register, saved) {
            (_, Some(offset)) => {
                a.mov(rdx, qword_ptr(rsp + offset))?;
                rdx
            }
            (Gpr::Rsp, None) => {
                a.lea(rdx, qword_ptr(rsp + above))?;
                rdx
            }
            (register, None) => name(register),
        };
        let is_any_bit = condition.comparison == Comparison::AnyBit;
        match (i32::try_from(condition.value.cast_signed()), is_any_bit) {
            (Ok(value), true) => a.test(register, value)?,
            (Ok(value), false) => a.cmp(register, value)?,
            (Err(_), _) => {
                a.mov(rax, condition.value)?;
                match is_any_bit {
                    true => a.test(register, rax)?,
                    false => a.cmp(register, rax)?,
                }
            }
        }
        match condition.comparison {
            Comparison::Equal => a.jne(otherwise)?,
            Comparison::NotEqual | Comparison::AnyBit => a.je(otherwise)?,
            Comparison::Less => a.jae(otherwise)?,
            Comparison::LessOrEqual => a.ja(otherwise)?,
            Comparison::Greater => a.jbe(otherwise)?,
            Comparison::GreaterOrEqual => a.jb(otherwise)?,
        }
        Ok(())
    }

    /// A place, in the cold part, that increments `counter` and goes on at `next`.
    pub(super) fn counting(
        &mut self,
        what: &'static str,
        counter: Gva,
        next: CodeLabel,
    ) -> Result<CodeLabel, BuildError> {
        reachable(what, counter)?;
        let label = self.a.create_label();
        self.counts.push(Count {
            label,
            counter,
            next,
        });
        Ok(label)
    }

    /// Reserves `cells` cells and writes the time there, or does what is to be done where the ring is
    /// full.
    pub(super) fn reserve(&mut self, cells: Cells, full: Full) -> Result<(), BuildError> {
        let cell = self.frame.cell;
        let mut retry = self.a.create_label();
        let lost = self.counting("the count of lost records", full.lost, full.next)?;
        self.time(cell)?;
        let full = match full.waits {
            false => lost,
            true => self.asking(lost)?,
        };
        let a = &mut self.a;
        load(
            a,
            Code::Mov_r64_rm64,
            Register::RAX,
            absolute(self.ring.head),
        )?;
        a.set_label(&mut retry)?;
        let fixed = i32::from(cells.fixed);
        match cells.more {
            None => a.lea(rcx, qword_ptr(rax + fixed))?,
            Some(_) => a.lea(rcx, qword_ptr(rax + r8 + fixed))?,
        }
        // A head that was read too long ago may pass here; then the exchange finds out.
        a.cmp(rcx, qword_ptr(absolute(self.ring.limit)))?;
        a.ja(full)?;
        a.lock().cmpxchg(qword_ptr(absolute(self.ring.head)), rcx)?;
        a.jne(retry)?;
        // The cell's index, below 2^24, times its size.
        a.and(eax, (self.ring.capacity - 1).cast_signed())?;
        a.shl(eax, CELL.trailing_zeros())?;
        let first = absolute(self.ring.cells);
        a.mov(qword_ptr(rax + (first + i64::from(TSC))), cell)?;
        a.lea(cell, qword_ptr(rax + first))?;
        if let Some(at) = cells.more {
            a.mov(dword_ptr(cell + at), r8d)?;
        }
        Ok(())
    }

    /// A place, in the cold part, that asks the host for room and comes back here, or goes to `lost`.
    fn asking(&mut self, lost: CodeLabel) -> Result<CodeLabel, BuildError> {
        let label = self.a.create_label();
        let mut again = self.a.create_label();
        self.place(&mut again)?;
        self.asking.push(Asking { label, again, lost });
        Ok(label)
    }

    /// Writes CPU and task.
    pub(super) fn header(&mut self, layout: &Layout, capture: &Capture) -> Result<(), BuildError> {
        let cell = self.frame.cell;
        let a = &mut self.a;
        if let Some(cpu) = capture.cpu {
            load_per_cpu(a, Code::Mov_r32_rm32, Register::EAX, cpu)?;
            a.mov(dword_ptr(cell + CPU), eax)?;
        }
        if let (Some(fields), Some(at)) = (&capture.task, layout.task()) {
            self.task(fields, at)?;
        }
        Ok(())
    }

    /// Makes `into` the time stamp counter. Best done just before a locked exchange: that waits for
    /// the pushes meanwhile, whereas behind it the two would take turns.
    pub(super) fn time(&mut self, into: AsmRegister64) -> Result<(), BuildError> {
        let a = &mut self.a;
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.lea(into, qword_ptr(rax + rdx))?;
        Ok(())
    }

    fn task(&mut self, fields: &TaskFields, at: usize) -> Result<(), BuildError> {
        let cell = self.frame.cell;
        let a = &mut self.a;
        load_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, fields.current)?;
        if fields.pid.checked_add(4) == Some(fields.tgid) {
            a.mov(rdx, qword_ptr(rax + fields.pid))?;
            a.mov(qword_ptr(cell + at), rdx)?;
        } else {
            a.mov(edx, dword_ptr(rax + fields.pid))?;
            a.mov(dword_ptr(cell + at), edx)?;
            a.mov(edx, dword_ptr(rax + fields.tgid))?;
            a.mov(dword_ptr(cell + (at + 4)), edx)?;
        }
        a.mov(rdx, qword_ptr(rax + fields.comm))?;
        a.mov(qword_ptr(cell + (at + 8)), rdx)?;
        let second = i64::from(fields.comm) + 8;
        a.mov(rdx, qword_ptr(rax + second))?;
        a.mov(qword_ptr(cell + (at + 16)), rdx)?;
        Ok(())
    }

    /// Stores flags, registers and stack words, as they are at the probepoint, in what `base` points
    /// at.
    pub(super) fn values(
        &mut self,
        base: AsmRegister64,
        values: &Values,
        stack: &[u16],
    ) -> Result<(), BuildError> {
        self.a.mov(eax, dword_ptr(rsp))?;
        self.a.mov(dword_ptr(base + values.flags()), eax)?;
        for (register, offset) in values.registers() {
            let from = match (register, self.frame.offset_of(register)) {
                (register, None) if register != Gpr::Rsp => name(register),
                _ => {
                    self.at_probepoint(rax, register)?;
                    rax
                }
            };
            self.a.mov(qword_ptr(base + offset), from)?;
        }
        let above = self.frame.rsp();
        for (index, offset) in stack.iter().zip(values.words()) {
            self.word(base, offset, above + 8 * i32::from(*index))?;
        }
        Ok(())
    }

    /// Makes `into` what `register` is at the probepoint.
    pub(super) fn at_probepoint(
        &mut self,
        into: AsmRegister64,
        register: Gpr,
    ) -> Result<(), BuildError> {
        let above = self.frame.rsp();
        match (register, self.frame.offset_of(register)) {
            (_, Some(saved)) => self.a.mov(into, qword_ptr(rsp + saved))?,
            (Gpr::Rsp, None) => self.a.lea(into, qword_ptr(rsp + above))?,
            (register, None) => self.a.mov(into, name(register))?,
        }
        Ok(())
    }

    /// Calls `target`, wherever the code will be.
    pub(super) fn call(&mut self, target: Gva) -> Result<(), BuildError> {
        let mut label = self.a.create_label();
        self.place(&mut label)?;
        let [a, b, c, d] = [INT3; CALL as usize - 1];
        self.a.db(&[CALL_REL32, a, b, c, d])?;
        self.calls.push((label, target));
        Ok(())
    }

    /// Copies the word `from` bytes above RSP to `offset` of what `base` points at.
    fn word(&mut self, base: AsmRegister64, offset: usize, from: i32) -> Result<(), BuildError> {
        self.a.mov(rax, qword_ptr(rsp + from))?;
        self.a.mov(qword_ptr(base + offset), rax)?;
        Ok(())
    }

    /// Writes the mark of a record, and rings the doorbell if that passed the watermark.
    pub(super) fn publish(&mut self, source: u32, cells: Cells) -> Result<(), BuildError> {
        let identity = Header::identity(source, cells.fixed)?;
        let label = self.a.create_label();
        let mut next = self.a.create_label();
        self.ringing.push(Ringing { label, next });
        let cell = self.frame.cell;
        let bell = qword_ptr(absolute(self.ring.bell));
        let a = &mut self.a;
        a.mov(dword_ptr(cell + END), ecx)?;
        // Of all that fill the ring, one is the first to make it so full.
        match cells.more {
            None => {
                a.mov(dword_ptr(cell + IDENTITY), identity)?;
                a.sub(rcx, bell)?;
                a.cmp(rcx, i32::from(cells.fixed))?;
            }
            Some(at) => {
                a.mov(eax, dword_ptr(cell + at))?;
                a.mov(edx, eax)?;
                a.shl(edx, SOURCE_BITS)?;
                a.add(edx, identity.cast_signed())?;
                a.mov(dword_ptr(cell + IDENTITY), edx)?;
                a.add(eax, i32::from(cells.fixed))?;
                a.sub(rcx, bell)?;
                a.cmp(rcx, rax)?;
            }
        }
        a.jb(label)?;
        self.place(&mut next)
    }

    /// Puts `label` here.
    pub(super) fn place(&mut self, label: &mut CodeLabel) -> Result<(), BuildError> {
        self.a.set_label(label)?;
        // An instruction has but one label; this one takes no room.
        self.a.zero_bytes()?;
        Ok(())
    }

    /// Writes the cold pieces.
    pub(super) fn cold(&mut self) -> Result<(), BuildError> {
        for mut count in std::mem::take(&mut self.counts) {
            self.a.set_label(&mut count.label)?;
            self.a.lock().inc(qword_ptr(absolute(count.counter)))?;
            self.a.jmp(count.next)?;
        }
        for mut asking in std::mem::take(&mut self.asking) {
            self.a.set_label(&mut asking.label)?;
            self.a.out(i32::from(ROOM_PORT), al)?;
            self.a.test(al, al)?;
            self.a.jne(asking.again)?;
            self.a.jmp(asking.lost)?;
        }
        for mut ringing in std::mem::take(&mut self.ringing) {
            self.a.set_label(&mut ringing.label)?;
            self.a.out(i32::from(self.ring.doorbell_port), al)?;
            self.a.jmp(ringing.next)?;
        }
        Ok(())
    }

    /// What the code has pushed.
    pub(super) fn frame(&self) -> &'a Frame {
        self.frame
    }

    /// The code, which begins `from` bytes after [`ORIGIN`], with the places of labels in it. Nothing
    /// depends on where all of that will be.
    pub(super) fn finish<const N: usize>(
        mut self,
        from: u32,
        labels: [&CodeLabel; N],
    ) -> Result<Assembled<N>, BuildError> {
        let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let begin = ORIGIN + u64::from(from);
        let result = self.a.assemble_options(begin, options)?;
        let offset = |label| {
            let at = result.label_ip(label)?.wrapping_sub(begin);
            Ok(usize::try_from(at).unwrap_or(usize::MAX))
        };
        let mut offsets = [0; N];
        for (at, label) in offsets.iter_mut().zip(labels) {
            *at = offset(label)?;
        }
        let calls = self
            .calls
            .iter()
            .map(|(label, target)| Ok((offset(label)?, *target)));
        let calls = calls.collect::<Result<_, IcedError>>()?;
        Ok(Assembled {
            labels: offsets,
            calls,
            code: result.inner.code_buffer,
        })
    }
}

/// Loads `into` from a place that its address alone names; the assembler would choose an encoding
/// with 64 bits of it.
pub(super) fn load(
    a: &mut CodeAssembler,
    code: Code,
    into: Register,
    displacement: i64,
) -> Result<(), IcedError> {
    let at = MemoryOperand::with_displ(displacement.cast_unsigned(), 8);
    a.add_instruction(Instruction::with2(code, into, at)?)
}

/// The same relative to the base of GS.
pub(super) fn load_per_cpu(
    a: &mut CodeAssembler,
    code: Code,
    into: Register,
    displacement: u32,
) -> Result<(), IcedError> {
    let displacement = i64::from(displacement.cast_signed());
    let at = MemoryOperand::new(
        Register::None,
        Register::None,
        1,
        displacement,
        8,
        false,
        Register::GS,
    );
    a.add_instruction(Instruction::with2(code, into, at)?)
}

/// Checks that code can name `at` in 32 bits.
pub(super) fn reachable(what: &'static str, at: Gva) -> Result<(), BuildError> {
    i32::try_from(absolute(at))
        .map(|_| ())
        .map_err(|_| BuildError::Unreachable { what, at })
}

/// The address, as the displacement that names it without a register.
pub(super) fn absolute(at: Gva) -> i64 {
    at.0.cast_signed()
}

/// The assembler's name of `register`.
pub(super) fn name(register: Gpr) -> AsmRegister64 {
    match register {
        Gpr::Rax => rax,
        Gpr::Rcx => rcx,
        Gpr::Rdx => rdx,
        Gpr::Rbx => rbx,
        Gpr::Rsp => rsp,
        Gpr::Rbp => rbp,
        Gpr::Rsi => rsi,
        Gpr::Rdi => rdi,
        Gpr::R8 => r8,
        Gpr::R9 => r9,
        Gpr::R10 => r10,
        Gpr::R11 => r11,
        Gpr::R12 => r12,
        Gpr::R13 => r13,
        Gpr::R14 => r14,
        Gpr::R15 => r15,
    }
}
