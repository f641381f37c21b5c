mod model;

use std::cell::Cell;

use proptest::prelude::*;

use super::super::entry::*;
use super::super::{Levels, Mapping};
use super::*;
use crate::mem::OutOfRange;
use crate::mem::flat::FlatMemory;

const TABLE: u64 = PRESENT | WRITABLE | ACCESSED | DIRTY;
const ROOT: u64 = 0x1000;
const AT: Gva = Gva(0xffff_8881_2345_6789);

/// Memory that counts reads.
struct Counting {
    flat: FlatMemory,
    reads: Cell<u32>,
}

impl Counting {
    fn new() -> Self {
        Self {
            flat: FlatMemory::new(64 * 4096),
            reads: Cell::new(0),
        }
    }

    fn set(&self, at: u64, value: u64) {
        FlatMemory::write_u64(&self.flat, Gpa(at), value);
    }

    fn reads(&self, act: impl FnOnce()) -> u32 {
        self.reads.set(0);
        act();
        self.reads.get()
    }
}

impl PhysMemory for Counting {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
        self.reads.set(self.reads.get() + 1);
        self.flat.read(at, into)
    }

    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
        self.flat.write(at, bytes)
    }
}

fn tables() -> PageTables {
    PageTables {
        root: Gpa(ROOT),
        levels: Levels::Four,
    }
}

/// Returns the address of the entry of `level` for `at` in the table at `table`.
fn slot(table: u64, at: Gva, level: u8) -> u64 {
    table + (at.0 >> (12 + 9 * (u64::from(level) - 1))) % 512 * 8
}

/// Makes memory in which the tables for `at` are pages 1 to 4, root first, and `at` is in page 8.
fn mapped(at: Gva) -> Counting {
    let mem = Counting::new();
    for (table, level) in (1..).zip((1..=4).rev()) {
        let next = if level == 1 { 8 } else { table + 1 };
        mem.set(slot(table << 12, at, level), next << 12 | TABLE);
    }
    mem
}

const PMD_TABLE: u64 = 0x3000;
const PTE_TABLE: u64 = 0x4000;

/// Begins another hit, and returns the physical address to which `walker` translates `at`.
fn found(walker: &Walker, mem: &Counting, at: Gva) -> Result<u64, WalkError> {
    walker.begin();
    walker.translate(mem, at).map(|gpa| gpa.0)
}

/// Returns the physical address to which a plain walk translates `at`.
fn plain(mem: &Counting, at: Gva) -> Result<u64, WalkError> {
    let mapping: Result<Mapping, _> = tables().translate(mem, at);
    mapping.map(|mapping| mapping.gpa.0)
}

#[test]
fn page_is_looked_at_once_in_a_hit_and_walked_to_once_in_all() {
    let mem = mapped(AT);
    let walker = Walker::new(tables());
    let read = || {
        let read = walker.read_u64(&mem, Gva(AT.0 & !7));
        assert_eq!(read, Ok(0));
    };
    walker.begin();
    assert_eq!(mem.reads(read), 4 + 1);
    assert_eq!(mem.reads(read), 1);
    walker.begin();
    assert_eq!(mem.reads(read), 3 + 1);
    assert_eq!(mem.reads(read), 1);
}

/// Reads the memory that most hits read: the per-CPU variables and the task, in large pages of the direct map, and
/// the stack, in a small page elsewhere.
#[test]
fn pages_of_a_hit_cost_two_entries_each() {
    let per_cpu = Gva(AT.0 & !0x3fff_ffff);
    let task = per_cpu.wrapping_add(0x20_0000);
    let stack = Gva(AT.0 | 0x7f_c000_0000);
    let mem = mapped(stack);
    mem.set(slot(0x2000, per_cpu, 3), 0x5000 | TABLE);
    mem.set(slot(0x5000, per_cpu, 2), TABLE | HUGE);
    mem.set(slot(0x5000, task, 2), TABLE | HUGE);
    let walker = Walker::new(tables());
    let hit = || {
        walker.begin();
        for at in [per_cpu, task, stack] {
            assert!(walker.translate(&mem, at).is_ok());
        }
    };
    hit();
    assert_eq!(mem.reads(hit), (2 + 1) + 3);
}

