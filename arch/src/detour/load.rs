//! The part of a detour that reads memory.
//!
//! ```text
//!   before anything        AC set, or two deep in such reads ──▶ escape
//!   each record            pagefault_disabled += 1
//!     each item            first value
//!       each pointer       in the right half? ─ no ─▶ unread
//!                          call the kernel's reader ─ fault ─▶ unread
//!                          the last: store ───────────────────▶ record
//!                          pagefault_disabled -= 1
//! ```
//!
//! The loads are in functions of the guest's kernel, and its exception table lists them. So the guest handles a
//! fault as it does for the reads of its own kprobes, and nothing has to be planted for that. `pagefault_disabled`
//! also counts how deep reads are nested. (A detour that runs while a fault is handled may itself read memory that
//! faults.) A detour that interrupts two nested reads goes to its escape, and the host serves the hit without a
//! fault. A reader may clear AC, so the host also serves the hit if the guest has AC set.

use super::cold::Unread;
use super::emit::{Emitter, with_per_cpu};
use super::error::BuildError;
use super::fetching::{Fetching, Readers, Room, Rooms};
use crate::Gva;
use crate::fetch::{Base, Fetched, Memory, Read};
use iced_x86::code_asm::{CodeLabel, byte_ptr, dword_ptr, qword_ptr, registers::*, word_ptr};
use iced_x86::{Code, Register};

/// Maximum number of reads that a read may interrupt. A read that faults takes some 700 bytes of the stack, which
/// may be an NMI's stack of one page.
const DEEPEST: i32 = 1;
/// Bit number of AC in the flags.
const AC: i32 = 18;
/// Bytes at the end of the kernel's half that are never read: more than the length of an item, so that no load
/// goes past the end.
const MARGIN: i32 = 0x2000;

impl Fetching {
    /// Returns whether the code needs RSI, RDI and R8.
    pub(super) fn loops(&self) -> bool {
        let loops = |item: &Fetched| match item.read {
            Read::Bytes(len) => !item.pointers.is_empty() && !matches!(len, 1 | 2 | 4 | 8),
            Read::Text(_) => true,
        };
        self.items.iter().any(loops)
    }
}

