//! Compares the walker with plain walks while the tables change.

use proptest::prelude::*;

use super::*;
use crate::testing::at_least;

/// An operation of a kernel on its tables. Each address is given by its indices at levels 3, 2 and 1, which are 0
/// or 1.
#[derive(Clone, Debug)]
enum Deed {
    /// Maps a small page, in a new table if there is none.
    Map([u8; 3], u8),
    /// Unmaps a small page.
    Unmap([u8; 3]),
    /// Maps a page of 2 MiB. If the entry led to a table, frees the table without clearing it.
    Large([u8; 3], u8),
    /// Splits a page of 2 MiB into small ones.
    Split([u8; 3]),
    /// Clears the entry of level 2. If it led to a table, frees the table without clearing it.
    Drop([u8; 3]),
    /// Maps a page of 1 GiB. If the entry led to a table, clears and frees the table, and frees the tables below it
    /// without clearing them.
    Giant([u8; 3], u8),
    /// Unmaps a page of 1 GiB.
    DropGiant([u8; 3]),
    /// Writes to all free pages, as if they were used for other data.
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

/// A model of a kernel that changes its page tables.
struct Kernel {
    mem: Counting,
    /// Free pages. The last one is used next.
    free: Vec<u64>,
}

impl Kernel {
    const TOP: Gva = Gva(0xffff_8880_0000_0000);
    /// The table of level 3, which is never freed.
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

    /// Takes a page for a new, empty table.
    fn table(&mut self) -> u64 {
        let table = self.free.pop().unwrap();
        self.mem.write(Gpa(table), &[0; 4096]).unwrap();
        table
    }

    /// Returns the location of the entry for `at` in the table that `entry` leads to; makes a table if there is
    /// none. `None` if `entry` maps a large page.
    fn below(&mut self, entry: u64, at: Gva, level: u8) -> Option<u64> {
        if self.get(entry) == 0 {
            let table = self.table();
            self.mem.set(entry, table | TABLE);
        }
        let value = self.get(entry);
        (value & HUGE == 0).then(|| slot(value & ADDRESS, at, level))
    }

    /// Frees the table that `entry` leads to, if there is one.
    fn free_behind(&mut self, entry: u64) {
        let value = self.get(entry);
        if value & PRESENT != 0 && value & HUGE == 0 {
            // It is the next page that is used.
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

/// Page table entries, many of which point into memory.
fn hostile_entry() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..16_u64, any::<u16>())
            .prop_map(|(page, flags)| page << 12 | u64::from(flags & 0xfff) | PRESENT),
        Just(0),
    ]
}

/// Lets a kernel perform `deeds`. After each deed, checks that the walker and a plain walk give the same result,
/// for the addresses whose bits are set in the second value of the pair.
fn compare(deeds: &[(Deed, u8)]) -> Result<(), TestCaseError> {
    let mut kernel = Kernel::new();
    let walker = Walker::new(tables());
    for (deed, looked_at) in deeds {
        kernel.act(deed);
        walker.begin();
        for n in (0..8).filter(|n| looked_at >> n & 1 == 1) {
            let at = Kernel::address([n >> 2, n >> 1 & 1, n & 1]);
            let expected = plain(&kernel.mem, at).map(Gpa);
            prop_assert_eq!(walker.translate(&kernel.mem, at), expected, "{}", at);
            prop_assert_eq!(walker.translate(&kernel.mem, at), expected, "{}", at);
        }
    }
    Ok(())
}

#[test]
fn table_that_is_freed_and_used_again_at_another_level_is_not_believed() {
    let deeds = [
        (Deed::Map([1, 0, 0], 0), 0),
        (Deed::Map([0, 1, 0], 0), 0),
        (Deed::Drop([1, 0, 0]), 52),
        // The table of level 2 is freed, and used again as a table of level 1. Its entry, which led to a table of
        // level 1, now maps the page of that table.
        (Deed::Giant([0, 0, 0], 0), 32),
        (Deed::Map([1, 0, 1], 6), 52),
    ];
    let found = compare(&deeds);
    assert!(found.is_ok(), "{}", found.unwrap_err());
}

proptest! {
    #![proptest_config(at_least(2000))]

    /// Fails if the walker does not check the leaf (at each change), the entry of level 2 (at tables that were
    /// freed without being cleared), or the entry of level 3 (at tables that were freed and used again).
    #[test]
    fn whatever_a_kernel_does_a_page_is_found_where_a_plain_walk_finds_it(
        deeds in prop::collection::vec((deed(), any::<u8>()), 1..60),
    ) {
        compare(&deeds)?;
    }

    /// Changes tables in ways in which no kernel does. The walker's result must be that of a plain walk now or at
    /// an earlier hit.
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
        // Each address is in a page of its own, because a write through one must not change the tables of another.
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
