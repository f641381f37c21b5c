//! The guest and the engine change the guest's text, in any order and step by step.
//!
//! The guest here does what Linux does. Its ftrace compares the text that it patches with the text it left
//! there, and gives up tracing for good if they differ (kernel/trace/ftrace.c, `ftrace_bug`). A kprobe saves
//! the first byte of its instruction, and restores it later; its registration is refused if that byte is an
//! int3 of unknown origin (arch/x86/kernel/kprobes/core.c). An optimized kprobe saves and restores five bytes.
//! A switchable branch is replaced in three steps: an int3, the bytes after it, the first byte
//! (arch/x86/kernel/alternative.c). None of them checks more.
//!
//! What must hold: the guest never takes our patches for its own text and never writes into them; we never
//! write over the guest's patches; our patches are at probes and nowhere else; and when both have removed their
//! patches, the text is as it was at first.

use hvprobe_fixtures::STACK;
use hvprobe_fixtures::kernel::{FTRACE_LOCK, KPROBE_MUTEX, KPROBE_TABLE};
use proptest::prelude::*;

use super::*;
use crate::registry::hooks::watched;
use crate::testing::regs;

/// Definitions of our probes.
const PROBES: [&str; 9] = [
    "p vfs_read",
    "r vfs_read",
    "p vfs_read+9",
    "p vfs_read+13",
    "p filler_000",
    "r filler_001",
    "p filler_002",
    "p filler_002+1",
    "p filler_004",
];
/// Addresses of the guest's kprobes, with the length of the instruction there.
const KPROBES: [(&str, u64, usize); 7] = [
    ("vfs_read", 9, 1),
    ("vfs_read", 13, 4),
    ("filler_000", 0, 1),
    ("filler_000", 1, 3),
    ("filler_002", 0, 1),
    ("filler_002", 4, 1),
    ("filler_004", 1, 3),
];
/// Addresses of the guest's switchable branches, with the jump that replaces the nop.
const BRANCHES: [(u64, [u8; 5]); 1] = [(0x10, [0xe9, 0xdb, 0, 0, 0])];
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
/// Calls that the guest's ftrace may put over the nop of `vfs_read`: of the tracer, or of a program.
const CALLS: [[u8; 5]; 2] = [[0xe8, 1, 2, 3, 4], [0xe8, 5, 6, 7, 8]];
const BEGINS: &str = "ftrace_arch_code_modify_prepare";
const ENDS: &str = "ftrace_arch_code_modify_post_process";
const PREPARES: &str = "arch_prepare_kprobe";
/// Address of the guest's `struct kprobe`s: links at +0, the address at +40.
const STRUCTS: Gva = Gva(KPROBE_TABLE - 0x200);
const ADDRESS: u64 = 40;
const SIZE: u64 = 48;

#[derive(Clone, Debug)]
enum Step {
    Register(Vec<(usize, bool)>),
    /// Positions in the list, modulo its length.
    Unregister(usize),
    SetEnabled(usize, bool),
    Optimize(bool),
    Switch(bool),
    Retry,
    Check,
    /// This step and those below are the guest's: each begins an operation, or continues the one in progress.
    Trace(Option<usize>),
    Kprobe(usize),
    OptimizeKprobes,
    Branch(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let probes = prop::collection::vec((0..PROBES.len(), any::<bool>()), 1..4);
    prop_oneof![
        4 => probes.prop_map(Step::Register),
        3 => any::<usize>().prop_map(Step::Unregister),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(which, on)| Step::SetEnabled(which, on)),
        1 => any::<bool>().prop_map(Step::Optimize),
        1 => any::<bool>().prop_map(Step::Switch),
        2 => Just(Step::Retry),
        1 => Just(Step::Check),
        6 => prop::option::of(0..CALLS.len()).prop_map(Step::Trace),
        6 => (0..KPROBES.len()).prop_map(Step::Kprobe),
        3 => Just(Step::OptimizeKprobes),
        3 => (0..BRANCHES.len()).prop_map(Step::Branch),
    ]
}

/// State of a kprobe of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kprobe {
    None,
    /// The instruction has been copied; the mutex is held.
    Copied,
    Armed,
    /// Armed with a jump.
    Optimized,
}

/// Progress of the guest's ftrace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tracing {
    No,
    /// It holds its own lock.
    Locked,
    /// It also holds `text_mutex`, and has called the function before patching.
    Begun,
    Written,
}