#[test]
fn tables_of_the_kernels_image_are_known_to_stay() {
    let at = Gva(0xffff_ffff_8234_5678);
    let mem = mapped(at);
    let walker = Walker::new(tables());
    assert_eq!(found(&walker, &mem, at), Ok(0x8678));
    let again = mem.reads(|| assert_eq!(found(&walker, &mem, at), Ok(0x8678)));
    assert_eq!(again, 2);
    mem.set(slot(PMD_TABLE, at, 2), 0);
    assert!(found(&walker, &mem, at).is_err());
}

#[test]
fn entry_read_again_for_one_page_is_not_believed_for_another_that_had_a_different_one() {
    let (one, other) = (AT, AT.wrapping_add(0x1000));
    let mem = mapped(one);
    mem.set(slot(PTE_TABLE, other, 1), 0x9000 | TABLE);
    let walker = Walker::new(tables());
    assert_eq!(found(&walker, &mem, other), Ok(0x9789));
    // Another table of level 2, which leads to another table of level 1. Meanwhile `other` is not looked up.
    mem.set(slot(0x2000, one, 3), 0x5000 | TABLE);
    mem.set(slot(0x5000, one, 2), 0x6000 | TABLE);
    mem.set(slot(0x6000, one, 1), 0xa000 | TABLE);
    assert_eq!(found(&walker, &mem, one), Ok(0xa789));
    walker.begin();
    assert_eq!(walker.translate(&mem, one), Ok(Gpa(0xa789)));
    assert!(walker.translate(&mem, other).is_err());
}

#[test]
fn gigabytes_are_distinguished_however_many_there_are() {
    let gigabyte = |n: u64| Gva((AT.0 & !0x7f_ffff_ffff) | n << 30);
    let mem = mapped(gigabyte(0));
    let count = 2 * UPPERS as u64;
    for n in 1..count {
        // All lead to the same table, so that only their entries of level 3 differ.
        mem.set(slot(0x2000, gigabyte(n), 3), PMD_TABLE | TABLE | n << 52);
    }
    let walker = Walker::new(tables());
    for _ in 0..2 {
        for n in 0..count {
            assert_eq!(found(&walker, &mem, gigabyte(n)), Ok(0x8000));
        }
    }
    let last = gigabyte(count - 1);
    assert_eq!(mem.reads(|| assert!(found(&walker, &mem, last).is_ok())), 3);
    for n in (0..count).rev() {
        mem.set(slot(0x2000, gigabyte(n), 3), 0);
        assert!(found(&walker, &mem, gigabyte(n)).is_err());
        assert!(n == 0 || found(&walker, &mem, gigabyte(0)).is_ok());
    }
}

#[test]
fn entries_of_five_levels_are_all_read_again_but_the_root() {
    let mem = Counting::new();
    let at = Gva(0xff88_8881_2345_6789);
    let tables = PageTables {
        levels: Levels::Five,
        ..tables()
    };
    for (table, level) in (1..).zip((1..=5).rev()) {
        let next = if level == 1 { 8 } else { table + 1 };
        mem.set(slot(table << 12, at, level), next << 12 | TABLE);
    }
    let walker = Walker::new(tables);
    assert_eq!(found(&walker, &mem, at), Ok(0x8789));
    let again = mem.reads(|| assert_eq!(found(&walker, &mem, at), Ok(0x8789)));
    assert_eq!(again, 4);
    // The table of level 3 leaves the tree with its content.
    mem.set(slot(0x2000, at, 4), 0);
    assert!(found(&walker, &mem, at).is_err());
    // A page of 1 GiB has only its own entry and the one above it to read again.
    mem.set(slot(0x2000, at, 4), 0x3000 | TABLE);
    mem.set(slot(0x3000, at, 3), 0x4000_0000 | TABLE | HUGE);
    assert!(found(&walker, &mem, at).is_ok());
    let again = mem.reads(|| assert!(found(&walker, &mem, at).is_ok()));
    assert_eq!(again, 2);
    mem.set(slot(0x2000, at, 4), 0);
    assert!(found(&walker, &mem, at).is_err());
}

