//! The part of a detour that reads a text.
//!
//! ```text
//!   the first words    read eight bytes, store ─ one may be zero ─▶ is one? ─ yes ─▶ done
//!         │                                    ◀────── no ─────────┘ └ nothing there ─┐
//!         ▼ the text may be longer                                                   ▼
//!   each further word  read eight bytes, store, is one zero? ◀─ eight ─ byte by byte: the text may end
//!                        └ nothing there ─────────────────────────────▶ before what is not there
//! ```
//!
//! Invariants: no byte after the room is written, and each byte of the room up to the text's end was read by the
//! guest's own code. The straight path is for usual texts, which are short and ASCII: six instructions for eight
//! characters, besides the guest's code. It treats a word with a byte that is zero or above 0x80 as a possible end
//! of the text. That includes a word that could not be read, because the readers make it zero.

use super::cold::{End, Slowly};
use super::emit::Emitter;
use super::error::BuildError;
use super::fetching::Room;
use crate::Gva;
use iced_x86::code_asm::{CodeLabel, byte_ptr, qword_ptr, registers::*};

const ONES: u64 = u64::from_le_bytes([1; 8]);
const HIGH: u64 = u64::from_le_bytes([0x80; 8]);
/// Number of words of the straight path, each read by code of its own, without a loop: 64 characters, and the byte
/// that shows whether the text ends after them.
const STRAIGHT: usize = 9;

impl Emitter<'_> {
    /// Copies a text of at most `most` bytes from the address in RAX. The last word that is copied may include
    /// bytes from after the text.
    pub(super) fn text(
        &mut self,
        [one, .., eight]: &[Gva; 4],
        most: usize,
        room: Room,
        fault: CodeLabel,
    ) -> Result<(), BuildError> {
        let cell = self.frame().cell;
        let mut done = self.a.create_label();
        let mut ends = Vec::new();
        self.a.mov(rsi, rax)?;
        self.a.mov(rdi, ONES.wrapping_neg())?;
        self.a.mov(r8, HIGH)?;
        for word in 0..room.words.min(STRAIGHT) {
            if word > 0 {
                self.a.lea(rax, qword_ptr(rsi + 8 * word))?;
            }
            self.call(*eight)?;
            let [end, mut next, nothing] = [(); 3].map(|()| self.a.create_label());
            let to = qword_ptr(cell + room.offset(8 * word));
            let a = &mut self.a;
            if word + 1 == room.words {
                // The host checks whether the text ends in the last word.
                a.test(eax, eax)?;
                a.jne(nothing)?;
                a.mov(to, rdx)?;
            } else {
                a.mov(to, rdx)?;
                // A byte of the word is zero only if its highest bit is set in this difference.
                a.add(rdx, rdi)?;
                a.test(rdx, r8)?;
                a.jne(end)?;
            }
            self.place(&mut next)?;
            ends.push(End { end, next, nothing });
        }
        let more = self.a.create_label();
        if room.words > STRAIGHT {
            self.a.jmp(more)?;
        }
        self.place(&mut done)?;
        self.slowly.push(Slowly {
            one: *one,
            eight: *eight,
            fault,
            room,
            most,
            ends,
            more,
            done,
        });
        Ok(())
    }

    /// Writes the cold code of texts.
    pub(super) fn cold_texts(&mut self) -> Result<(), BuildError> {
        for mut text in std::mem::take(&mut self.slowly) {
            let [words, bytes] = [(); 2].map(|()| self.a.create_label());
            for (word, end) in std::mem::take(&mut text.ends).into_iter().enumerate() {
                self.end(&text, word, end, bytes)?;
            }
            if text.room.words > STRAIGHT {
                self.a.set_label(&mut text.more)?;
                self.begin(text.room, STRAIGHT)?;
                self.a.jmp(words)?;
            }
            self.rest(&text, words, bytes)?;
        }
        Ok(())
    }

    /// Emits code that checks whether a word of the straight path contains the text's end, or could not be read.
    fn end(
        &mut self,
        text: &Slowly,
        word: usize,
        mut at: End,
        bytes: CodeLabel,
    ) -> Result<(), BuildError> {
        let cell = self.frame().cell;
        if word + 1 < text.room.words {
            let a = &mut self.a;
            a.set_label(&mut at.end)?;
            a.test(eax, eax)?;
            a.jne(at.nothing)?;
            // A byte whose highest bit is set in the difference is zero if its own highest bit was clear.
            a.mov(rax, qword_ptr(cell + text.room.offset(8 * word)))?;
            a.not(rax)?;
            a.and(rdx, rax)?;
            a.test(rdx, r8)?;
            a.je(at.next)?;
            a.jmp(text.done)?;
        }
        self.a.set_label(&mut at.nothing)?;
        self.begin(text.room, word)?;
        self.a.jmp(bytes)?;
        Ok(())
    }

    /// Advances RSI from the beginning of the text to the word `word`. Loads RDI with the address of that word in
    /// the room, and R8 with the number of words from it to the end of the room.
    fn begin(&mut self, room: Room, word: usize) -> Result<(), BuildError> {
        let cell = self.frame().cell;
        let offset = i32::try_from(8 * word).unwrap_or(0);
        let left = u32::try_from(room.words - word).unwrap_or(0);
        if offset > 0 {
            self.a.add(rsi, offset)?;
        }
        self.a.lea(rdi, qword_ptr(cell + room.offset(8 * word)))?;
        self.a.mov(r8d, left)?;
        Ok(())
    }

    /// Emits the loops that read the rest of a text: word by word, and byte by byte where a word cannot be read at
    /// once.
    fn rest(
        &mut self,
        text: &Slowly,
        mut words: CodeLabel,
        mut bytes: CodeLabel,
    ) -> Result<(), BuildError> {
        let cell = self.frame().cell;
        let [mut counted, mut same, mut nothing] = [(); 3].map(|()| self.a.create_label());
        self.a.set_label(&mut words)?;
        self.a.mov(rax, rsi)?;
        self.load(text.eight, bytes)?;
        let a = &mut self.a;
        a.mov(qword_ptr(rdi), rdx)?;
        a.mov(rax, ONES.wrapping_neg())?;
        a.add(rax, rdx)?;
        a.not(rdx)?;
        a.and(rdx, rax)?;
        a.mov(rax, HIGH)?;
        a.test(rdx, rax)?;
        a.jne(text.done)?;
        a.add(rsi, 8)?;
        a.add(rdi, 8)?;
        a.set_label(&mut counted)?;
        // The first word of a cell is its mark, which is not part of the room.
        a.test(edi, 56)?;
        a.jne(same)?;
        a.add(rdi, 8)?;
        a.set_label(&mut same)?;
        a.dec(r8d)?;
        a.jne(words)?;
        a.jmp(text.done)?;

        a.set_label(&mut bytes)?;
        a.mov(rax, rsi)?;
        self.load(text.one, nothing)?;
        let a = &mut self.a;
        a.mov(byte_ptr(rdi), dl)?;
        a.test(dl, dl)?;
        a.je(text.done)?;
        a.inc(rsi)?;
        a.inc(rdi)?;
        a.test(edi, 7)?;
        a.jne(bytes)?;
        a.jmp(counted)?;
        // If all of the `most` bytes were read, but not the next one, it is not known whether the text ends there.
        // Then it counts as longer.
        a.set_label(&mut nothing)?;
        a.lea(rax, qword_ptr(cell + text.room.offset(text.most)))?;
        a.cmp(rdi, rax)?;
        a.jb(text.fault)?;
        a.mov(byte_ptr(rdi), 1)?;
        a.jmp(text.done)?;
        Ok(())
    }
}