struct Model {
    rig: Rig,
    start: Gva,
    original: Vec<u8>,
    /// The text as the guest has written it.
    own: Vec<u8>,
    tracing: Tracing,
    /// Call that replaces the nop.
    traced: [u8; 5],
    kprobes: [Kprobe; KPROBES.len()],
    /// Whether the guest may turn the kprobe into a jump.
    optimizable: [bool; KPROBES.len()],
    /// Bytes under each jump when the guest wrote it.
    copied: [[u8; 5]; KPROBES.len()],
    /// The branch that is being switched: its address, the new bytes, and the number of steps done, of three.
    branch: Option<(Gva, [u8; 5], u32)>,
}

impl Model {
    fn new() -> Self {
        let rig = Rig::optimizing();
        let start = rig.at("_stext", 0);
        let original = text(&rig);
        Self {
            start,
            own: original.clone(),
            original,
            tracing: Tracing::No,
            traced: NOP,
            kprobes: [Kprobe::None; KPROBES.len()],
            optimizable: [false; KPROBES.len()],
            copied: [[0; 5]; KPROBES.len()],
            branch: None,
            rig,
        }
    }

    fn index(&self, at: Gva) -> usize {
        usize::try_from(at.0 - self.start.0).unwrap()
    }

    /// Returns the bytes that the guest has written at `at`.
    fn own<const N: usize>(&self, at: Gva) -> [u8; N] {
        let index = self.index(at);
        self.own[index..index + N].try_into().unwrap()
    }

    /// Lets the guest write text. The text that is there must be the guest's own, without our patches.
    fn write(&mut self, at: Gva, bytes: &[u8], what: &str) {
        let index = self.index(at);
        let there = &text(&self.rig)[index..][..bytes.len()];
        let own = &self.own[index..][..bytes.len()];
        assert_eq!(there, own, "{what} finds ours at {at}");
        self.own[index..][..bytes.len()].copy_from_slice(bytes);
        self.rig.guest.write(at, bytes);
    }

    /// Lets the guest enter the function `name`, which we may watch. Returns whether it continues in that function.
    fn comes_to(&mut self, name: &str, argument: u64) -> bool {
        let here = self.rig.at(name, 0);
        if self.rig.byte(here) != INT3 {
            return true;
        }
        let caller = self.rig.at("filler_100", 3);
        self.rig.guest.write(STACK, &caller.0.to_le_bytes());
        let mut cpu = Cpu::new(&self.rig);
        cpu.regs = Regs {
            rdi: argument,
            rsp: STACK.0,
            ..regs()
        };
        let outcome = cpu.hit(here);
        let decision = run_hooks(&mut self.rig, outcome);
        cpu.resume(&decision);
        cpu.regs.rip != caller.0
    }

    /// Returns whether the guest's `text_mutex` is held.
    fn is_patching(&self) -> bool {
        matches!(self.tracing, Tracing::Begun | Tracing::Written) || self.branch.is_some()
    }

    fn trace(&mut self, call: Option<usize>) {
        let site = self.rig.at("vfs_read", 4);
        self.tracing = match self.tracing {
            Tracing::No => {
                self.lock(FTRACE_LOCK, true);
                Tracing::Locked
            }
            Tracing::Locked if self.is_patching() => Tracing::Locked,
            Tracing::Locked => {
                self.comes_to(BEGINS, 0);
                Tracing::Begun
            }
            Tracing::Begun => {
                let bytes = call.map_or(NOP, |call| CALLS[call]);
                self.write(site, &bytes, "ftrace");
                self.traced = bytes;
                Tracing::Written
            }
            Tracing::Written => {
                self.comes_to(ENDS, 0);
                self.lock(FTRACE_LOCK, false);
                Tracing::No
            }
        }
    }

    fn is_changing_kprobes(&self) -> bool {
        self.kprobes.contains(&Kprobe::Copied)
    }