impl Emitter<'_> {
    /// Jumps to `escape` if AC is set or reads are nested too deep, so that memory cannot be read here.
    pub(super) fn check_readable(
        &mut self,
        readers: &Readers,
        escape: CodeLabel,
    ) -> Result<(), BuildError> {
        let a = &mut self.a;
        a.bt(dword_ptr(rsp), AC)?;
        a.jc(escape)?;
        with_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, readers.current)?;
        a.cmp(dword_ptr(rax + readers.disabled), DEEPEST)?;
        a.ja(escape)?;
        Ok(())
    }

    /// Reads all items into their rooms.
    pub(super) fn fetch(&mut self, rooms: &Rooms, fetching: &Fetching) -> Result<(), BuildError> {
        let cell = self.frame().cell;
        let readers = &fetching.readers;
        let a = &mut self.a;
        a.mov(qword_ptr(cell + rooms.unread()), 0)?;
        with_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, readers.current)?;
        a.inc(dword_ptr(rax + readers.disabled))?;
        for (bit, (item, room)) in fetching.items.iter().zip(rooms.iter()).enumerate() {
            let (label, mut next) = (self.a.create_label(), self.a.create_label());
            self.item(readers, item, room, label)?;
            self.place(&mut next)?;
            self.unread.push(Unread {
                label,
                at: rooms.unread(),
                bit,
                next,
            });
        }
        let a = &mut self.a;
        with_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, readers.current)?;
        a.dec(dword_ptr(rax + readers.disabled))?;
        Ok(())
    }

    fn item(
        &mut self,
        readers: &Readers,
        item: &Fetched,
        room: Room,
        fault: CodeLabel,
    ) -> Result<(), BuildError> {
        match item.base {
            Base::Register(register) => self.at_probepoint(rax, register)?,
            Base::Constant(value) => self.a.mov(rax, value)?,
            Base::Task => {
                let current = readers.current;
                with_per_cpu(&mut self.a, Code::Mov_r64_rm64, Register::RAX, current)?;
            }
            Base::Entry(_) => return Err(BuildError::FetchAtReturn),
        }
        let Some((last, before)) = item.pointers.split_last() else {
            return self.value(item.read, room);
        };
        for pointer in before {
            self.step(pointer.offset)?;
            self.guarded(readers, pointer.memory, fault, |this, [.., reader]| {
                this.load(*reader, fault)
            })?;
            self.a.mov(rax, rdx)?;
        }
        self.step(last.offset)?;
        self.guarded(readers, last.memory, fault, |this, readers| {
            match item.read {
                Read::Bytes(len) => this.bytes(readers, len.into(), room, fault),
                Read::Text(most) => this.text(readers, most.into(), room, fault),
            }
        })
    }

    /// Stores RAX in the room, and zeros in the rest of the room.
    fn value(&mut self, read: Read, room: Room) -> Result<(), BuildError> {
        let Read::Bytes(_) = read else {
            return Err(BuildError::TextOfNothing);
        };
        let cell = self.frame().cell;
        for word in 0..room.words {
            let to = qword_ptr(cell + room.offset(8 * word));
            match word {
                0 => self.a.mov(to, rax)?,
                _ => self.a.mov(to, 0)?,
            }
        }
        Ok(())
    }

    fn step(&mut self, offset: i64) -> Result<(), BuildError> {
        match i32::try_from(offset) {
            Ok(0) => {}
            Ok(offset) => self.a.add(rax, offset)?,
            Err(_) => {
                self.a.mov(rdx, offset)?;
                self.a.add(rax, rdx)?;
            }
        }
        Ok(())
    }

    /// Emits a check that the address in RAX is in `memory`, and the code of `read` with the readers for that
    /// memory. The check jumps to `fault` if the address is in the wrong half. For [`Memory::Either`], the address
    /// decides between two copies of that code.
    fn guarded(
        &mut self,
        readers: &Readers,
        memory: Memory,
        fault: CodeLabel,
        read: impl Fn(&mut Self, &[Gva; 4]) -> Result<(), BuildError>,
    ) -> Result<(), BuildError> {
        match memory {
            Memory::Kernel => {
                self.guard_kernel(readers, fault)?;
                read(self, &readers.kernel)
            }
            Memory::User => {
                self.guard_process(readers, fault)?;
                read(self, &readers.process)
            }
            Memory::Either => {
                let (mut process, mut done) = (self.a.create_label(), self.a.create_label());
                self.guard_kernel(readers, process)?;
                read(self, &readers.kernel)?;
                self.a.jmp(done)?;
                self.place(&mut process)?;
                self.guard_process(readers, fault)?;
                read(self, &readers.process)?;
                self.place(&mut done)
            }
        }
    }

    /// Jumps to `otherwise` unless RAX is an address of the kernel's half, well before its end: error pointers
    /// (`IS_ERR`) are at the end, and a load that wrapped to zero would read memory of the process.
    fn guard_kernel(&mut self, readers: &Readers, otherwise: CodeLabel) -> Result<(), BuildError> {
        let a = &mut self.a;
        a.mov(rdx, readers.kernel_half.0.wrapping_neg())?;
        a.add(rdx, rax)?;
        a.jnc(otherwise)?;
        a.cmp(rax, -MARGIN)?;
        a.ja(otherwise)?;
        Ok(())
    }

    /// Jumps to `otherwise` unless RAX is an address of a process. A load that runs past the last address faults,
    /// because the page there is never mapped, and is longer than an item.
    fn guard_process(&mut self, readers: &Readers, otherwise: CodeLabel) -> Result<(), BuildError> {
        let a = &mut self.a;
        a.mov(rdx, readers.process_end.0)?;
        a.cmp(rax, rdx)?;
        a.jae(otherwise)?;
        Ok(())
    }

    /// Loads RDX from the address in RAX; jumps to `fault` if that cannot be read.
    pub(super) fn load(&mut self, reader: Gva, fault: CodeLabel) -> Result<(), BuildError> {
        self.call(reader)?;
        self.a.test(eax, eax)?;
        self.a.jne(fault)?;
        Ok(())
    }

    /// Copies `len` bytes from the address in RAX to `room`.
    fn bytes(
        &mut self,
        [one, two, four, eight]: &[Gva; 4],
        len: usize,
        room: Room,
        fault: CodeLabel,
    ) -> Result<(), BuildError> {
        let cell = self.frame().cell;
        let mut at = 0;
        while at < len {
            let (size, reader) = match len - at {
                8.. => (8, eight),
                4.. => (4, four),
                2.. => (2, two),
                _ => (1, one),
            };
            match at {
                0 if size < len => self.a.mov(rsi, rax)?,
                0 => {}
                _ => self.a.lea(rax, qword_ptr(rsi + at))?,
            }
            self.load(*reader, fault)?;
            let to = cell + room.offset(at);
            match size {
                8 => self.a.mov(qword_ptr(to), rdx)?,
                4 => self.a.mov(dword_ptr(to), edx)?,
                2 => self.a.mov(word_ptr(to), dx)?,
                _ => self.a.mov(byte_ptr(to), dl)?,
            }
            at += size;
        }
        Ok(())
    }

    /// Writes the cold code of reads.
    pub(super) fn cold_reads(&mut self) -> Result<(), BuildError> {
        self.cold_texts()?;
        let cell = self.frame().cell;
        for mut unread in std::mem::take(&mut self.unread) {
            self.a.set_label(&mut unread.label)?;
            self.a.or(
                dword_ptr(cell + unread.at),
                (1_u32 << unread.bit).cast_signed(),
            )?;
            self.a.jmp(unread.next)?;
        }
        Ok(())
    }
}
