use super::entry::*;
use super::*;
use crate::mem::flat::FlatMemory;
use proptest::prelude::*;

const TABLE: u64 = PRESENT | WRITABLE | USER;
const ROOT: Gpa = Gpa(0x1000);

/// Makes memory of 16 pages with tables that translate `at`. The root table is page 1, and the tables of the lower
/// levels are in the pages after it. The entry for `at` at `leaf_level` is `leaf`.
fn chain(levels: Levels, at: Gva, leaf_level: u8, leaf: u64) -> (FlatMemory, PageTables) {
    let mem = FlatMemory::new(16 * 4096);
    let mut table = ROOT;
    for level in (leaf_level..=levels.top()).rev() {
        let next = table.wrapping_add(0x1000);
        let value = if level == leaf_level {
            leaf
        } else {
            next.0 | TABLE
        };
        mem.write_u64(slot_of(table, at, level), value);
        table = next;
    }
    (mem, PageTables { root: ROOT, levels })
}

fn slot_of(table: Gpa, at: Gva, level: u8) -> Gpa {
    table.wrapping_add(((at.0 >> (12 + 9 * (u64::from(level) - 1))) % 512) * 8)
}

const AT: Gva = Gva(0xffff_8881_2345_6789);

#[test]
fn pages_of_each_size_translate_at_four_and_five_levels() {
    for levels in [Levels::Four, Levels::Five] {
        for (level, size, flags) in [(1, 4 << 10, 0), (2, 2 << 20, HUGE), (3, 1 << 30, HUGE)] {
            let frame = 0x000a_bcde_8000_0000;
            let (mem, tables) = chain(levels, AT, level, frame | TABLE | flags);
            assert_eq!(
                tables.translate(&mem, AT),
                Ok(Mapping {
                    gpa: Gpa(frame | (AT.0 % size)),
                    page_size: size,
                    writable: true,
                    user: true,
                    executable: true
                }),
                "{levels:?} level {level}"
            );
        }
    }
}

#[test]
fn bits_of_a_large_page_entry_below_its_alignment_are_not_address() {
    let (mem, tables) = chain(Levels::Four, AT, 2, 0x4000_0000 | 0x1f_f000 | TABLE | HUGE);
    let gpa = tables.translate(&mem, AT).unwrap().gpa;
    assert_eq!(gpa, Gpa(0x4000_0000 | (AT.0 % (2 << 20))));
}

#[test]
fn a_pat_bit_in_a_page_table_entry_does_not_make_it_large() {
    let (mem, tables) = chain(Levels::Four, AT, 1, 0x7000 | TABLE | HUGE);
    let mapping = tables.translate(&mem, AT).unwrap();
    assert_eq!((mapping.gpa, mapping.page_size), (Gpa(0x7789), 4096));
}

#[test]
fn permissions_accumulate_over_levels() {
    for level in 1..=4 {
        let leaf = 0x7000 | TABLE;
        let (mem, tables) = chain(Levels::Four, AT, 1, leaf);
        let (location, value) = tables.entry_at(&mem, AT, level).unwrap();
        for (changed, expected) in [
            (value & !WRITABLE, (false, true, true)),
            (value & !USER, (true, false, true)),
            (value | NO_EXECUTE, (true, true, false)),
        ] {
            mem.write_u64(location, changed);
            let found = tables.translate(&mem, AT).unwrap();
            assert_eq!(
                (found.writable, found.user, found.executable),
                expected,
                "level {level}"
            );
        }
    }
}

#[test]
fn absent_entries_are_reported_with_their_level() {
    for level in 1..=5 {
        let (mem, tables) = chain(Levels::Five, AT, level, 0x7000 | WRITABLE);
        let absent = WalkError::NotPresent { at: AT, level };
        assert_eq!(tables.translate(&mem, AT), Err(absent));
        let (_, value) = tables.entry_at(&mem, AT, level).unwrap();
        assert_eq!(value, 0x7000 | WRITABLE);
        if level > 1 {
            assert_eq!(tables.entry_at(&mem, AT, level - 1), Err(absent));
        }
    }
}

#[test]
fn entries_are_found_where_they_are() {
    let (mem, tables) = chain(Levels::Four, AT, 2, 0x4000_0000 | TABLE | HUGE);
    let pmd_table = Gpa(0x3000);
    assert_eq!(
        tables.entry_at(&mem, AT, 2),
        Ok((slot_of(pmd_table, AT, 2), 0x4000_0000 | TABLE | HUGE))
    );
    for level in [0, 1, 5] {
        assert_eq!(
            tables.entry_at(&mem, AT, level),
            Err(WalkError::NoSuchLevel { at: AT, level })
        );
    }
}

