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

/// Memory that counts how often it is read.
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

/// Where the entry of `level` for `at` is in the table at `table`.
fn slot(table: u64, at: Gva, level: u8) -> u64 {
    table + (at.0 >> (12 + 9 * (u64::from(level) - 1))) % 512 * 8
}

/// Memory in which the tables for `at` are pages 1 to 4, root first, and `at` is in page 8.
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

/// What `walker` finds in another hit.
fn found(walker: &Walker, mem: &Counting, at: Gva) -> Result<u64, WalkError> {
    walker.begin();
    walker.translate(mem, at).map(|gpa| gpa.0)
}

/// What a plain walk finds.
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
    assert_eq!(mem.reads(read), 2 + 1);
    assert_eq!(mem.reads(read), 1);
}

#[test]
fn page_that_is_remapped_is_found_where_it_is_now() {
    let mem = mapped(AT);
    let walker = Walker::new(tables());
    assert_eq!(found(&walker, &mem, AT), Ok(0x8789));
    mem.set(slot(PTE_TABLE, AT, 1), 0x9000 | TABLE);
    assert_eq!(found(&walker, &mem, AT), Ok(0x9789));
    // Whatever changes in the entry, it is a change.
    mem.set(slot(PTE_TABLE, AT, 1), 0x9000 | TABLE & !WRITABLE);
    assert_eq!(
        mem.reads(|| assert!(found(&walker, &mem, AT).is_ok())),
        2 + 4
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
    // Put together to a large page, taken away, and mapped by another table.
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
fn pages_that_are_remembered_at_one_place_are_told_apart() {
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
            assert_eq!(walker.read_words(&mem, at), Ok([word, word + 8]));
        }
        walker.begin();
        assert_eq!(walker.read_words(&mem, at), Ok([word, word + 8]));
    }
    let at = Gva(page + 0x1ff8);
    let behind = at.wrapping_add(8);
    let absent = WalkError::NotPresent {
        at: behind,
        level: 1,
    };
    assert_eq!(walker.read_words(&mem, at), Err(absent));
    let at = Gva(u64::MAX - 6);
    let wraps = WalkError::Wraps { at, len: 8 };
    assert_eq!(walker.read_u64(&mem, at), Err(wraps));
    assert_eq!(walker.write_u64(&mem, at, 0), Err(wraps));
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

/// What a kernel does with its tables. Each address is given by its index at levels 3, 2 and 1, each
/// of which is 0 or 1.
#[derive(Clone, Debug)]
enum Deed {
    /// Maps a small page, in a new table if there is none.
    Map([u8; 3], u8),
    /// Takes a small page away.
    Unmap([u8; 3]),
    /// Maps a page of 2 MiB. If a table was there, it is freed with its content.
    Large([u8; 3], u8),
    /// Splits a page of 2 MiB into small ones.
    Split([u8; 3]),
    /// Takes away whatever is mapped at level 2; a table is freed with its content.
    Drop([u8; 3]),
    /// Maps a page of 1 GiB. The table that was there is emptied and freed, those below it are
    /// freed with their content.
    Giant([u8; 3], u8),
    /// Takes a page of 1 GiB away.
    DropGiant([u8; 3]),
    /// Writes to freed pages, which others use now.
    Reuse(u64),
}

fn deed() -> impl Strategy<Value = Deed> {
    let at = || prop::array::uniform3(0..2_u8);
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(at, frame)| Deed::Map(at, frame)),
        2 => at().prop_map(Deed::Unmap),
        2 => (at(), any::<u8>()).prop_map(|(at, frame)| Deed::Large(at, frame)),
        2 => at().prop_map(Deed::Split),
        1 => at().prop_map(Deed::Drop),
        1 => (at(), any::<u8>()).prop_map(|(at, frame)| Deed::Giant(at, frame)),
        1 => at().prop_map(Deed::DropGiant),
        1 => any::<u64>().prop_map(Deed::Reuse),
    ]
}

/// A kernel that keeps page tables.
struct Kernel {
    mem: Counting,
    /// Pages that are no tables now, the one to take next last.
    free: Vec<u64>,
}

impl Kernel {
    const TOP: Gva = Gva(0xffff_8880_0000_0000);
    /// The table of level 3, which stays.
    const UPPER: u64 = 0x2000;

    fn new() -> Self {
        let mem = Counting::new();
        mem.set(slot(ROOT, Self::TOP, 4), Self::UPPER | TABLE);
        Self {
            mem,
            free: (3..64).map(|page| page << 12).rev().collect(),
        }
    }

    fn address([upper, middle, lower]: [u8; 3]) -> Gva {
        let (upper, middle, lower) = (u64::from(upper), u64::from(middle), u64::from(lower));
        Self::TOP.wrapping_add(upper << 30 | middle << 21 | lower << 12 | 0x123)
    }

    fn get(&self, at: u64) -> u64 {
        PhysMemory::read_u64(&self.mem.flat, Gpa(at)).unwrap()
    }

    /// An empty table.
    fn table(&mut self) -> u64 {
        let table = self.free.pop().unwrap();
        self.mem.write(Gpa(table), &[0; 4096]).unwrap();
        table
    }

    /// Where the entry for `at` in the table behind `entry` is; a new table if there is nothing.
    fn below(&mut self, entry: u64, at: Gva, level: u8) -> Option<u64> {
        if self.get(entry) == 0 {
            let table = self.table();
            self.mem.set(entry, table | TABLE);
        }
        let value = self.get(entry);
        (value & HUGE == 0).then(|| slot(value & ADDRESS, at, level))
    }

