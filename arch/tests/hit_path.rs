//! Checks that code that runs on every hit allocates nothing.

use hvprobe_arch::insn::{Action, Displaced, Effect, GateHead, Memory, MemoryFault, classify};
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
struct Ram(RefCell<Vec<u8>>);

impl Ram {
    fn range(at: Gpa, len: usize) -> std::ops::Range<usize> {
        let start = usize::try_from(at.0).unwrap_or(usize::MAX);
        start..start.saturating_add(len)
    }
}

impl PhysMemory for Ram {
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

/// The memory of a guest, accessed through its page tables.
struct Walked<'a>(&'a Ram, PageTables);

impl Memory for Walked<'_> {
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault> {
        let word = self.1.read_u64(self.0, at);
        word.map_err(|cause| MemoryFault { at, cause })
    }

    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), MemoryFault> {
        let written = self.1.write(self.0, at, &value.to_le_bytes());
        written.map_err(|cause| MemoryFault { at, cause })
    }
}

/// At least one instruction of each kind that the host emulates.
const EMULATED: &[&[u8]] = &[
    &[0x90],                            // nop
    &[0x55],                            // push rbp
    &[0x5d],                            // pop rbp
    &[0x6a, 0x02],                      // push 2
    &[0x9d],                            // popfq
    &[0x48, 0x89, 0xe5],                // mov rbp, rsp
    &[0xc9],                            // leave
    &[0x48, 0x83, 0xec, 8],             // sub rsp, 8
    &[0xf6, 0xc4, 1],                   // test ah, 1
    &[0x66, 0xff, 0xc8],                // dec ax
    &[0x48, 0x8d, 0x44, 0x24, 0xf8],    // lea rax, [rsp-8]
    &[0xe8, 0, 0, 0, 0],                // call
    &[0xff, 0xd0],                      // call rax
    &[0xff, 0x24, 0x24],                // jmp [rsp]
    &[0xff, 0x14, 0x25, 0, 0, 0x10, 0], // call [0x100000]
    &[0xc2, 8, 0],                      // ret 8
    &[0xeb, 0],                         // jmp
    &[0x74, 0],                         // je
    &[0xe2, 0],                         // loop
    &[0xfa],                            // cli
    &[0xfc],                            // cld
    &[0x9c],                            // pushfq
];

#[test]
fn hits_are_carried_out_without_allocating() {
    let tables = Gpa(0x1000);
    let ram = Ram(RefCell::new(vec![0; 0x20_0000]));
    ram.write(tables, &boot::identity_tables(tables)).unwrap();
    let walk = PageTables {
        root: tables,
        levels: Levels::Four,
    };
    let mut memory = Walked(&ram, walk);
    let (at, slot) = (Gva(0xffff_ffff_8100_0000), Gva(0xffff_ffff_8080_0000));
    let classified = |code: &&[u8]| classify(code, at).unwrap();

    let emulated: Vec<Displaced> = EMULATED.iter().map(classified).collect();
    let sti = classify(&[0xfb], at).unwrap();
    let copied: Vec<_> = [&[0x48_u8, 0x8b, 7][..], &[0x74, 0], &[0xf3, 0x48, 0xa5]]
        .iter()
        .map(|code| {
            let displaced = classified(code);
            let slots = [displaced.boosted(slot), displaced.trapped(slot)];
            (displaced, slots.map(Result::unwrap))
        })
        .collect();
    let gate = GateHead::analyse(&[0x0f, 0x01, 0xca, 0xfc], at).unwrap();

    let before = ALLOCATIONS.with(Cell::get);
    let mut regs = Regs {
        rsp: 0x10_0000,
        ..Regs::default()
    };
    for displaced in &emulated {
        assert!(matches!(displaced.action(), Action::Emulate(_)));
        let effect = displaced.emulate(&mut regs, &mut memory).unwrap();
        assert_eq!(effect, Effect::Done);
    }
    let effect = sti.emulate(&mut regs, &mut memory).unwrap();
    assert_eq!(effect, Effect::Shadow);
    for (displaced, [boosted, trapped]) in &copied {
        assert_eq!(
            displaced.action() == Action::Boost,
            displaced.bytes()[0] != 0x74
        );
        let next = Some(displaced.next());
        assert_eq!(displaced.in_place(boosted, boosted.next()), next);
        assert_eq!(displaced.trap_end(trapped, trapped.next()), next);
    }
    gate.apply(&mut regs);
    let unmapped = Regs {
        rsp: u64::MAX,
        ..regs
    };
    assert!(emulated[1].emulate(&mut { unmapped }, &mut memory).is_err());
    assert_eq!(ALLOCATIONS.with(Cell::get), before);
}
