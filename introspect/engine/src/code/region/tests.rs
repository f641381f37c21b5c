//! Tests of the region in page tables of its own.

use hvprobe_arch::insn::{classify, text};
use hvprobe_arch::trap::GATE_PORT;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_fixtures::{HIDDEN, Mapper, Memory, tables};
use hvprobe_hit::region::{KERNEL_WINDOW, Window};

use super::*;

const AT: Gva = Gva(0xffff_ffff_8100_0000);

/// Returns memory with page tables that map an address above the window, so that the window's tables exist.
fn memory(region: u64) -> Memory {
    let mem = Memory::new(region);
    Mapper::new(&mem).map(AT, Gpa(0));
    mem
}

fn region(size: u64) -> (Memory, HiddenRegion) {
    (memory(size), HiddenRegion::new(HIDDEN, size, KERNEL_WINDOW))
}

fn code(at: Gva) -> SlotCode {
    classify(&[0x48, 0x8b, 0x47, 0x08], AT)
        .unwrap()
        .boosted(at)
        .unwrap()
}

fn entry_at(mem: &Memory, at: Gva) -> (Gpa, u64) {
    tables().entry_at(mem, at, 2).unwrap()
}

#[test]
fn pages_in_use_are_executable_and_never_writable_and_nothing_else_is_mapped() {
    let (mem, mut region) = region(7 * PAGE);
    region.map(&mem, &tables()).unwrap();
    region.build_idt(&mem, &[0; IDT_SIZE]).unwrap();
    for _ in 0..2 * SLOTS_PER_PAGE {
        region.take(&mem, Some).unwrap();
    }
    let start = KERNEL_WINDOW.start;
    for page in 0..512 {
        let mapping = tables().translate(&mem, start.wrapping_add(page * PAGE));
        if !(1..5).contains(&page) {
            assert!(mapping.is_err(), "page {page} is mapped");
            continue;
        }
        let mapping = mapping.unwrap();
        assert_eq!(mapping.gpa, HIDDEN.wrapping_add(page * PAGE));
        // The no-execute bit is reserved on some guests.
        assert!(mapping.executable && !mapping.writable && !mapping.user);
    }
}

#[test]
fn every_slot_lies_in_a_mapped_page_whatever_the_size() {
    for size in [
        0,
        1,
        PAGE,
        2 * PAGE,
        3 * PAGE,
        3 * PAGE + 32,
        4 * PAGE,
        4 * PAGE + 100,
        6 * PAGE - 1,
    ] {
        let (mem, mut region) = region(size);
        if region.map(&mem, &tables()).is_err() {
            assert!(size < 2 * PAGE, "{size}");
            continue;
        }
        let mut slots = 0;
        while let Ok(slot) = region.take(&mem, Some) {
            let mut bytes = [0; SLOT_SIZE];
            tables().read(&mem, slot, &mut bytes).unwrap();
            assert_eq!(bytes, [INT3; SLOT_SIZE]);
            slots += 1;
        }
        assert_eq!(slots, (size / PAGE).saturating_sub(3) * 128, "{size}");
    }
}

#[test]
fn one_page_table_is_the_most_that_is_used() {
    let (mem, mut region) = region(3 << 20);
    region.map(&mem, &tables()).unwrap();
    let slots = std::iter::from_fn(|| region.take(&mem, Some).ok());
    assert_eq!(slots.count(), 509 * 128);
}

#[test]
fn first_empty_entry_is_taken_and_taken_ones_are_not_touched() {
    let (mem, mut region) = region(4 * PAGE);
    let (first, _) = entry_at(&mem, KERNEL_WINDOW.start);
    mem.write(first, &2_u64.to_le_bytes()).unwrap();
    region.map(&mem, &tables()).unwrap();
    let second = KERNEL_WINDOW.start.wrapping_add(TABLE_SPAN);
    assert_eq!(
        region.take(&mem, Some),
        Ok(second.wrapping_add(SLOT_PAGES * PAGE))
    );
    assert_eq!(mem.read_u64(first), Ok(2));
}

#[test]
fn full_window_changes_nothing() {
    let (mem, _) = region(4 * PAGE);
    let window = Window {
        start: AT,
        end: AT.wrapping_add(TABLE_SPAN),
    };
    let mut region = HiddenRegion::new(HIDDEN, 4 * PAGE, window);
    let before = mem.snapshot();
    let result = region.map(&mem, &tables());
    assert_eq!(result, Err(HiddenError::WindowFull(window)));
    assert!(mem.snapshot() == before);
}

#[test]
fn mapping_twice_is_mapping_once() {
    let (mem, mut region) = region(4 * PAGE);
    region.map(&mem, &tables()).unwrap();
    let slot = region.take(&mem, Some).unwrap();
    region.fill(&mem, &code(slot)).unwrap();
    let before = mem.snapshot();
    region.map(&mem, &tables()).unwrap();
    assert!(mem.snapshot() == before);
}