#[test]
fn page_that_is_remapped_is_found_where_it_is_now() {
    let mem = mapped(AT);
    let walker = Walker::new(tables());
    assert_eq!(found(&walker, &mem, AT), Ok(0x8789));
    mem.set(slot(PTE_TABLE, AT, 1), 0x9000 | TABLE);
    assert_eq!(found(&walker, &mem, AT), Ok(0x9789));
    // Any change of the entry counts.
    mem.set(slot(PTE_TABLE, AT, 1), 0x9000 | TABLE & !WRITABLE);
    assert_eq!(
        mem.reads(|| assert!(found(&walker, &mem, AT).is_ok())),
        3 + 4
    );
    mem.set(slot(PTE_TABLE, AT, 1), 0x9000);
    let absent = |level| Err(WalkError::NotPresent { at: AT, level });
    assert_eq!(found(&walker, &mem, AT), absent(1));
    mem.set(slot(PTE_TABLE, AT, 1), 0xa000 | TABLE);
    assert_eq!(found(&walker, &mem, AT), Ok(0xa789));
}

#[test]
fn table_that_left_the_tree_with_its_content_is_not_believed() {
    let mem = mapped(AT);
    let walker = Walker::new(tables());
    assert_eq!(found(&walker, &mem, AT), Ok(0x8789));
    // Merged into a large page, unmapped, and mapped by another table.
    mem.set(slot(PMD_TABLE, AT, 2), 0x4000_0000 | TABLE | HUGE);
    assert_eq!(found(&walker, &mem, AT), plain(&mem, AT));
    assert_eq!(
        found(&walker, &mem, AT),
        Ok(0x4000_0000 | (AT.0 % (2 << 20)))
    );
    mem.set(slot(PMD_TABLE, AT, 2), 0);
    assert!(found(&walker, &mem, AT).is_err());
    mem.set(slot(0x5000, AT, 1), 0xb000 | TABLE);
    mem.set(slot(PMD_TABLE, AT, 2), 0x5000 | TABLE);
    assert_eq!(found(&walker, &mem, AT), Ok(0xb789));
}

#[test]
fn large_page_that_is_split_is_found_in_its_parts() {
    let mem = mapped(AT);
    let walker = Walker::new(tables());
    let large = 0x4000_0000 | TABLE | HUGE;
    mem.set(slot(PMD_TABLE, AT, 2), large);
    assert_eq!(
        found(&walker, &mem, AT),
        Ok(0x4000_0000 | (AT.0 % (2 << 20)))
    );
    mem.set(slot(PMD_TABLE, AT, 2), PTE_TABLE | TABLE);
    assert_eq!(found(&walker, &mem, AT), Ok(0x8789));
    // Another page of the same table, which was never a page of its own before.
    let next = AT.wrapping_add(0x1000);
    assert!(found(&walker, &mem, next).is_err());
}

#[test]
fn user_addresses_are_walked_for_each_time() {
    let at = Gva(AT.0 & 0x7fff_ffff_ffff);
    let mem = mapped(at);
    let walker = Walker::new(tables());
    walker.begin();
    for _ in 0..2 {
        assert_eq!(mem.reads(|| assert!(walker.translate(&mem, at).is_ok())), 4);
    }
}

#[test]
fn pages_that_are_remembered_at_one_place_are_distinguished() {
    let walker = Walker::new(tables());
    let place = |at: Gva| std::ptr::from_ref(walker.place(at.0 & !WITHIN));
    let other = (1..512)
        .map(|n| Gva((AT.0 & !0x1f_ffff) + (n << 12)))
        .find(|other| place(*other) == place(AT) && other.0 >> 12 != AT.0 >> 12)
        .unwrap();
    let mem = mapped(AT);
    mem.set(slot(PTE_TABLE, other, 1), 0x9000 | TABLE);
    walker.begin();
    for _ in 0..2 {
        assert_eq!(walker.translate(&mem, AT), Ok(Gpa(0x8789)));
        assert_eq!(walker.translate(&mem, other), Ok(Gpa(0x9000)));
    }
}