    fn kprobe(&mut self, number: usize) {
        let (symbol, offset, len) = KPROBES[number];
        let at = self.rig.at(symbol, offset);
        let is_other = |other: &usize| *other != number && self.kprobes[*other] == Kprobe::Copied;
        if (0..KPROBES.len()).any(|other| is_other(&other)) {
            return;
        }
        match self.kprobes[number] {
            Kprobe::None => {
                self.lock(KPROBE_MUTEX, true);
                let kprobe = STRUCTS.wrapping_add(SIZE * number as u64);
                self.rig
                    .guest
                    .write(kprobe.wrapping_add(ADDRESS), &at.0.to_le_bytes());
                let goes_on = self.comes_to(PREPARES, kprobe.0);
                let copied = self.rig.guest.read::<5>(at);
                // The guest does not copy an int3 of its own, or from the middle of a jump.
                if goes_on && copied[0] != INT3 && self.own::<1>(at)[0] != 0xe9 {
                    let covered = self.covering(at);
                    if covered.is_none() {
                        assert_eq!(copied[..len], self.own::<5>(at)[..len], "{at} is copied");
                        self.kprobes[number] = Kprobe::Copied;
                        return;
                    }
                }
                self.lock(KPROBE_MUTEX, false);
            }
            Kprobe::Copied => {
                self.kprobes[number] = Kprobe::Armed;
                self.link();
                // The guest waits for `text_mutex`, if it is held.
                self.finish_patching();
                // An int3 of ours that was planted meanwhile belongs to the guest from now on.
                if self.rig.byte(at) == INT3 {
                    let index = self.index(at);
                    self.own[index] = INT3;
                } else {
                    self.write(at, &[INT3], "a kprobe");
                }
                let there = self.rig.guest.read::<5>(at);
                // The guest makes no jump over an instruction in which it finds an int3.
                self.optimizable[number] = !there[1..].contains(&INT3);
                self.lock(KPROBE_MUTEX, false);
            }
            Kprobe::Armed => {
                self.finish_patching();
                let saved = self.saved(at);
                self.write(at, &saved[..1], "a kprobe that goes");
                self.kprobes[number] = Kprobe::None;
                self.link();
            }
            Kprobe::Optimized => {
                self.finish_patching();
                let mut saved = self.copied[number];
                saved[0] = self.saved(at)[0];
                assert_eq!(saved, self.saved(at), "it has copied what is ours");
                self.write(at, &saved, "an optimized kprobe that goes");
                self.kprobes[number] = Kprobe::None;
                self.link();
            }
        }
    }

    /// Returns the optimized kprobe of the guest whose jump covers the instruction at `at`.
    fn covering(&self, at: Gva) -> Option<usize> {
        (0..KPROBES.len()).find(|number| {
            let (symbol, offset, _) = KPROBES[*number];
            let start = self.rig.at(symbol, offset);
            self.kprobes[*number] == Kprobe::Optimized
                && (1..5).contains(&at.0.wrapping_sub(start.0))
        })
    }

    /// Returns the original bytes at `at`. Besides its kprobes, the guest changes nothing there.
    fn saved(&self, at: Gva) -> [u8; 5] {
        let index = self.index(at);
        self.original[index..index + 5].try_into().unwrap()
    }

    /// Lets the guest's optimizer turn an armed kprobe into a jump, if it may. The optimizer does not check the
    /// text under the jump again.
    fn optimize_kprobe(&mut self, number: usize) {
        let (symbol, offset, _) = KPROBES[number];
        let at = self.rig.at(symbol, offset);
        let others = (1..5).any(|byte| {
            let inside = at.wrapping_add(byte);
            (0..KPROBES.len()).any(|other| {
                let (symbol, offset, _) = KPROBES[other];
                self.kprobes[other] != Kprobe::None && self.rig.at(symbol, offset) == inside
            })
        });
        if self.kprobes[number] != Kprobe::Armed
            || self.is_changing_kprobes()
            || !self.optimizable[number]
            || others
            || self.covering(at).is_some()
        {
            return;
        }
        self.finish_patching();
        self.copied[number] = self.rig.guest.read(at);
        self.write(at, &[0xe9, 1, 2, 3, 4], "the guest's optimizer");
        self.kprobes[number] = Kprobe::Optimized;
    }

    fn branch(&mut self, number: usize) {
        let (offset, switched) = BRANCHES[number];
        let at = self.rig.at("sites", offset);
        let (at, bytes, done) = match self.branch {
            None if self.is_patching() => return,
            None => {
                let is_on = self.own::<5>(at) == switched;
                (at, if is_on { NOP } else { switched }, 0)
            }
            Some(under_way) => under_way,
        };
        match done {
            0 => self.write(at, &[INT3], "a switch"),
            1 => self.write(at.wrapping_add(1), &bytes[1..], "a switch"),
            _ => self.write(at, &bytes[..1], "a switch"),
        }
        self.branch = (done < 2).then_some((at, bytes, done + 1));
    }

    /// Lets the holder of `text_mutex` continue until it releases the mutex.
    fn finish_patching(&mut self) {
        while self.branch.is_some() {
            self.branch(0);
        }
        while self.tracing != Tracing::No {
            self.trace(None);
        }
        assert!(!self.is_patching());
    }

    /// Marks this mutex as held or free.
    fn lock(&self, mutex: u64, is: bool) {
        let held = u64::from(is).to_le_bytes();
        self.rig.guest.write(Gva(mutex), &held);
    }

    /// Writes the guest's table of kprobes, as one chain.
    fn link(&self) {
        let mut link = Gva(KPROBE_TABLE + 8 * 63);
        for (number, kprobe) in self.kprobes.iter().enumerate() {
            if matches!(kprobe, Kprobe::Armed | Kprobe::Optimized) {
                let at = STRUCTS.wrapping_add(SIZE * number as u64);
                self.rig.guest.write(link, &at.0.to_le_bytes());
                link = at;
            }
        }
        self.rig.guest.write(link, &[0; 8]);
    }

