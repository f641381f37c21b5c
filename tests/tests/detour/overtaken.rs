//! Tests the free list of a return probe when other calls overtake one call, between any two instructions of the
//! detour or of the code to which a followed call returns.
//!
//! Everything happens in one thread, in an order that the test decides. A call inside the function has left the
//! bench by an exit. A call that stopped in generated code has left the bench by an int3 there, and is resumed with
//! the registers that it had there.

use super::followed::{Returns, drain, function_with, in_and_out};
use super::quiet;
use super::stops::{instructions, run_until};
use hvprobe_arch::Gva;
use hvprobe_arch::detour::{InstanceLayout, STUB};
use hvprobe_arch::regs::{Gpr, Regs};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, State};
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use iced_x86::{Code, Instruction, Mnemonic, Register};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// Exit of the bench: a call has stopped at an int3.
const STANDS: u64 = 0;
/// Exit of the bench: a call has returned.
const RETURNED: u64 = 1;
/// Exit of the bench: a call is inside the function.
const INSIDE: u64 = 2;
const NOP: u8 = 0x90;
/// Number of instances: the maximum number of simultaneous calls.
const COUNT: u64 = 4;

/// Calls of one function, each with its own stack.
struct Calls<'a> {
    arena: &'a Arena,
    bench: &'a Bench<'a>,
    returns: &'a Returns<'a>,
    /// Every earlier value of the free list's word.
    words: HashSet<u64>,
    word: Option<u64>,
    tagged: bool,
}

impl<'a> Calls<'a> {
    fn new(arena: &'a Arena, bench: &'a Bench<'a>, returns: &'a Returns<'a>, tagged: bool) -> Self {
        let mut calls = Self {
            arena,
            bench,
            returns,
            words: HashSet::new(),
            word: None,
            tagged,
        };
        calls.note_word();
        calls
    }

    /// Notes the value of the free list's word. With tags, a value that differs from the last one must be one that
    /// the word has never had.
    fn note_word(&mut self) {
        let word = self.word(self.returns.instances.free);
        if self.word != Some(word) {
            self.words.extend(self.word.replace(word));
            let again = self.tagged && self.words.contains(&word);
            assert!(!again, "{word:#x} has been there before");
        }
    }

    /// Returns the address of the stack slot with the return address of `call`.
    fn slot(&self, call: u64) -> Gva {
        self.arena.stack().start.wrapping_add(0x1000 * (call + 1))
    }

    fn word(&self, at: Gva) -> u64 {
        self.arena.word(at).load(Ordering::SeqCst)
    }

    /// Runs a call from `at` on until it leaves the bench, which must be by `exit`. Returns its state there.
    fn go(&self, at: Gva, state: &State, exit: u64) -> State {
        let left = self.bench.run(at, state);
        assert_eq!(left.exit, exit);
        left.state
    }

    /// Runs a call from `at` on until it reaches `stop`, or leaves the bench by `exit` before that. Returns its
    /// state at `stop`, or `None` if it did not reach that.
    fn go_until(&self, at: Gva, state: &State, exit: u64, stop: Gva) -> Option<State> {
        let left = run_until(self.bench, at, state, stop, STANDS);
        assert!(left.exit == STANDS || left.exit == exit, "{}", left.exit);
        (left.exit == STANDS).then_some(left.state)
    }

    /// Writes the return address of `call` to its stack. Returns the state in which the call enters the function.
    fn made(&self, call: u64) -> State {
        let slot = self.slot(call);
        let back = self.bench.exit(RETURNED);
        self.arena.word(slot).store(back.0, Ordering::SeqCst);
        self.registers(slot, call)
    }

    /// Returns the state in which the function returns from `call`.
    fn done(&self, call: u64) -> State {
        self.registers(self.slot(call).wrapping_add(8), call)
    }

    fn registers(&self, rsp: Gva, call: u64) -> State {
        State {
            regs: Regs {
                rsp: rsp.0,
                rdi: call,
                rax: !call,
                ..Regs::default()
            },
            vectors: [[0; 4]; 16],
        }
    }

    fn enter(&mut self, call: u64) {
        self.go(self.arena.function(), &self.made(call), INSIDE);
        self.note_word();
    }

    fn leave(&mut self, call: u64) {
        let stub = Gva(self.word(self.slot(call)));
        let left = self.go(stub, &self.done(call), RETURNED);
        assert_eq!(left.regs.rsp, self.slot(call).0 + 8);
        assert_eq!(left.regs.get(Gpr::Rax), !call);
        self.note_word();
    }