#[test]
fn unmapping_clears_the_entry_even_after_the_processor_marked_it() {
    let (mem, mut region) = region(4 * PAGE);
    let before = mem.visible();
    region.map(&mem, &tables()).unwrap();
    let (at, value) = entry_at(&mem, KERNEL_WINDOW.start);
    mem.write(at, &(value | entry::DIRTY).to_le_bytes())
        .unwrap();
    region.unmap(&mem).unwrap();
    assert!(mem.visible() == before);
    assert!(region.take(&mem, Some).is_err());
    region.unmap(&mem).unwrap();
}

#[test]
fn entry_the_guest_changed_is_left_alone_and_another_is_used_next() {
    let (mem, mut region) = region(4 * PAGE);
    region.map(&mem, &tables()).unwrap();
    let slot = region.take(&mem, Some).unwrap();
    region.release(&mem, slot).unwrap();
    let (at, _) = entry_at(&mem, KERNEL_WINDOW.start);
    mem.write(at, &0x5000_u64.to_le_bytes()).unwrap();
    let result = region.unmap(&mem);
    assert_eq!(result, Err(HiddenError::EntryChanged { at }));
    assert_eq!(mem.read_u64(at), Ok(0x5000));
    region.map(&mem, &tables()).unwrap();
    let again = region.take(&mem, Some).unwrap();
    assert_eq!(again, slot.wrapping_add(TABLE_SPAN));
    region.fill(&mem, &code(again)).unwrap();
    let mut bytes = [0; SLOT_SIZE];
    tables().read(&mem, again, &mut bytes).unwrap();
    assert_eq!(&bytes, code(again).bytes());
}

#[test]
fn where_the_region_was_nothing_else_comes_and_it_comes_back_there() {
    let mem = memory(crate::testing::WHOLE_HIDDEN.0 + HiddenRegion::FULL_SIZE);
    let mut region = crate::testing::whole_hidden();
    region.map(&mem, &tables()).unwrap();
    let before = region.fixtures().unwrap().stub(0);
    region.unmap(&mem).unwrap();
    let detours = region.detours.as_mut().unwrap();
    let ring = detours.reserve(&mem, &tables()).unwrap();
    detours.enter(&mem, &tables()).unwrap();
    assert!(ring.head >= KERNEL_WINDOW.start.wrapping_add(TABLE_SPAN));
    assert_eq!(entry_at(&mem, KERNEL_WINDOW.start).1, 0);
    region.map(&mem, &tables()).unwrap();
    assert_eq!(region.fixtures().unwrap().stub(0), before);
}

#[test]
fn released_slot_is_taken_again_and_holds_int3_meanwhile() {
    let (mem, mut region) = region(4 * PAGE);
    region.map(&mem, &tables()).unwrap();
    let (a, b) = (
        region.take(&mem, Some).unwrap(),
        region.take(&mem, Some).unwrap(),
    );
    assert_ne!(a, b);
    region.fill(&mem, &code(a)).unwrap();
    assert!(!region.is_idle());
    region.release(&mem, a).unwrap();
    let mut bytes = [0; SLOT_SIZE];
    tables().read(&mem, a, &mut bytes).unwrap();
    assert_eq!(bytes, [INT3; SLOT_SIZE]);
    assert_eq!(region.take(&mem, Some), Ok(a));
    region.release(&mem, a).unwrap();
    region.release(&mem, b).unwrap();
    assert!(region.is_idle());
}

#[test]
fn slots_are_taken_from_the_end_for_what_is_not_reached_from_the_beginning() {
    let (mem, mut region) = region(6 * PAGE);
    region.map(&mem, &tables()).unwrap();
    let base = KERNEL_WINDOW.start.wrapping_add(SLOT_PAGES * PAGE);
    let end = base.wrapping_add(3 * PAGE);
    let high = |slot| Some(slot).filter(|slot| *slot >= base.wrapping_add(PAGE));
    let is_mapped = |at| tables().translate(&mem, at).is_ok();

    let last = region.take(&mem, high).unwrap();
    assert_eq!(last, end.wrapping_sub(SLOT));
    assert_eq!(region.last_slot(), Some(last));
    assert!(is_mapped(last) && !is_mapped(base));
    assert_eq!(region.take(&mem, Some), Ok(base));
    // A slot that is too low is not taken, and stays free.
    region.release(&mem, base).unwrap();
    assert_eq!(region.take(&mem, high), Ok(last.wrapping_sub(SLOT)));
    assert_eq!(region.take(&mem, Some), Ok(base));
    let nowhere = |_| None::<Gva>;
    assert_eq!(region.take(&mem, nowhere), Err(HiddenError::NoneInReach));

    // The two ends meet within some page, and no slot is given twice.
    let mut taken = vec![base, last, last.wrapping_sub(SLOT)];
    for n in 0.. {
        let next = match n % 3 {
            0 => region.take(&mem, high),
            _ => region.take(&mem, Some),
        };
        let Ok(next) = next else { break };
        let mut bytes = [0; SLOT_SIZE];
        tables().read(&mem, next, &mut bytes).unwrap();
        assert_eq!(bytes, [INT3; SLOT_SIZE]);
        region.fill(&mem, &code(next)).unwrap();
        taken.push(next);
    }
    let full = HiddenError::OutOfSlots(3 * SLOTS_PER_PAGE);
    assert_eq!(region.take(&mem, Some), Err(full));
    for slot in &taken {
        let mut bytes = [0; SLOT_SIZE];
        tables().read(&mem, *slot, &mut bytes).unwrap();
        let filled = bytes == *code(*slot).bytes();
        assert!(filled || [base, last, last.wrapping_sub(SLOT)].contains(slot));
        region.release(&mem, *slot).unwrap();
    }
    assert_eq!(taken.len() as u64, 3 * SLOTS_PER_PAGE);
    assert!(region.is_idle());
    // Only low slots are free.
    while region.take(&mem, high).is_ok() {}
    assert_eq!(region.take(&mem, high), Err(HiddenError::NoneInReach));
}

