//! Carrying out the simplest instructions on the saved registers.
//!
//! Each operation leaves what the processor would leave (SDM vol. 2, "Operation" of the
//! instruction): memory is accessed before any register changes, so on a stack fault the
//! registers are untouched and the instruction can still be run, and fault, elsewhere.

use super::{Displaced, Plan, Stack, StackFault};
use crate::Gva;
use crate::regs::{Gpr, Regs, rflags};

/// An instruction the host carries out, with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emulated {
    /// Nothing but going on: `nop` of any length, `endbr64`.
    Nop,
    /// `push r64`.
    Push(Gpr),
    /// `pop r64`.
    Pop(Gpr),
    /// `mov r64, r64`.
    Move {
        /// Destination.
        to: Gpr,
        /// Source.
        from: Gpr,
    },
    /// `mov r32, r32`, which clears the upper half of the destination.
    MoveLow {
        /// Destination.
        to: Gpr,
        /// Source.
        from: Gpr,
    },
    /// `add rsp, imm`, with the sign-extended operand.
    AddRsp(u64),
    /// `sub rsp, imm`, with the sign-extended operand.
    SubRsp(u64),
    /// `call rel32`.
    Call {
        /// The function called.
        target: Gva,
    },
    /// `jmp rel8` or `jmp rel32`.
    Jump {
        /// Where it goes.
        target: Gva,
    },
    /// `pushfq`.
    PushFlags,
}

impl Displaced {
    /// Carries the instruction out on `regs`, RIP included. Whatever RIP was is ignored. Hit
    /// path: at most one stack access, no decoding, no allocation.
    ///
    /// Three things are left to the caller where they matter: a trap flag set in `regs` raises no
    /// #DB here, a call pushes nothing on a shadow stack, and an indirect branch that waits for
    /// `endbr64` goes on waiting.
    ///
    /// # Errors
    /// When the stack cannot be accessed; then `regs` is unchanged.
    ///
    /// # Panics
    /// When the action is not [`Emulate`](super::Action::Emulate).
    pub fn emulate(&self, regs: &mut Regs, stack: &mut impl Stack) -> Result<(), StackFault> {
        let Plan::Emulate(operation) = self.plan else {
            unreachable!("{} is to be stepped, not emulated", self.at);
        };
        let mut rip = self.next();
        match operation {
            Emulated::Nop => {}
            Emulated::Push(from) => push(regs.get(from), regs, stack)?,
            Emulated::Pop(to) => {
                let value = stack.read_u64(Gva(regs.rsp))?;
                // The increment comes first: `pop rsp` leaves the word popped.
                regs.rsp = regs.rsp.wrapping_add(8);
                regs.set(to, value);
            }
            Emulated::Move { to, from } => regs.set(to, regs.get(from)),
            Emulated::MoveLow { to, from } => regs.set(to, regs.get(from) & u64::from(u32::MAX)),
            Emulated::AddRsp(operand) => {
                let sum = add(regs.rsp, operand, &mut regs.rflags);
                regs.rsp = sum;
            }
            Emulated::SubRsp(operand) => {
                let difference = subtract(regs.rsp, operand, &mut regs.rflags);
                regs.rsp = difference;
            }
            Emulated::Call { target } => {
                push(rip.0, regs, stack)?;
                rip = target;
            }
            Emulated::Jump { target } => rip = target,
            Emulated::PushFlags => push(
                regs.rflags & !(rflags::RF | rflags::VM) | rflags::FIXED,
                regs,
                stack,
            )?,
        }
        regs.rip = rip.0;
        // Every instruction that completes clears RF (SDM vol. 3, "Instruction-Breakpoint Exception
        // Condition").
        regs.rflags &= !rflags::RF;
        Ok(())
    }
}

fn push(value: u64, regs: &mut Regs, stack: &mut impl Stack) -> Result<(), StackFault> {
    let top = regs.rsp.wrapping_sub(8);
    stack.write_u64(Gva(top), value)?;
    regs.rsp = top;
    Ok(())
}

