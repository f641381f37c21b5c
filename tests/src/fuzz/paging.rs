//! Page tables of a malicious guest.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{Levels, PageTables, Walker, entry};
use hvprobe_arch::{Gpa, Gva};
use hvprobe_engine::HiddenRegion;
use hvprobe_hit::region::Window;
use hvprobe_linux::image::TaskLayout;

use super::input::Input;
use super::memory::Flat;

const PAGE: usize = 4096;
/// Size of guest memory: few pages, so that random entries often refer to one of them.
const MEMORY: usize = 8 * PAGE;
/// Number of accesses tried with one set of tables.
const ACCESSES: usize = 8;

/// Reads a guest's memory and page tables. A byte selects the root and the number of levels. Then follow entries,
/// each with an index of two bytes into memory and eight bytes of content. The index 0xffff ends them.
fn guest(input: &mut Input<'_>) -> (Flat, PageTables) {
    let choice = input.u8();
    let levels = if choice & 1 == 0 {
        Levels::Four
    } else {
        Levels::Five
    };
    let root = Gpa(u64::from(choice >> 1) * PAGE as u64);
    let mem = Flat::new(&[], MEMORY);
    for _ in 0..MEMORY / 8 {
        let index = input.u16();
        if index == u16::MAX || input.is_empty() {
            break;
        }
        let at = Gpa(u64::from(index) * 8 % MEMORY as u64);
        mem.write(at, &input.u64().to_le_bytes()).expect("inside");
    }
    (mem, PageTables { root, levels })
}

/// Reads and writes through any tables. Checks that a walk agrees with a second, simpler walk, and with a reused
/// walker, and that a failing write changes nothing.
pub fn walk(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let (mem, tables) = guest(&mut input);
    let walker = Walker::new(tables);
    let mut translated = false;
    for _ in 0..ACCESSES {
        if input.is_empty() {
            break;
        }
        let at = Gva(input.u64());
        let len = usize::from(input.u16());
        let found = tables.translate(&mem, at);
        assert_eq!(
            found.as_ref().ok().map(|mapping| mapping.gpa),
            plain_walk(&tables, &mem, at)
        );
        if let Ok(mapping) = found {
            translated = true;
            assert!([1 << 12, 1 << 21, 1 << 30].contains(&mapping.page_size));
            assert_eq!((mapping.gpa.0 ^ at.0) % PAGE as u64, 0);
        }
        for level in 0..=6 {
            if let Ok((location, value)) = tables.entry_at(&mem, at, level) {
                assert_eq!(mem.read_u64(location), Ok(value));
            }
        }
        let mut bytes = vec![0; len];
        let read = tables.read(&mem, at, &mut bytes);
        walker.begin();
        let mut again = vec![0; len];
        assert_eq!(walker.read(&mem, at, &mut again), read);
        assert!(read.is_err() || again == bytes);

        let before = mem.snapshot();
        let content: Vec<u8> = (0..=u8::MAX).cycle().take(len).collect();
        let written = tables.write(&mem, at, &content);
        let after = mem.snapshot();
        // Comparing the whole memory at once is fast.
        if before != after {
            assert!(written.is_ok(), "a failed write changed memory");
            let changed = before.iter().zip(&after).filter(|(a, b)| a != b);
            assert!(changed.count() <= len);
        }
        // The write may have changed the page tables: restore them.
        mem.write(Gpa(0), &before).expect("inside");
        let task = TaskLayout {
            current_task: input.u64(),
            pid: 8,
            tgid: 12,
            comm: input.u64(),
        };
        let pointer = task.pointer(&walker, &mem, at.0);
        let _ = pointer.and_then(|pointer| task.read(&walker, &mem, pointer));
    }
    translated
}

/// Walks the tables as the manual's figures show it (SDM vol. 3, figures 4-8 to 4-11), level by level.
fn plain_walk(tables: &PageTables, mem: &Flat, at: Gva) -> Option<Gpa> {
    let top = if tables.levels == Levels::Four { 4 } else { 5 };
    let unused = 64 - (12 + 9 * top);
    if (at.0.cast_signed() << unused >> unused).cast_unsigned() != at.0 {
        return None;
    }
    let mut table = tables.root.0 & entry::ADDRESS;
    for level in (1..=top).rev() {
        let below = 12 + 9 * (level - 1);
        let value = mem
            .read_u64(Gpa(table + (at.0 >> below) % 512 * 8))
            .ok()
            .filter(|value| value & entry::PRESENT != 0)?;
        table = value & entry::ADDRESS;
        if level == 1 || level <= 3 && value & entry::HUGE != 0 {
            return Some(Gpa((table >> below << below) | (at.0 % (1 << below))));
        }
    }
    None
}

/// Maps the hidden region in any tables. Checks that at most one entry outside the region changes, that this entry
/// was empty before, and that unmapping restores it.
pub fn hidden(data: &[u8]) -> bool {
    const PAGES: u64 = 3;
    const SPAN: u64 = 2 << 20;
    let mut input = Input::new(data);
    let (mem, tables) = guest(&mut input);
    let start = Gva(input.u64() & !(SPAN - 1));
    let end = start.wrapping_add(u64::from(input.u8()) * SPAN);
    let window = Window { start, end };
    // The region is in the last pages. A guest may place page tables even there, although its memory map does
    // not have these pages.
    let visible = MEMORY - usize::try_from(PAGES).expect("few") * PAGE;
    let region_at = Gpa(visible as u64);
    let mut region = HiddenRegion::new(region_at, PAGES * PAGE as u64, window);

    let before = mem.snapshot();
    if region.map(&mem, &tables).is_err() {
        assert!(before == mem.snapshot(), "a failed mapping changed memory");
        return false;
    }
    let outside = |snapshot: &[u8]| -> Vec<usize> {
        (0..visible / 8)
            .filter(|n| snapshot[n * 8..][..8] != before[n * 8..][..8])
            .collect()
    };
    let changed = outside(&mem.snapshot());
    assert!(changed.len() <= 1, "more than one entry changed");
    for n in &changed {
        assert_eq!(before[n * 8..][..8], [0; 8], "the entry was in use");
    }
    let mut slots = Vec::new();
    for _ in 0..input.u16() {
        let Ok(slot) = region.take(&mem, Some) else {
            break;
        };
        slots.push(slot);
    }
    assert_eq!(outside(&mem.snapshot()), changed);
    for slot in slots {
        region.release(&mem, slot).expect("it was taken");
    }
    assert!(region.is_idle());
    if region.unmap(&mem).is_ok() {
        assert_eq!(outside(&mem.snapshot()), [0; 0], "the entry is left behind");
    }
    true
}