    fn chosen(&self, which: usize) -> Option<ProbeId> {
        let list = self.rig.list();
        Some(list[which.checked_rem(list.len())?].id)
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Register(batch) => {
                let specs: Vec<_> = batch
                    .iter()
                    .map(|&(which, disabled)| ProbeSpec {
                        disabled,
                        ..spec(PROBES[which])
                    })
                    .collect();
                // The batch may be refused because of the guest's patches.
                let _maybe = self.rig.try_register(&specs);
            }
            Step::Unregister(which) => {
                if let Some(id) = self.chosen(*which) {
                    self.rig.unregister(&[id]).expect("it stops");
                }
            }
            Step::SetEnabled(which, on) => {
                if let Some(id) = self.chosen(*which) {
                    let _maybe = self.rig.registry.set_enabled(&[id], *on, &*self.rig.guest);
                }
            }
            Step::Optimize(on) => {
                let _maybe = self.rig.registry.set_optimization(*on, &*self.rig.guest);
            }
            Step::Switch(on) => {
                let _maybe = self.rig.registry.set_armed(*on, &*self.rig.guest);
            }
            Step::Retry => self.retry(),
            Step::Check => self.rig.registry.check_text(&*self.rig.guest),
            Step::Trace(call) => self.trace(*call),
            Step::Kprobe(number) => self.kprobe(*number),
            Step::OptimizeKprobes => {
                (0..KPROBES.len()).for_each(|number| self.optimize_kprobe(number))
            }
            Step::Branch(number) => self.branch(*number),
        }
    }

    /// Does what is due once a second.
    fn retry(&mut self) {
        self.rig.registry.retry_ftrace(&*self.rig.guest);
        self.rig.registry.retry_jumps(&*self.rig.guest);
    }

    /// Checks that the text differs from the guest's own only where there is a patch of ours.
    fn check(&self) {
        let mut ours = Vec::new();
        for probe in self.rig.list() {
            let optimized = probe.mechanism == Some(Mechanism::Optimized);
            if let Some(at) = probe.addr.filter(|_| !probe.disabled) {
                ours.push((at, if optimized { 5 } else { 1 }));
            }
        }
        for name in watched() {
            for offset in [0, 5] {
                ours.push((self.rig.at(name, offset), 1));
            }
        }
        let there = text(&self.rig);
        let differ = (0..there.len()).filter(|index| there[*index] != self.own[*index]);
        for index in differ {
            let at = self.start.wrapping_add(index as u64);
            let owner = ours
                .iter()
                .find(|(start, len)| (0..*len).contains(&at.0.wrapping_sub(start.0)));
            let (start, _) = owner.unwrap_or_else(|| panic!("{:#x} at {at}", there[index]));
            if at == *start {
                assert!(
                    [INT3, 0xe9].contains(&there[index]),
                    "{:#x} at {at}",
                    there[index]
                );
            }
        }
    }

    /// Both sides remove all their patches.
    fn end(&mut self) {
        self.finish_patching();
        let copied = |it: &Kprobe| *it == Kprobe::Copied;
        if let Some(number) = self.kprobes.iter().position(copied) {
            self.kprobe(number);
        }
        for number in 0..KPROBES.len() {
            while self.kprobes[number] != Kprobe::None {
                self.kprobe(number);
                self.check();
            }
        }
        while self.traced != NOP || self.tracing != Tracing::No {
            self.trace(None);
        }
        let at = self.rig.at("sites", BRANCHES[0].0);
        while self.own::<5>(at) != NOP || self.branch.is_some() {
            self.branch(0);
        }
        self.check();
        self.rig
            .registry
            .unregister_all(&*self.rig.guest)
            .expect("it stops");
        assert!(text(&self.rig) == self.own, "something of ours is left");
        assert!(
            self.own == self.original,
            "something of the guest's is left"
        );
    }
}

fn text(rig: &Rig) -> Vec<u8> {
    let (start, end) = (rig.at("_stext", 0), rig.at("_etext", 0));
    let mut bytes = vec![0; usize::try_from(end.0 - start.0).unwrap()];
    let tables = hvprobe_fixtures::tables();
    tables
        .read(&rig.guest.mem, start, &mut bytes)
        .expect("mapped");
    bytes
}

fn run(steps: &[Step]) {
    let mut model = Model::new();
    for step in steps {
        model.take(step);
        model.check();
    }
    model.end();
}

proptest! {
    #[test]
    fn neither_comes_in_the_others_way(steps in prop::collection::vec(step(), 0..60)) {
        run(&steps);
    }
}
