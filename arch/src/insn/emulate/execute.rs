//! The execution of one operation on registers and memory.
//!
//! In each operation, everything that can fail comes before the first change of a register. A store is the last
//! thing that can fail.

use super::super::memory::{Effect, Memory, MemoryFault, reachable};
use super::alu;
use super::operation::Operation;
use crate::Gva;
use crate::regs::{Regs, rflags};

/// The flags that `popfq` loads at privilege level 0: all but the reserved ones, RF, which it
/// clears, and VM, VIF and VIP, which it leaves alone (SDM vol. 2, POPF, table 4-16).
pub(super) const POPPED: u64 = rflags::ARITHMETIC
    | rflags::TF
    | rflags::IF
    | rflags::DF
    | rflags::IOPL
    | rflags::NT
    | rflags::AC
    | rflags::ID;

/// Executes `operation` on `regs` and `mem`. `next` is the address just after the instruction.
#[inline(never)]
pub(in crate::insn) fn execute(
    operation: Operation,
    next: Gva,
    regs: &mut Regs,
    mem: &mut impl Memory,
) -> Result<Effect, MemoryFault> {
    let mut rip = next;
    let mut effect = Effect::Done;
    match operation {
        Operation::Nop => {}
        Operation::Push(from) => push(from.read(regs), regs, mem)?,
        Operation::Pop(to) => {
            let value = mem.read_u64(Gva(regs.rsp))?;
            // The increment comes first: after `pop rsp`, RSP is the word that was popped.
            regs.rsp = regs.rsp.wrapping_add(8);
            regs.set(to, value);
        }
        Operation::PushFlags => {
            let flags = regs.rflags & !(rflags::RF | rflags::VM) | rflags::FIXED;
            push(flags, regs, mem)?;
        }
        Operation::PopFlags => {
            let flags = mem.read_u64(Gva(regs.rsp))?;
            regs.rsp = regs.rsp.wrapping_add(8);
            regs.rflags = regs.rflags & !POPPED | flags & POPPED | rflags::FIXED;
        }
        Operation::Move { to, from } => to.write(regs, from.read(regs)),
        Operation::Lea { to, address } => to.write(regs, address.of(regs).0),
        Operation::Binary {
            operation,
            to,
            from,
        } => alu::binary(operation, to, from, regs),
        Operation::Unary { operation, to } => alu::unary(operation, to, regs),
        Operation::Flags { clear, set, flip } => {
            regs.rflags = (regs.rflags & !clear | set) ^ flip;
        }
        Operation::EnableInterrupts => {
            if regs.rflags & rflags::IF == 0 {
                effect = Effect::Shadow;
            }
            regs.rflags |= rflags::IF;
        }
        Operation::Call(target) => {
            let target = target.find(regs, mem)?;
            push(rip.0, regs, mem)?;
            rip = target;
        }
        Operation::Jump(target) => rip = target.find(regs, mem)?,
        Operation::Branch { condition, target } => {
            if condition.holds(regs.rflags) {
                rip = reachable(target)?;
            }
        }
        Operation::CountedBranch {
            count,
            counter,
            target,
        } => {
            let mut counted = *regs;
            if count.is_taken(counter, &mut counted) {
                rip = reachable(target)?;
            }
            *regs = counted;
        }
        Operation::Return { release } => {
            rip = reachable(Gva(mem.read_u64(Gva(regs.rsp))?))?;
            regs.rsp = regs.rsp.wrapping_add(8 + u64::from(release));
        }
        Operation::Leave => {
            let value = mem.read_u64(Gva(regs.rbp))?;
            regs.rsp = regs.rbp.wrapping_add(8);
            regs.rbp = value;
        }
    }
    regs.rip = rip.0;
    // Every instruction that completes clears RF (SDM vol. 3, "Instruction-Breakpoint Exception
    // Condition").
    regs.rflags &= !rflags::RF;
    Ok(effect)
}

fn push(value: u64, regs: &mut Regs, mem: &mut impl Memory) -> Result<(), MemoryFault> {
    let top = regs.rsp.wrapping_sub(8);
    mem.write_u64(Gva(top), value)?;
    regs.rsp = top;
    Ok(())
}
