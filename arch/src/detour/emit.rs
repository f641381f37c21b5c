//! Code fragments that detours and return code are made of.
//!
//! Registers between [`Emitter::save`] and [`Emitter::restore`]:
//!
//! - RAX and RDX are free everywhere.
//! - RCX is free until [`Emitter::reserve`]. From there to [`Emitter::publish`], it holds the new head. In a return
//!   probe's part, it is free until an instance is taken.
//! - The register that the frame calls `cell` holds the record's address from [`Emitter::reserve`] to
//!   [`Emitter::publish`].
//! - RSI, RDI and R8 are used by code that reads memory in a loop, and by code that copies the stack.
//!
//! The saved flags need only the lower half of their stack word. [`Emitter::time`] writes the CPU's number into the
//! upper half, and [`Emitter::values`] stores both together.

use super::cells::{CELL, RECORD_CELLS};
use super::cold::{Slowly, Unread};
use super::error::BuildError;
use super::record::{Capture, Ring};
use super::record::{END, Header, IDENTITY, Layout, SOURCE_BITS, TSC, Values};
use crate::Gva;
use crate::condition::{Comparison, Condition};
use crate::regs::Gpr;
use crate::trap::{INT3, ROOM_PORT};
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, CodeLabel, dword_ptr, qword_ptr, registers::*,
};
use iced_x86::{BlockEncoderOptions, Code, IcedError, Instruction, MemoryOperand, Register};

/// Address at which code is assembled, before its real address is known. It is larger than the small numbers that
/// the assembler takes for labels, so code can refer to addresses in itself.
pub(super) const ORIGIN: u64 = 1 << 40;
/// Mask for the offset of an address in its page.
const IN_PAGE: i32 = 0xfff;
/// Offset of the CPU's number from RSP, in the upper half of the saved flags.
const SAVED_CPU: i32 = 4;

/// What the code pushes on the stack.
#[derive(Debug)]
pub(super) struct Frame {
    /// The saved registers, in the order in which they are pushed, before the flags. The first is RAX.
    pub(super) saved: &'static [Gpr],
    /// Number of bytes on the stack between the stack pointer that is recorded and the saved registers.
    pub(super) below: i32,
    /// Register that holds a record's address.
    pub(super) cell: AsmRegister64,
}

impl Frame {
    /// Returns the offset of the recorded stack pointer from RSP, which points at the flags.
    pub(super) fn rsp(&self) -> i32 {
        let saved: i32 = self.saved.iter().map(|_| 8).sum();
        8 + saved + self.below
    }

    /// Returns the offset from RSP at which `register` is saved; `None` if it was not pushed.
    fn offset_of(&self, register: Gpr) -> Option<i32> {
        let behind = self
            .saved
            .iter()
            .rev()
            .position(|saved| *saved == register)?;
        i32::try_from(8 * (behind + 1)).ok()
    }
}

/// Cold code that increments a counter and continues at `next`.
struct Count {
    label: CodeLabel,
    counter: Gva,
    next: CodeLabel,
}

/// Handling of a hit for which the ring has no room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Full {
    /// Counter of lost records.
    pub(super) lost: Gva,
    /// Where the code continues after a lost record.
    pub(super) next: CodeLabel,
    /// Whether the code first asks the host for room.
    pub(super) waits: bool,
}

/// Number of cells that a record takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cells {
    /// Cells that all records of the source have.
    pub(super) fixed: u16,
    /// Offset in the record at which the number of further cells (u32) is stored; `None` if records have no such
    /// cells. [`Emitter::reserve`] expects the number in R8.
    pub(super) more: Option<usize>,
}

/// Cold code that asks the host for room.
struct Asking {
    label: CodeLabel,
    again: CodeLabel,
    lost: CodeLabel,
}

/// Cold code that rings the doorbell.
struct Ringing {
    label: CodeLabel,
    next: CodeLabel,
}