#[test]
fn only_canonical_addresses_translate() {
    let mem = FlatMemory::new(0x3000);
    for (levels, bits) in [(Levels::Four, 48), (Levels::Five, 57)] {
        let tables = PageTables { root: ROOT, levels };
        let lowest_bad = 1_u64 << (bits - 1);
        for (at, is_canonical) in [
            (0, true),
            (lowest_bad - 1, true),
            (lowest_bad, false),
            (!lowest_bad, false),
            (lowest_bad.wrapping_neg(), true),
            (lowest_bad.wrapping_neg() - 1, false),
            (u64::MAX, true),
        ] {
            let at = Gva(at);
            let refused = Err(WalkError::NonCanonical { at });
            let found = tables.translate(&mem, at);
            assert_eq!(found != refused, is_canonical, "{levels:?} {at}");
        }
    }
}

#[test]
fn cr3_flags_and_ignored_entry_bits_are_no_address() {
    let ignored = 0x7ff0_0000_0000_0e00;
    let (mem, tables) = chain(Levels::Four, AT, 1, 0x7000 | TABLE | ignored);
    let tables = PageTables {
        root: Gpa(tables.root.0 | 0x18 | 1 << 63),
        ..tables
    };
    assert_eq!(tables.translate(&mem, AT).unwrap().gpa, Gpa(0x7789));
}

#[test]
fn tables_outside_memory_are_an_error() {
    let (mem, tables) = chain(Levels::Four, AT, 3, 0x000f_ffff_ffff_f000 | TABLE);
    let error = tables.translate(&mem, AT).unwrap_err();
    assert!(matches!(error, WalkError::Memory { .. }), "{error:?}");
}

#[test]
fn a_table_that_points_to_itself_is_walked_once_per_level() {
    let mem = FlatMemory::new(0x3000);
    mem.write_u64(ROOT, ROOT.0 | TABLE);
    for levels in [Levels::Four, Levels::Five] {
        let tables = PageTables { root: ROOT, levels };
        assert_eq!(tables.translate(&mem, Gva(0x10)).unwrap().gpa, Gpa(0x1010));
    }
}

/// Maps two pages at the virtual addresses 0x5000 and 0x6000. In physical memory, they are apart and in the
/// opposite order. `second` is the entry of the second page.
fn two_pages(second: u64) -> (FlatMemory, PageTables) {
    let (mem, tables) = chain(Levels::Four, Gva(0x5000), 1, 0x9000 | TABLE);
    mem.write_u64(Gpa(0x4000 + 6 * 8), second);
    (mem, tables)
}

#[test]
fn accesses_cross_pages_that_are_apart_in_memory() {
    let (mem, tables) = two_pages(0x7000 | PRESENT);
    let word = 0x1122_3344_5566_7788_u64;
    tables
        .write(&mem, Gva(0x5ffd), &word.to_le_bytes())
        .unwrap();
    assert_eq!(tables.read_u64(&mem, Gva(0x5ffd)), Ok(word));
    let mut split = [0; 5];
    mem.read(Gpa(0x7000), &mut split).unwrap();
    assert_eq!(split, [0x55, 0x44, 0x33, 0x22, 0x11]);
    mem.read(Gpa(0x9ffd), &mut split[..3]).unwrap();
    assert_eq!(split[..3], [0x88, 0x77, 0x66]);
}

#[test]
fn a_write_that_cannot_be_finished_changes_nothing() {
    for second in [0, 0x7000, 0x000f_0000_0000_0000 | TABLE] {
        let (mem, tables) = two_pages(second);
        let before = mem.snapshot();
        assert!(tables.write(&mem, Gva(0x5ffd), &[1; 8]).is_err());
        assert!(tables.read_u64(&mem, Gva(0x5ffd)).is_err());
        assert!(before == mem.snapshot(), "second page {second:#x}");
    }
}

#[test]
fn a_write_into_its_own_tables_ends_where_it_would_have_without() {
    // The first page is the table that leads to the second.
    let (mem, tables) = two_pages(0x7000 | TABLE);
    mem.write_u64(Gpa(0x4000 + 5 * 8), 0x4000 | TABLE);
    tables.write(&mem, Gva(0x5000), &[0; 0x1008]).unwrap();
    assert!(tables.translate(&mem, Gva(0x6000)).is_err());
    let (mem, tables) = two_pages(0x7000 | TABLE);
    mem.write_u64(Gpa(0x4000 + 5 * 8), 0x4000 | TABLE);
    mem.write_u64(Gpa(0x7000), 1);
    let word = 0x1122_3344_5566_7788_u64.to_le_bytes();
    let content = [&[0; 0x1000][..], &word].concat();
    tables.write(&mem, Gva(0x5000), &content).unwrap();
    let mut written = [0; 8];
    mem.read(Gpa(0x7000), &mut written).unwrap();
    assert_eq!(written, word);
}