#[test]
fn what_is_no_slot_is_neither_filled_nor_released() {
    let (mem, mut region) = region(4 * PAGE);
    region.map(&mem, &tables()).unwrap();
    let slot = region.take(&mem, Some).unwrap();
    let before = mem.snapshot();
    for wrong in [
        slot.wrapping_add(1),
        slot.wrapping_add(SLOT),
        slot.wrapping_sub(SLOT),
        AT,
    ] {
        assert!(region.fill(&mem, &code(wrong)).is_err());
        assert!(region.release(&mem, wrong).is_err());
    }
    assert!(mem.snapshot() == before);
}

#[test]
fn every_vector_has_a_stub_that_names_it() {
    let (mem, mut region) = region(3 * PAGE);
    assert_eq!(region.fixtures(), None);
    region.map(&mem, &tables()).unwrap();
    let fixtures = region.fixtures().unwrap();
    let read = |at: Gva| {
        let mut bytes = [0; 8];
        tables().read(&mem, at, &mut bytes).unwrap();
        bytes
    };
    for vector in 0..=255 {
        let stub = fixtures.stub(vector.into());
        let bytes = read(stub);
        assert_eq!(text(&bytes, stub), "endbr64");
        let out = stub.wrapping_add(4);
        assert_eq!(text(&bytes[4..], out), format!("out {GATE_PORT:#x}, al"));
        assert_eq!(bytes[6..], [INT3; 2]);
        for offset in 0..STUB {
            let expected = [0, 4, 6].contains(&offset).then_some(vector);
            assert_eq!(fixtures.vector(stub.wrapping_add(offset)), expected);
        }
    }
    for outside in [
        fixtures.stub(0).wrapping_sub(2),
        fixtures.stub(256),
        fixtures.trampoline(),
        fixtures.idt(),
        Gva(0),
        Gva(u64::MAX),
    ] {
        assert_eq!(fixtures.vector(outside), None, "{outside}");
    }
    let trampoline = fixtures.trampoline();
    assert_eq!(read(trampoline)[..4], [0xe6, GATE_PORT, INT3, INT3]);
    let at = |offset| fixtures.at_trampoline(trampoline.wrapping_add(offset));
    assert_eq!([0, 1, 2, 3].map(at), [true, false, true, false]);
    assert!(!fixtures.at_trampoline(trampoline.wrapping_sub(2)));
    let start = KERNEL_WINDOW.start;
    let inside = |at| fixtures.contain(at);
    assert!(inside(start) && inside(start.wrapping_add(TABLE_SPAN - 1)));
    assert!(!inside(start.wrapping_sub(1)) && !inside(start.wrapping_add(TABLE_SPAN)));
}

#[test]
fn window_has_the_guests_own_gates_but_for_their_handlers() {
    let (mem, mut region) = region(3 * PAGE);
    let mut own = [0; IDT_SIZE];
    for (byte, n) in own.iter_mut().zip(0_usize..) {
        *byte = (n % 251).to_le_bytes()[0];
    }
    assert!(region.build_idt(&mem, &own).is_err(), "it is not mapped");
    region.map(&mem, &tables()).unwrap();
    region.build_idt(&mem, &own).unwrap();
    let fixtures = region.fixtures().unwrap();
    let mut built = [0; IDT_SIZE];
    tables().read(&mem, fixtures.idt(), &mut built).unwrap();
    let gates = built
        .chunks_exact(GATE_SIZE)
        .zip(own.chunks_exact(GATE_SIZE));
    for ((gate, own), vector) in gates.zip(0..) {
        let handler = [&gate[..2], &gate[6..12]].concat();
        assert_eq!(handler, fixtures.stub(vector).0.to_le_bytes());
        // Selector, stack, type and reserved bits.
        assert_eq!((&gate[2..6], &gate[12..]), (&own[2..6], &own[12..]));
    }
}

#[test]
fn region_that_was_pinned_is_never_idle() {
    let (mem, mut region) = region(4 * PAGE);
    region.map(&mem, &tables()).unwrap();
    assert!(region.is_idle());
    region.pin();
    let slot = region.take(&mem, Some).unwrap();
    region.release(&mem, slot).unwrap();
    assert!(!region.is_idle());
}