/// An assembler, with the cold code that is not written yet.
pub(super) struct Emitter<'a> {
    pub(super) a: CodeAssembler,
    frame: &'a Frame,
    ring: &'a Ring,
    counts: Vec<Count>,
    asking: Vec<Asking>,
    ringing: Vec<Ringing>,
    pub(super) unread: Vec<Unread>,
    pub(super) slowly: Vec<Slowly>,
    /// Calls and their targets. The displacements depend on the final address of the code.
    calls: Vec<(CodeLabel, Gva)>,
}

/// Code, and what is needed to place it at its final address.
pub(super) struct Assembled<const N: usize> {
    pub(super) code: Vec<u8>,
    /// Offsets of labels.
    pub(super) labels: [usize; N],
    /// Offsets of calls, and their targets.
    pub(super) calls: Vec<(usize, Gva)>,
}

/// Opcode of `call rel32`.
pub(super) const CALL_REL32: u8 = 0xe8;
/// Length of `call rel32` in bytes.
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

    /// Restores the registers, and the arithmetic flags: generated code changes no other flag. (`popfq` would take
    /// longer than all of this.)
    pub(super) fn restore(&mut self) -> Result<(), BuildError> {
        let a = &mut self.a;
        a.pop(rax)?;
        a.xchg(al, ah)?;
        // OF is bit 11: 8 in the second byte. Adding 0x78 to 8 overflows, which sets OF again.
        a.and(al, 8)?;
        a.add(al, 0x78)?;
        a.sahf()?;
        for register in self.frame.saved.iter().rev() {
            a.pop(name(*register))?;
        }
        Ok(())
    }

    /// Jumps to `escape` unless the stack words up to number `highest` are in RSP's page.
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

    /// Jumps to `otherwise` unless `condition` holds.
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

    /// Returns the label of cold code that increments `counter` and continues at `next`.
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

    /// Reserves cells and writes the time into the first one. If the ring is full, does what `full` says.
    pub(super) fn reserve(
        &mut self,
        cells: Cells,
        full: Full,
        capture: &Capture,
    ) -> Result<(), BuildError> {
        let cell = self.frame.cell;
        let mut retry = self.a.create_label();
        let lost = self.counting("the count of lost records", full.lost, full.next)?;
        self.time(cell, capture.cpu)?;
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
        // Even if RAX holds a stale head, this check may pass; then the exchange fails.
        a.cmp(rcx, qword_ptr(absolute(self.ring.limit)))?;
        a.ja(full)?;
        a.lock().cmpxchg(qword_ptr(absolute(self.ring.head)), rcx)?;
        a.jne(retry)?;
        // The index of the first cell, below 2^24, times the size of a cell.
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

    /// Returns the label of cold code that asks the host for room. If there is room, that code continues here;
    /// otherwise, at `lost`.
    fn asking(&mut self, lost: CodeLabel) -> Result<CodeLabel, BuildError> {
        let label = self.a.create_label();
        let mut again = self.a.create_label();
        self.place(&mut again)?;
        self.asking.push(Asking { label, again, lost });
        Ok(label)
    }

    /// Loads the time stamp counter into `into`. Best done just before a locked exchange: while the exchange waits
    /// for the pushes to complete, the counter is read. After the exchange, reading it would take extra time.
    ///
    /// If `cpu` says where the CPU's number is, also saves that number. A preempted thread may continue on another
    /// CPU, whose counter may differ. So the number is read before the counter and after it, until both are the
    /// same. (A thread that migrates twice within these instructions, and comes back, is not noticed.) Uses RCX.
    pub(super) fn time(&mut self, into: AsmRegister64, cpu: Option<u32>) -> Result<(), BuildError> {
        let mut again = self.a.create_label();
        if let Some(cpu) = cpu {
            self.place(&mut again)?;
            with_per_cpu(&mut self.a, Code::Mov_r32_rm32, Register::ECX, cpu)?;
        }
        let a = &mut self.a;
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.lea(into, qword_ptr(rax + rdx))?;
        if let Some(cpu) = cpu {
            with_per_cpu(a, Code::Cmp_r32_rm32, Register::ECX, cpu)?;
            a.jne(again)?;
            a.mov(dword_ptr(rsp + SAVED_CPU), ecx)?;
        }
        Ok(())
    }

    /// Writes the task, if it is captured.
    pub(super) fn task(&mut self, layout: &Layout, capture: &Capture) -> Result<(), BuildError> {
        let (Some(fields), Some(at)) = (capture.task, layout.task()) else {
            return Ok(());
        };
        let cell = self.frame.cell;
        let a = &mut self.a;
        with_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, fields.current)?;
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

    /// Stores the flags, registers and stack words of the probepoint in the structure that `base` points at. If the
    /// CPU's number was saved, it is stored together with the flags.
    pub(super) fn values(
        &mut self,
        base: AsmRegister64,
        values: &Values,
        stack: &[u16],
    ) -> Result<(), BuildError> {
        // A locked exchange after `time` has written both halves to memory, so one load gets them.
        self.a.mov(rax, qword_ptr(rsp))?;
        self.a.mov(qword_ptr(base + values.flags()), rax)?;
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

    /// Loads the value that `register` has at the probepoint into `into`.
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

    /// Calls `target`. The displacement is filled in when the code gets its address.
    pub(super) fn call(&mut self, target: Gva) -> Result<(), BuildError> {
        let mut label = self.a.create_label();
        self.place(&mut label)?;
        let [a, b, c, d] = [INT3; CALL as usize - 1];
        self.a.db(&[CALL_REL32, a, b, c, d])?;
        self.calls.push((label, target));
        Ok(())
    }

    /// Copies the stack word at RSP + `from` to `base` + `offset`.
    fn word(&mut self, base: AsmRegister64, offset: usize, from: i32) -> Result<(), BuildError> {
        self.a.mov(rax, qword_ptr(rsp + from))?;
        self.a.mov(qword_ptr(base + offset), rax)?;
        Ok(())
    }

    /// Writes the mark of a record, and rings the doorbell if the record passed the watermark.
    pub(super) fn publish(&mut self, source: u32, cells: Cells) -> Result<(), BuildError> {
        let identity = Header::identity(source, cells.fixed)?;
        let label = self.a.create_label();
        let mut next = self.a.create_label();
        self.ringing.push(Ringing { label, next });
        let cell = self.frame.cell;
        let bell = qword_ptr(absolute(self.ring.bell));
        let a = &mut self.a;
        a.mov(dword_ptr(cell + END), ecx)?;
        // Exactly one record takes the head past the bell: the one whose new head minus the bell is less than its
        // number of cells.
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

    /// Binds `label` to this place.
    pub(super) fn place(&mut self, label: &mut CodeLabel) -> Result<(), BuildError> {
        self.a.set_label(label)?;
        // An instruction can have only one label, so an instruction of no bytes takes this one.
        self.a.zero_bytes()?;
        Ok(())
    }

    /// Writes the cold code that counts, asks for room and rings the doorbell.
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

    pub(super) fn frame(&self) -> &'a Frame {
        self.frame
    }

    /// Assembles the code as if it began `from` bytes after [`ORIGIN`], and finds the offsets of `labels` in it.
    /// The result does not depend on the final address.
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

/// Emits `code`, which loads `into` from the absolute address `displacement`. The assembler itself would choose an
/// encoding with a 64-bit address.
pub(super) fn load(
    a: &mut CodeAssembler,
    code: Code,
    into: Register,
    displacement: i64,
) -> Result<(), IcedError> {
    let at = MemoryOperand::with_displ(displacement.cast_unsigned(), 8);
    a.add_instruction(Instruction::with2(code, into, at)?)
}

/// Emits `code`, whose operands are `register` and the memory at `displacement` from the base of GS.
pub(super) fn with_per_cpu(
    a: &mut CodeAssembler,
    code: Code,
    register: Register,
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
    a.add_instruction(Instruction::with2(code, register, at)?)
}

/// Checks that code can encode `at` in 32 bits.
pub(super) fn reachable(what: &'static str, at: Gva) -> Result<(), BuildError> {
    i32::try_from(absolute(at))
        .map(|_| ())
        .map_err(|_| BuildError::Unreachable { what, at })
}

/// Returns the address `at` as the displacement of a memory operand without registers.
pub(super) fn absolute(at: Gva) -> i64 {
    at.0.cast_signed()
}

/// Returns the assembler's name of `register`.
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