    /// Returns the number of the instance of `call`, which must be inside the function.
    fn instance(&self, call: u64) -> u64 {
        let slot = self.slot(call);
        let offset = Gva(self.word(slot)).offset_from(self.returns.stubs);
        let index = offset.expect("a stub") / u64::from(STUB);
        assert!(index < COUNT, "{index}");
        let layout = InstanceLayout::new(&self.returns.entry).unwrap();
        let at = index * layout.stride() as u64;
        let at = self.returns.instances.at.wrapping_add(at);
        let bytes = self.arena.read(at, layout.stride());
        let instance = layout.read(&bytes).unwrap();
        assert_eq!(instance.slot, slot, "{index} is another call's than {call}");
        assert_eq!(instance.regs.rdi, call);
        index
    }

    fn assert_apart(&self, calls: &[u64]) {
        let instances: HashSet<u64> = calls.iter().map(|call| self.instance(*call)).collect();
        assert_eq!(instances.len(), calls.len(), "{calls:?}: {instances:?}");
    }

    /// Makes two other calls take the first and the second instance of the free list, and makes the first of these
    /// calls return. Then the list begins with the same instance as before, but continues differently.
    fn overtake(&mut self) {
        self.enter(1);
        self.enter(2);
        self.leave(1);
    }
}

/// Returns whether the instruction increments the tag.
fn is_count(instruction: &Instruction) -> bool {
    instruction.code() == Code::Inc_rm32 && instruction.op0_register() == Register::EDX
}

fn is_exchange(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Cmpxchg
}

#[test]
fn a_call_that_is_overtaken_at_any_instruction_has_an_instance_of_its_own() {
    overtake_everywhere(true);
}

#[test]
#[should_panic(expected = "is another call's")]
fn without_the_tag_two_calls_come_to_have_one_instance() {
    overtake_everywhere(false);
}

/// Overtakes a call at every instruction; `tagged` decides whether the free list's tag is incremented.
fn overtake_everywhere(tagged: bool) {
    let arena = Arena::new().unwrap();
    let bench = Bench::new(&arena).unwrap();
    let ring = quiet(&arena, 64);
    let mut room = Room::new(&arena);
    let count = u32::try_from(COUNT).unwrap();
    let returns = Returns::new(&mut room, &arena, &ring, 0, count, in_and_out());
    let inside = bench.exit(INSIDE);
    let span = function_with(&arena, |a| a.jmp(inside.0));
    let detour = room.detour(&span, &ring, &[returns.member()]).unwrap();
    let _planted = Planted::new(&arena, &span, &detour);
    let mut reader = Reader::new(&arena, ring);
    let mut calls = Calls::new(&arena, &bench, &returns, tagged);

    let tail = detour.tail();
    let entering = instructions(&arena, detour.at(), |it| it.ip() < tail.0);
    // After the stubs comes the code that they share. Its part after the return instruction is for a full ring.
    let common = returns.stubs.wrapping_add(COUNT * u64::from(STUB));
    let leaving = instructions(&arena, common, |it| it.mnemonic() != Mnemonic::Ret);
    if !tagged {
        let counts = entering.iter().chain(&leaving).filter(|it| is_count(it));
        for instruction in counts {
            arena.write(Gva(instruction.ip()), &[NOP; 2]);
        }
    }
    let mut exchanges = [0, 0];
    for (instructions, enters) in [(&entering, true), (&leaving, false)] {
        let mut stood = 0;
        for instruction in instructions {
            let stop = Gva(instruction.ip());
            let (at, state, exit) = if enters {
                (arena.function(), calls.made(0), INSIDE)
            } else {
                calls.enter(0);
                (Gva(calls.word(calls.slot(0))), calls.done(0), RETURNED)
            };
            let standing = calls.go_until(at, &state, exit, stop);
            calls.note_word();
            // If the call did not reach the instruction, it is overtaken afterwards: a call does not execute every
            // instruction.
            if let Some(state) = standing {
                stood += 1;
                exchanges[usize::from(enters)] += usize::from(is_exchange(instruction));
                calls.overtake();
                calls.go(stop, &state, exit);
                calls.note_word();
            } else {
                calls.overtake();
            }
            if enters {
                calls.enter(3);
                calls.assert_apart(&[0, 2, 3]);
                calls.leave(0);
            } else {
                calls.enter(3);
                calls.assert_apart(&[2, 3]);
            }
            calls.leave(2);
            calls.leave(3);
            returns.check_idle();
            let records = drain(&mut reader, &returns.layout);
            let mut made: Vec<u64> = records.iter().map(|it| it.call.unwrap().regs.rdi).collect();
            made.sort_unstable();
            assert_eq!(made, [0, 1, 2, 3]);
        }
        assert!(stood > 20, "{stood} of {}", instructions.len());
    }
    // A leaving call has two exchanges: one frees the instance, and one reserves the record. An entering call has
    // one.
    assert_eq!(exchanges, [2, 1]);
}