#[test]
fn accesses_are_those_of_the_tables() {
    let mem = mapped(AT);
    let next = AT.wrapping_add(0x1000);
    mem.set(slot(PTE_TABLE, next, 1), 0x6000 | TABLE);
    let walker = Walker::new(tables());
    let page = AT.0 & !WITHIN;
    let word = 0x1122_3344_5566_7788;
    for at in [page, page + 1, page + 0xff8, page + 0xffd].map(Gva) {
        walker.begin();
        walker.write_u64(&mem, at, word).unwrap();
        assert_eq!(tables().read_u64(&mem, at), Ok(word));
        assert_eq!(walker.read_u64(&mem, at), Ok(word));
        walker.write(&mem, at, &[1, 2, 3, 4]).unwrap();
        let mut back = [0; 4];
        walker.read(&mem, at, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3, 4]);
        assert_eq!(
            tables().read_u64(&mem, at),
            Ok(word & !0xffff_ffff | 0x0403_0201)
        );
    }
    assert_eq!(walker.read(&mem, Gva(0), &mut []), Ok(()));
    for at in [page, page + 0xff0, page + 0xff5, page + 0xff8, page + 0xfff].map(Gva) {
        for behind in [0, 8] {
            let word = word + behind;
            tables()
                .write(&mem, at.wrapping_add(behind), &word.to_le_bytes())
                .unwrap();
        }
        for _ in 0..2 {
            assert_eq!(walker.read_words(&mem, at, [0, 8]), Ok([word, word + 8]));
        }
        walker.begin();
        assert_eq!(walker.read_words(&mem, at, [0, 8]), Ok([word, word + 8]));
    }
    let at = Gva(page + 0x1ff8);
    let behind = at.wrapping_add(8);
    let absent = WalkError::NotPresent {
        at: behind,
        level: 1,
    };
    assert_eq!(walker.read_words(&mem, at, [0, 8]), Err(absent));
    let at = Gva(u64::MAX - 6);
    let wraps = WalkError::Wraps { at, len: 8 };
    assert_eq!(walker.read_u64(&mem, at), Err(wraps));
    assert_eq!(walker.write_u64(&mem, at, 0), Err(wraps));
}

proptest! {
    #[test]
    fn words_that_lie_anywhere_are_those_of_the_tables(
        start in 0..0x3000_u64,
        offsets in prop::array::uniform3(prop_oneof![
            0..0x3000_u64,
            (0..0x1000_u64).prop_map(u64::wrapping_neg),
            any::<u64>(),
        ]),
    ) {
        let mem = mapped(AT);
        let next = AT.wrapping_add(0x1000);
        mem.set(slot(PTE_TABLE, next, 1), 0x6000 | TABLE);
        let at = Gva(AT.0 & !WITHIN).wrapping_add(start);
        for (n, offset) in (1_u64..).zip(offsets) {
            // Where nothing is mapped, nothing can be written.
            let word = n.wrapping_mul(0x1234_5678_9abc_def1).to_le_bytes();
            let _ = tables().write(&mem, at.wrapping_add(offset), &word);
        }
        let walker = Walker::new(tables());
        let wanted: Result<Vec<_>, _> = offsets
            .iter()
            .map(|offset| tables().read_u64(&mem, at.wrapping_add(*offset)))
            .collect();
        for _ in 0..2 {
            for _ in 0..2 {
                let words = walker.read_words(&mem, at, offsets);
                prop_assert_eq!(words.map(Vec::from), wanted.clone());
            }
            walker.begin();
        }
    }
}

#[test]
fn page_outside_memory_is_an_error_however_often() {
    let mem = mapped(AT);
    mem.set(slot(PTE_TABLE, AT, 1), 0x000f_ffff_ffff_f000 | TABLE);
    let walker = Walker::new(tables());
    for _ in 0..2 {
        walker.begin();
        for _ in 0..2 {
            let read = walker.read_u64(&mem, AT);
            assert_eq!(read, tables().read_u64(&mem, AT));
            assert!(matches!(read, Err(WalkError::Memory { .. })));
            assert!(walker.write_u64(&mem, AT, 0).is_err());
        }
    }
}