    /// Frees the table behind `entry`, if one is there.
    fn free_behind(&mut self, entry: u64) {
        let value = self.get(entry);
        if value & PRESENT != 0 && value & HUGE == 0 {
            // Taken again soon.
            self.free.push(value & ADDRESS);
        }
    }

    fn act(&mut self, deed: &Deed) -> Option<()> {
        let frame = |frame: u8, level: u8| u64::from(frame) << (12 + 9 * (level - 1)) | TABLE;
        let (Deed::Map(at, _)
        | Deed::Unmap(at)
        | Deed::Large(at, _)
        | Deed::Split(at)
        | Deed::Drop(at)
        | Deed::Giant(at, _)
        | Deed::DropGiant(at)) = *deed
        else {
            let Deed::Reuse(value) = *deed else {
                return None;
            };
            for page in self.free.clone() {
                for word in 0..2 {
                    self.mem.set(page + word * 8, value);
                }
            }
            return None;
        };
        let at = Self::address(at);
        let upper = slot(Self::UPPER, at, 3);
        match *deed {
            Deed::Map(_, n) => {
                let middle = self.below(upper, at, 2)?;
                let lower = self.below(middle, at, 1)?;
                self.mem.set(lower, frame(n, 1));
            }
            Deed::Unmap(_) => {
                let middle = self.below(upper, at, 2)?;
                let lower = self.below(middle, at, 1)?;
                self.mem.set(lower, 0);
            }
            Deed::Large(_, n) => {
                let middle = self.below(upper, at, 2)?;
                self.free_behind(middle);
                self.mem.set(middle, frame(n, 2) | HUGE);
            }
            Deed::Split(_) => {
                let middle = self.below(upper, at, 2)?;
                let value = self.get(middle);
                if value & HUGE != 0 {
                    let table = self.table();
                    for n in 0..512 {
                        self.mem.set(table + n * 8, (value & !HUGE) + (n << 12));
                    }
                    self.mem.set(middle, table | TABLE);
                }
            }
            Deed::Drop(_) => {
                let middle = self.below(upper, at, 2)?;
                self.free_behind(middle);
                self.mem.set(middle, 0);
            }
            Deed::Giant(_, n) => {
                let table = self.get(upper);
                if table != 0 && table & HUGE == 0 {
                    for entry in (table & ADDRESS..).step_by(8).take(512) {
                        self.free_behind(entry);
                        self.mem.set(entry, 0);
                    }
                    self.free_behind(upper);
                }
                self.mem.set(upper, frame(n, 3) | HUGE);
            }
            Deed::DropGiant(_) => {
                if self.get(upper) & HUGE != 0 {
                    self.mem.set(upper, 0);
                }
            }
            Deed::Reuse(_) => {}
        }
        None
    }
}

/// Entries that often lead somewhere.
fn hostile_entry() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..16_u64, any::<u16>())
            .prop_map(|(page, flags)| page << 12 | u64::from(flags & 0xfff) | PRESENT),
        Just(0),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Without the look at the entry above the leaf this fails at tables that were freed with their
    /// content, without the look at the leaf at each change.
    #[test]
    fn whatever_a_kernel_does_a_page_is_found_where_a_plain_walk_finds_it(
        deeds in prop::collection::vec((deed(), any::<u8>()), 1..60),
    ) {
        let mut kernel = Kernel::new();
        let walker = Walker::new(tables());
        for (deed, looked_at) in deeds {
            kernel.act(&deed);
            walker.begin();
            for n in (0..8).filter(|n| looked_at >> n & 1 == 1) {
                let at = Kernel::address([n >> 2, n >> 1 & 1, n & 1]);
                let expected = plain(&kernel.mem, at).map(Gpa);
                prop_assert_eq!(walker.translate(&kernel.mem, at), expected, "{}", at);
                prop_assert_eq!(walker.translate(&kernel.mem, at), expected, "{}", at);
            }
        }
    }

    /// Tables that change in ways no kernel changes them: what is found is what a walk finds now, or
    /// found at an earlier hit.
    #[test]
    fn hostile_tables_lead_nowhere_they_never_led(
        entries in prop::collection::vec(hostile_entry(), 64),
        changes in prop::collection::vec((0..0x1000_u64, hostile_entry()), 1..40),
        low in prop::collection::vec(any::<u32>(), 4),
    ) {
        let mem = Counting::new();
        for (index, at) in (0..0x8000_u64).step_by(8).enumerate() {
            mem.set(at, entries[index * 7 % 64]);
        }
        // Each in a page of its own: what is written through one must not change another's tables.
        let ats = low.iter().zip(0_u64..).map(|(low, n)| Gva(!(n << 32 | u64::from(*low))));
        let ats: Vec<_> = ats.collect();
        let walker = Walker::new(tables());
        let mut walks = vec![Vec::new(); ats.len()];
        for (word, value) in changes {
            walker.begin();
            for (at, walks) in ats.iter().zip(&mut walks) {
                walks.push(plain(&mem, *at).map(Gpa));
                let found = walker.translate(&mem, *at);
                prop_assert!(walks.contains(&found), "{} at {}", found.unwrap_or(Gpa(0)), at);
                prop_assert!(found.is_ok() || walks.last() == Some(&found));
                let _ = walker.write_u64(&mem, *at, value);
            }
            mem.set(word * 8, value);
        }
    }
}