#[test]
fn process_writes_only_where_it_may_and_its_pages_are_marked() {
    let at = Gva(0x5000);
    let (mem, tables) = chain(Levels::Four, at, 1, 0x9000 | PRESENT | WRITABLE | USER);
    let leaf = |page: u64| Gpa(0x4000 + page * 8);
    let write = |at, bytes: &[u8]| tables.write_as_process(&mem, Gva(at), bytes);
    let read_only = |at| Err(WalkError::ReadOnly { at: Gva(at) });
    let (above, value) = tables.entry_at(&mem, at, 2).unwrap();
    for missing in [USER, WRITABLE] {
        mem.write_u64(above, value & !missing);
        assert_eq!(write(0x5000, &[1]), read_only(0x5000));
    }
    mem.write_u64(above, value);
    mem.write_u64(leaf(6), 0x7000 | PRESENT | USER);
    let before = mem.snapshot();
    assert_eq!(write(0x6000, &[1]), read_only(0x6000));
    assert_eq!(write(0x5fff, &[1, 2]), read_only(0x6000));
    let absent = WalkError::NotPresent {
        at: Gva(0x7000),
        level: 1,
    };
    assert_eq!(write(0x7000, &[1]), Err(absent));
    let mut now = mem.snapshot();
    assert_eq!(write(0x5000, &[]), Ok(()));
    // Nothing changed, except that the first page of the second write was marked.
    now[0x4028] = before[0x4028];
    assert!(now == before);
    mem.write_u64(leaf(5), 0x9000 | PRESENT | WRITABLE | USER);
    mem.write_u64(leaf(6), 0x7000 | PRESENT | WRITABLE | USER | DIRTY);
    assert_eq!(write(0x5ffe, &[1, 2, 3, 4]), Ok(()));
    for (page, frame) in [(5, 0x9000), (6, 0x7000)] {
        let marked = frame | PRESENT | WRITABLE | USER | ACCESSED | DIRTY;
        assert_eq!(mem.read_u64(leaf(page)), Ok(marked));
    }
    let mut written = [0; 2];
    mem.read(Gpa(0x9ffe), &mut written).unwrap();
    assert_eq!(written, [1, 2]);
    mem.read(Gpa(0x7000), &mut written).unwrap();
    assert_eq!(written, [3, 4]);
}

#[test]
fn accesses_past_the_last_address_are_refused() {
    let (mem, tables) = chain(Levels::Four, Gva(u64::MAX), 1, 0x9000 | TABLE);
    let at = Gva(u64::MAX - 6);
    assert_eq!(
        tables.read_u64(&mem, at),
        Err(WalkError::Wraps { at, len: 8 })
    );
    assert_eq!(tables.read(&mem, at, &mut [0; 7]), Ok(()));
    assert_eq!(tables.write(&mem, Gva(u64::MAX), &[]), Ok(()));
}

/// Page table entries, many of which point into memory.
fn hostile_entry() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..8_u64, any::<u16>())
            .prop_map(|(page, flags)| page << 12 | u64::from(flags & 0xfff) | PRESENT),
        Just(0),
    ]
}

proptest! {
    #[test]
    fn hostile_tables_never_panic_and_reads_agree_with_translations(
        entries in prop::collection::vec(hostile_entry(), 64),
        root in any::<u64>().prop_map(|root| Gpa(root & 0xffff_0000_0000_7fff)),
        five in any::<bool>(),
        ats in prop::collection::vec(
            prop_oneof![any::<u64>(), 0..0x8000_u64, any::<u16>().prop_map(|low| u64::MAX - u64::from(low))],
            16
        ),
        len in 0..9000_usize,
    ) {
        let mem = FlatMemory::new(0x8000);
        // The same few entries everywhere, so that every index finds some of them.
        for (index, slot) in (0..0x8000_u64).step_by(8).enumerate() {
            mem.write_u64(Gpa(slot), entries[index * 7 % 64]);
        }
        let levels = if five { Levels::Five } else { Levels::Four };
        let tables = PageTables { root, levels };
        for at in ats.into_iter().map(Gva) {
            let mapping = tables.translate(&mem, at);
            let mut byte = [0];
            let read = tables.read(&mem, at, &mut byte);
            match mapping {
                Err(error) => prop_assert_eq!(read, Err(error)),
                Ok(mapping) => {
                    prop_assert_eq!((mapping.gpa.0 ^ at.0) % mapping.page_size, 0);
                    prop_assert!(mapping.gpa.0 < 1 << 52);
                    let mut direct = [0];
                    prop_assert_eq!(mem.read(mapping.gpa, &mut direct).is_ok(), read.is_ok());
                    prop_assert_eq!(byte, direct);
                }
            }
            let _ = tables.read(&mem, at, &mut vec![0; len]);
            for level in 0..=6 {
                let _ = tables.entry_at(&mem, at, level);
            }
        }
        // Last, because it may change the tables.
        let before = mem.snapshot();
        if tables.write(&mem, Gva(0x10), &vec![0x5a; len]).is_err() {
            prop_assert!(before == mem.snapshot());
        }
    }
}
