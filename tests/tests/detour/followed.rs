//! A return probe whose hits take no exits, and functions on which it can be planted.

use super::interrupts::Function;
use super::{argument, assemble, next};
use hvprobe_arch::Gva;
use hvprobe_arch::condition::Condition;
use hvprobe_arch::detour::{
    Capture, EntryCapture, Exit, InstanceLayout, Instances, Layout, Member, Part, Record, Ring,
    Span,
};
use hvprobe_arch::regs::{Gpr, RegisterSet};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::probed::{Planted, Room};
use hvprobe_tests::detour::reader::Reader;
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, dword_ptr, registers::*};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

pub(crate) const LOST: u64 = 0;
pub(crate) const VETOED: u64 = 1;
pub(crate) const MISSED: u64 = 2;
/// Index of the counter that holds the free list of return probe 0. Those of other return probes follow.
pub(crate) const FREE: u64 = 8;

/// Instances and code of a return probe.
pub(crate) struct Returns<'a> {
    arena: &'a Arena,
    pub(crate) instances: Instances,
    pub(crate) entry: EntryCapture,
    pub(crate) layout: Layout,
    pub(crate) stubs: Gva,
    pub(crate) first_stub: u32,
    pub(crate) conditions: Vec<Condition>,
}

impl<'a> Returns<'a> {
    /// Creates return probe `number` of the arena, with `count` instances.
    pub(crate) fn new(
        room: &mut Room<'a>,
        arena: &'a Arena,
        ring: &Ring,
        number: u32,
        count: u32,
        captures: (EntryCapture, Capture),
    ) -> Self {
        let (entry, capture) = captures;
        let instances = Instances {
            at: arena.instances().wrapping_add(u64::from(number) << 20),
            count,
            free: arena.counter(FREE + u64::from(number)),
        };
        let layout = InstanceLayout::new(&entry).unwrap();
        let (bytes, free) = layout.initial(count, 0);
        arena.write(instances.at, &bytes);
        arena.word(instances.free).store(free, Ordering::SeqCst);
        let first_stub = 1000 * (number + 1);
        let exit = Exit {
            source: number,
            capture: &capture,
            instances: &instances,
            entry: &entry,
            lost: arena.counter(LOST),
            waits: false,
            first_stub,
        };
        let stubs = room.returns(ring, &exit).unwrap();
        Self {
            arena,
            instances,
            layout: Layout::of_return(&capture, &entry).unwrap(),
            entry,
            stubs,
            first_stub,
            conditions: Vec::new(),
        }
    }

    pub(crate) fn member(&self) -> Member<'_> {
        Member {
            conditions: &self.conditions,
            vetoed: self.arena.counter(VETOED),
            part: Part::Return {
                instances: &self.instances,
                capture: &self.entry,
                stubs: self.stubs,
                missed: self.arena.counter(MISSED),
            },
        }
    }

    /// Checks that every instance is free, and is on the free list exactly once.
    pub(crate) fn check_idle(&self) {
        let layout = InstanceLayout::new(&self.entry).unwrap();
        let at = |index: u64| {
            self.instances
                .at
                .wrapping_add(index * layout.stride() as u64)
        };
        let mut free = HashSet::new();
        let mut next = self.arena.word(self.instances.free).load(Ordering::SeqCst) & 0xffff_ffff;
        while next != 0xffff_ffff {
            assert!(next < u64::from(self.instances.count), "{next}");
            assert!(free.insert(next), "{next} is on the list twice");
            next = self.arena.word(at(next)).load(Ordering::SeqCst) & 0xffff_ffff;
        }
        assert_eq!(free.len(), usize::try_from(self.instances.count).unwrap());
        for index in 0..u64::from(self.instances.count) {
            let bytes = self.arena.read(at(index), layout.stride());
            assert_eq!(layout.read(&bytes).unwrap().slot, Gva(0), "{index}");
        }
    }
}

pub(crate) fn counter(arena: &Arena, index: u64) -> u64 {
    arena.word(arena.counter(index)).load(Ordering::SeqCst)
}

pub(crate) fn everything(arena: &Arena) -> (EntryCapture, Capture) {
    let entry = EntryCapture {
        registers: RegisterSet::default(),
        stack: vec![0, 2],
        current: Some(arena.task().current),
        cpu: Some(arena.cpu()),
    };
    let capture = Capture {
        registers: RegisterSet::default(),
        stack: Vec::new(),
        task: Some(arena.task()),
        cpu: Some(arena.cpu()),
        fetching: None,
        stack_copy: None,
    };
    (entry, capture)
}

/// Returns captures of the argument at the entry and of the result at the return.
pub(crate) fn in_and_out() -> (EntryCapture, Capture) {
    let entry = EntryCapture {
        registers: RegisterSet::from_iter([Gpr::Rdi]),
        stack: Vec::new(),
        current: None,
        cpu: None,
    };
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::Rax]),
        ..argument()
    };
    (entry, capture)
}

/// Writes a function that begins with a five-byte nop and continues with the code of `build`. Returns the span of
/// the nop.
pub(crate) fn function_with(
    arena: &Arena,
    build: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Span {
    let code = assemble(arena, arena.function(), |a| {
        a.nop_1(dword_ptr(rax + rax * 1 + 0x12))?;
        build(a)
    });
    Span::find(&code, arena.function(), arena.function()).unwrap()
}

/// Writes a function as [`function_with`] does, and plants `members` on it.
pub(crate) fn plant<'a>(
    arena: &'a Arena,
    room: &mut Room<'a>,
    ring: &Ring,
    members: &[Member<'_>],
    build: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Planted<'a> {
    let span = function_with(arena, build);
    let detour = room.detour(&span, ring, members).unwrap();
    Planted::new(arena, &span, &detour)
}

pub(crate) fn function(arena: &Arena) -> Function {
    // SAFETY: the tests' functions follow the C calling convention, and detours change no register.
    unsafe { std::mem::transmute(arena.code(arena.function())) }
}

pub(crate) fn drain(reader: &mut Reader<'_>, layout: &Layout) -> Vec<Record> {
    std::iter::from_fn(|| next(reader, layout)).collect()
}
