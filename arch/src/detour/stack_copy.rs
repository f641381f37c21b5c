//! The part of a detour that copies the stack, so that the host can unwind it later.
//!
//! ```text
//!   before anything   DF set, not the task's own stack, or too deep ──▶ escape
//!   each record       as many cells as the stack takes from RSP to its end
//! ```
//!
//! Invariant: only the current stack is read, from the words that the detour has pushed (at least a cell of them)
//! to the stack's end. A task's own stack is mapped as a whole. The ends of other stacks (of interrupts, of
//! exceptions) are not known here, so the host serves hits on them.

use super::cells::{CELL, Spread};
use super::emit::{Emitter, with_per_cpu};
use super::error::BuildError;
use super::stack::{CELL_BYTES, CopyLayout, STACK_MAX, StackFields};
use iced_x86::code_asm::{CodeLabel, dword_ptr, qword_ptr, registers::*};
use iced_x86::{Code, Register};

/// `THREAD_SIZE` (arch/x86/include/asm/page_64_types.h). If the guest's is larger, the upper part of a task's stack
/// is taken for another stack.
const THREAD_SIZE: i32 = 16 << 10;
/// Bit number of DF in the flags.
const DF: i32 = 10;
impl Emitter<'_> {
    /// Jumps to `escape` unless the current stack is the task's own and has at most [`STACK_MAX`] bytes on it, and
    /// DF is clear, so that string instructions copy upwards.
    pub(super) fn check_stack(
        &mut self,
        fields: &StackFields,
        escape: CodeLabel,
    ) -> Result<(), BuildError> {
        self.a.bt(dword_ptr(rsp), DF)?;
        self.a.jc(escape)?;
        self.stack_depth(fields)?;
        let a = &mut self.a;
        // Because of the decrement, the comparison also fails for a depth of zero, which is not valid.
        a.dec(rdx)?;
        a.cmp(rdx, i32::try_from(STACK_MAX).unwrap_or(0))?;
        a.jae(escape)?;
        Ok(())
    }

    /// Loads RDX with the number of bytes that are on the stack at the probepoint.
    fn stack_depth(&mut self, fields: &StackFields) -> Result<(), BuildError> {
        let above = self.frame().rsp();
        let a = &mut self.a;
        with_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, fields.current)?;
        a.mov(rdx, qword_ptr(rax + fields.stack))?;
        a.lea(rax, qword_ptr(rsp + above))?;
        a.sub(rdx, rax)?;
        a.add(rdx, THREAD_SIZE)?;
        Ok(())
    }

    /// Loads R8 with the number of cells that a copy of the stack takes.
    pub(super) fn count_stack(&mut self, fields: &StackFields) -> Result<(), BuildError> {
        /// 2^16 / 7, rounded up. Multiplying by this and shifting right by 16 divides by seven exactly, for numbers
        /// of words up to some thousands.
        const SEVENTH: i32 = 9363;
        self.stack_depth(fields)?;
        let a = &mut self.a;
        a.lea(r8d, dword_ptr(rdx + (CELL_BYTES - 1)))?;
        a.shr(r8d, 3)?;
        a.imul_3(r8d, r8d, SEVENTH)?;
        a.shr(r8d, 16)?;
        Ok(())
    }

    /// Copies the stack into the cells after the first `before` cells of the record.
    pub(super) fn copy_stack(
        &mut self,
        copy: CopyLayout,
        before: u16,
        fields: &StackFields,
    ) -> Result<(), BuildError> {
        let cell = self.frame().cell;
        let mut again = self.a.create_label();
        let a = &mut self.a;
        with_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, fields.current)?;
        a.mov(rsi, qword_ptr(rax + fields.stack))?;
        a.add(rsi, THREAD_SIZE)?;
        a.mov(qword_ptr(cell + copy.stack_end()), rsi)?;
        a.mov(r8d, dword_ptr(cell + copy.cells()))?;
        a.imul_3(eax, r8d, i32::try_from(CELL_BYTES).unwrap_or(0))?;
        a.sub(rsi, rax)?;
        a.lea(rdi, qword_ptr(cell + (usize::from(before) * CELL + 8)))?;
        a.set_label(&mut again)?;
        for _ in 0..Spread::CELL_WORDS {
            a.movsq()?;
        }
        // The next word is a mark.
        a.add(rdi, 8)?;
        a.dec(r8d)?;
        a.jne(again)?;
        Ok(())
    }
}