fn add(a: u64, b: u64, flags: &mut u64) -> u64 {
    let (sum, carry) = a.overflowing_add(b);
    let overflow = (a ^ sum) & (b ^ sum);
    set_arithmetic_flags(flags, a ^ b ^ sum, sum, carry, overflow);
    sum
}

fn subtract(a: u64, b: u64, flags: &mut u64) -> u64 {
    let (difference, borrow) = a.overflowing_sub(b);
    let overflow = (a ^ b) & (a ^ difference);
    set_arithmetic_flags(flags, a ^ b ^ difference, difference, borrow, overflow);
    difference
}

/// Sets the six arithmetic flags; `carries` has each bit's carry in, `overflow` the sign's overflow
/// in its top bit.
fn set_arithmetic_flags(flags: &mut u64, carries: u64, result: u64, carry: bool, overflow: u64) {
    let even_parity = (result & 0xff).count_ones().is_multiple_of(2);
    let set = [
        (carry, rflags::CF),
        (even_parity, rflags::PF),
        (carries & 0x10 != 0, rflags::AF),
        (result == 0, rflags::ZF),
        (result >> 63 != 0, rflags::SF),
        (overflow >> 63 != 0, rflags::OF),
    ]
    .into_iter()
    .filter_map(|(is_set, flag)| is_set.then_some(flag))
    .fold(0, |set, flag| set | flag);
    *flags = *flags & !rflags::ARITHMETIC | set;
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AT, Words, displaced};
    use super::*;
    use proptest::prelude::*;
    use std::arch::asm;

    const TOP: u64 = 0xffff_c900_0000_1000;

    fn regs() -> Regs {
        Regs {
            rax: 0x1111_2222_3333_4444,
            rbx: 0xffff_ffff_8765_4321,
            rsp: TOP,
            r12: 0xabcd,
            rip: 0xdead,
            rflags: rflags::FIXED | rflags::IF | rflags::CF,
            ..Regs::default()
        }
    }

    /// Emulates the instruction with words around the top of the stack, and gives what it left.
    fn run(hex: &str, regs: Regs) -> (Regs, Words) {
        let mut after = regs;
        let mut stack = Words::new(TOP - 8, &[0, 0x5555_6666_7777_8888]);
        displaced(hex).emulate(&mut after, &mut stack).unwrap();
        (after, stack)
    }

    fn next(len: u64) -> u64 {
        AT.0 + len
    }

    #[test]
    fn nops_only_go_on() {
        for (hex, len) in [
            ("90", 1),
            ("0f1f440000", 5),
            ("66662e0f1f840000000000", 11),
            ("f30f1efa", 4),
        ] {
            let (after, stack) = run(hex, regs());
            let rip = next(len);
            assert_eq!(after, Regs { rip, ..regs() }, "{hex}");
            assert_eq!(stack.at(TOP - 8), Some(0));
        }
    }

    #[test]
    fn push_stores_below_and_moves_the_stack_pointer() {
        let (after, stack) = run("53", regs());
        assert_eq!(
            after,
            Regs {
                rip: next(1),
                rsp: TOP - 8,
                ..regs()
            }
        );
        assert_eq!(stack.at(TOP - 8), Some(regs().rbx));
    }

    #[test]
    fn push_rsp_stores_the_value_before() {
        let (after, stack) = run("54", regs());
        assert_eq!((after.rsp, stack.at(TOP - 8)), (TOP - 8, Some(TOP)));
    }

    #[test]
    fn pop_loads_and_moves_the_stack_pointer() {
        let (after, _) = run("415c", regs());
        assert_eq!(
            after,
            Regs {
                rip: next(2),
                rsp: TOP + 8,
                r12: 0x5555_6666_7777_8888,
                ..regs()
            }
        );
    }

    #[test]
    fn pop_rsp_leaves_the_word_popped() {
        assert_eq!(run("5c", regs()).0.rsp, 0x5555_6666_7777_8888);
    }

    #[test]
    fn push_and_pop_of_rsp_agree_with_this_processor() {
        let (before, pushed, popped): (u64, u64, u64);
        // SAFETY: the stack pointer is back where it was at the end, through `before`.
        unsafe {
            asm!(
                "mov {before}, rsp",
                "push rsp",
                "pop {pushed}",
                "push {before}",
                "pop rsp",
                "mov {popped}, rsp",
                "mov rsp, {before}",
                before = out(reg) before,
                pushed = out(reg) pushed,
                popped = out(reg) popped,
            );
        }
        assert_eq!((pushed, popped), (before, before));
    }

    #[test]
    fn mov_copies_all_bits_and_its_32_bit_form_clears_the_upper_half() {
        let rip = next(3);
        let rax = regs().rbx;
        for hex in ["4889d8", "488bc3"] {
            assert_eq!(run(hex, regs()).0, Regs { rip, rax, ..regs() });
        }
        let rip = next(2);
        let rax = 0x8765_4321;
        for hex in ["89d8", "8bc3"] {
            assert_eq!(run(hex, regs()).0, Regs { rip, rax, ..regs() });
        }
        let rbx = 0x8765_4321;
        assert_eq!(run("89db", regs()).0, Regs { rip, rbx, ..regs() });
    }

    #[test]
    fn call_pushes_the_address_after_itself() {
        let (after, stack) = run("e8fbffff7f", regs());
        assert_eq!(
            after,
            Regs {
                rip: AT.0.wrapping_add(0x8000_0000),
                rsp: TOP - 8,
                ..regs()
            }
        );
        assert_eq!(stack.at(TOP - 8), Some(next(5)));
    }

    #[test]
    fn jumps_go_both_ways() {
        for (hex, rip) in [
            ("ebfe", AT.0),
            ("eb7f", next(2) + 0x7f),
            ("e900000080", next(5) - 0x8000_0000),
        ] {
            assert_eq!(run(hex, regs()).0, Regs { rip, ..regs() }, "{hex}");
        }
    }

    #[test]
    fn pushfq_stores_all_flags_but_resume_and_virtual_8086() {
        let kept = rflags::FIXED | rflags::IF | rflags::DF | rflags::AC | rflags::TF | 1 << 21;
        let before = Regs {
            rflags: kept | rflags::RF | rflags::VM,
            ..regs()
        };
        assert_eq!(run("9c", before).1.at(TOP - 8), Some(kept));
    }

    #[test]
    fn resume_flag_ends_with_the_instruction() {
        let before = Regs {
            rflags: regs().rflags | rflags::RF,
            ..regs()
        };
        for hex in ["90", "53", "4883ec08", "ebfe"] {
            assert_eq!(run(hex, before).0.rflags & rflags::RF, 0, "{hex}");
        }
    }

    #[test]
    fn a_stack_fault_leaves_the_registers_alone() {
        for hex in ["53", "54", "415c", "5c", "e800000000", "9c"] {
            let mut after = regs();
            let mut stack = Words::default();
            let fault = displaced(hex).emulate(&mut after, &mut stack).unwrap_err();
            assert!([TOP, TOP - 8].contains(&fault.at.0), "{hex}");
            assert_eq!(after, regs(), "{hex}");
        }
    }

    #[test]
    fn the_stack_may_wrap_around_the_address_space() {
        let mut after = Regs { rsp: 0, ..regs() };
        let mut stack = Words::new(0_u64.wrapping_sub(8), &[0]);
        displaced("53").emulate(&mut after, &mut stack).unwrap();
        assert_eq!(after.rsp, 0_u64.wrapping_sub(8));
    }

    /// The sum or difference and the arithmetic flags, from this processor.
    fn on_this_processor(is_add: bool, a: u64, b: u64) -> (u64, u64) {
        let mut result = a;
        let flags: u64;
        // SAFETY: nothing but registers and one balanced push is touched.
        unsafe {
            if is_add {
                asm!("add {a}, {b}", "pushfq", "pop {f}",
                     a = inout(reg) result, b = in(reg) b, f = lateout(reg) flags);
            } else {
                asm!("sub {a}, {b}", "pushfq", "pop {f}",
                     a = inout(reg) result, b = in(reg) b, f = lateout(reg) flags);
            }
        }
        (result, flags & rflags::ARITHMETIC)
    }

    /// The same, bit by bit.
    fn by_the_book(is_add: bool, a: u64, b: u64) -> (u64, u64) {
        // A subtraction adds the complement and one; its carry and borrow are each other's inverse.
        let operand = if is_add { b } else { !b };
        let (mut result, mut carry, mut flags) = (0, u64::from(!is_add), 0);
        for bit in 0..64 {
            let (x, y) = (a >> bit & 1, operand >> bit & 1);
            let carry_in = carry;
            result |= (x ^ y ^ carry_in) << bit;
            carry = u64::from(x + y + carry_in > 1);
            if bit == 3 && (carry == 1) == is_add {
                flags |= rflags::AF;
            }
            if bit == 63 && carry != carry_in {
                flags |= rflags::OF;
            }
        }
        let ones = (0..8).filter(|bit| result >> bit & 1 == 1).count();
        for (is_set, flag) in [
            ((carry == 1) == is_add, rflags::CF),
            (ones % 2 == 0, rflags::PF),
            (result == 0, rflags::ZF),
            (result >= 1 << 63, rflags::SF),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        (result, flags)
    }

    fn compare(a: u64, operand: i32, old_flags: u64) {
        // add/sub rsp, imm32; and imm8 where it fits.
        let mut forms = vec![
            (true, format!("4881c4{}", hex(&operand.to_le_bytes()))),
            (false, format!("4881ec{}", hex(&operand.to_le_bytes()))),
        ];
        if let Ok(short) = i8::try_from(operand) {
            forms.push((true, format!("4883c4{}", hex(&short.to_le_bytes()))));
            forms.push((false, format!("4883ec{}", hex(&short.to_le_bytes()))));
        }
        for (is_add, hex) in forms {
            let before = Regs {
                rsp: a,
                rflags: old_flags | rflags::FIXED,
                ..regs()
            };
            let b = i64::from(operand).cast_unsigned();
            let (rsp, flags) = on_this_processor(is_add, a, b);
            assert_eq!(by_the_book(is_add, a, b), (rsp, flags), "model of {hex}");
            let unchanged = before.rflags & !(rflags::ARITHMETIC | rflags::RF);
            let instruction = displaced(&hex);
            let mut after = before;
            let mut no_stack = Words::default();
            instruction.emulate(&mut after, &mut no_stack).unwrap();
            assert_eq!(
                after,
                Regs {
                    rip: instruction.next().0,
                    rsp,
                    rflags: unchanged | flags,
                    ..before
                },
                "{hex} of {a:#x}"
            );
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    const EDGES: [u64; 12] = [
        0,
        1,
        7,
        8,
        0xf,
        0x10,
        0x7fff_ffff,
        0x8000_0000,
        0x7fff_ffff_ffff_ffff,
        0x8000_0000_0000_0000,
        0xffff_ffff_ffff_fff8,
        u64::MAX,
    ];

    #[test]
    fn add_and_sub_set_the_flags_at_every_edge() {
        for a in EDGES {
            for operand in [0, 1, 8, -1, -8, 0x7f, -0x80, 0x80, i32::MAX, i32::MIN] {
                compare(a, operand, 0);
                compare(a, operand, u64::MAX);
            }
        }
    }

    proptest! {
        #[test]
        fn add_and_sub_agree_with_this_processor(
            a in any::<u64>(), operand in any::<i32>(), short in any::<i8>(), flags in any::<u64>()
        ) {
            compare(a, operand, flags);
            compare(a, i32::from(short), flags);
        }
    }
}
