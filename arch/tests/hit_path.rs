//! What runs on every hit allocates nothing.

use hvprobe_arch::insn::{Action, GateHead, Stack, StackFault, StepEnd, classify};
use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::paging::{Levels, PageTables};
use hvprobe_arch::{Gpa, Gva, Regs, boot};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator as it came; the counter is a constant
// thread-local without a destructor, so touching it never allocates.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, that is from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Guest memory from address 0 on.
struct Memory(RefCell<Vec<u8>>);

impl Memory {
    fn range(at: Gpa, len: usize) -> std::ops::Range<usize> {
        let start = usize::try_from(at.0).unwrap_or(usize::MAX);
        start..start.saturating_add(len)
    }
}

impl PhysMemory for Memory {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
        let len = into.len();
        let memory = self.0.borrow();
        let from = memory.get(Self::range(at, len));
        into.copy_from_slice(from.ok_or(OutOfRange { at, len })?);
        Ok(())
    }

    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
        let len = bytes.len();
        let mut memory = self.0.borrow_mut();
        let to = memory.get_mut(Self::range(at, len));
        to.ok_or(OutOfRange { at, len })?.copy_from_slice(bytes);
        Ok(())
    }
}

/// The stack of a guest, through its page tables.
struct Walked<'a>(&'a Memory, PageTables);

impl Stack for Walked<'_> {
    fn read_u64(&mut self, at: Gva) -> Result<u64, StackFault> {
        let word = self.1.read_u64(self.0, at);
        word.map_err(|cause| StackFault { at, cause })
    }

    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), StackFault> {
        let written = self.1.write(self.0, at, &value.to_le_bytes());
        written.map_err(|cause| StackFault { at, cause })
    }
}

#[test]
fn hits_are_carried_out_without_allocating() {
    let tables = Gpa(0x1000);
    let memory = Memory(RefCell::new(vec![0; 0x20_0000]));
    memory
        .write(tables, &boot::identity_tables(tables))
        .unwrap();
    let walk = PageTables {
        root: tables,
        levels: Levels::Four,
    };
    let mut stack = Walked(&memory, walk);
    let (at, slot) = (Gva(0xffff_ffff_8100_0000), Gva(0xffff_ffff_8080_0000));
    let top = 0x10_0000;

    let emulated = [
        &[0x90_u8][..],
        &[0x55],
        &[0x5d],
        &[0x48, 0x89, 0xe5],
        &[0x48, 0x83, 0xec, 8],
        &[0xe8, 0, 0, 0, 0],
        &[0xeb, 0],
        &[0x9c],
    ];
    let stepped = [&[0x48_u8, 0x8b, 7][..], &[0x74, 0], &[0xff, 0xd0], &[0xc3]];
    let emulated = emulated.map(|code| classify(code, at).unwrap());
    let stepped = stepped.map(|code| {
        let displaced = classify(code, at).unwrap();
        let copy = displaced.relocate(slot).unwrap();
        (displaced, copy)
    });
    let gate = GateHead::analyse(&[0x0f, 0x01, 0xca, 0xfc], at).unwrap();

    let before = ALLOCATIONS.with(Cell::get);
    let mut regs = Regs {
        rsp: top,
        ..Regs::default()
    };
    for displaced in &emulated {
        assert!(matches!(displaced.action(), Action::Emulate(_)));
        displaced.emulate(&mut regs, &mut stack).unwrap();
    }
    for (displaced, copy) in &stepped {
        regs.rip = copy.next().0;
        stack.write_u64(Gva(regs.rsp), copy.next().0).unwrap();
        let end = displaced.after_step(copy, &mut regs, &mut stack).unwrap();
        assert_eq!(end, StepEnd::Done);
    }
    gate.apply(&mut regs);
    let unmapped = Regs {
        rsp: u64::MAX,
        ..regs
    };
    assert!(emulated[1].emulate(&mut { unmapped }, &mut stack).is_err());
    assert_eq!(ALLOCATIONS.with(Cell::get), before);
}
