//! Tests of reading modules from made-up guests, sound and hostile.

mod types;

use std::sync::{Arc, OnceLock};

use hvprobe_arch::Gva;
use hvprobe_fixtures::kernel::{self as kernel, TEXT};
use hvprobe_fixtures::modules::{
    self, AGES, Age, BLACKLIST, CALLS, EXTABLE, FTRACE, Guest, JUMPS, KALLSYMS, LOCKS,
    MODULE_COUNT, MODULES, SYMBOLS, image, own_types, types,
};
use hvprobe_fixtures::tables;
use proptest::prelude::*;

use super::{Module, ModuleError, ModuleList, ModuleLookupError, ModuleReader, ModuleState};
use crate::image::{Forbidden, KernelImage};
use crate::symbols::SymbolKind;
use crate::types::{BtfError, Types};

/// Adds a [module with everything](modules::full) in the given state.
fn full(guest: &mut Guest, name: &str, state: u32) -> Gva {
    modules::full(guest, name, state).at
}

fn image_with(types: Vec<u8>) -> KernelImage {
    KernelImage::parse(&image(types)).unwrap()
}

fn reader(age: Age) -> &'static ModuleReader {
    static READERS: [OnceLock<ModuleReader>; 2] = [const { OnceLock::new() }; 2];
    let reader = &READERS[usize::from(age == Age::V64)];
    reader.get_or_init(|| ModuleReader::new(&image_with(types(age).bytes())).unwrap())
}

fn kernel_types(age: Age) -> Arc<Types> {
    Arc::new(Types::parse(&types(age).bytes()).unwrap())
}

fn read(guest: &Guest) -> Result<ModuleList, ModuleError> {
    reader(guest.age).read(&tables(), &guest.mem)
}

fn one(guest: &Guest) -> Module {
    let list = read(guest).unwrap();
    assert_eq!(list.iter().count(), 1);
    list.modules.into_iter().next().unwrap()
}

#[test]
fn module_is_read_as_kernels_of_every_age_lay_it_out() {
    for age in AGES {
        let mut guest = Guest::new(age);
        let at = full(&mut guest, "some_module", 1);
        let module = one(&guest);
        let base = module.text().start;
        assert_eq!(module.name(), "some_module", "{age:?}");
        assert_eq!(module.address(), at);
        assert_eq!(module.state(), ModuleState::Coming);
        assert_eq!(module.text(), base..base.wrapping_add(0x1000));
        let init = base.wrapping_add(0x2000);
        assert_eq!(module.init_text(), Some(init..init.wrapping_add(0x800)));
        let found: Vec<_> = module
            .symbols()
            .iter()
            .map(|symbol| {
                (
                    symbol.name,
                    symbol.addr.0 - base.0,
                    symbol.size,
                    symbol.kind,
                )
            })
            .collect();
        let text = SymbolKind::Text;
        assert_eq!(
            found,
            [
                ("start", 0, 0x40, text),
                ("sites", 0x100, 0x100, text),
                ("listed", 0x200, 0x20, text),
                ("listed.cold", 0x280, 0x10, text),
                ("__SCT__own", 0x300, 8, text),
                // Up to the next symbol, or to the end of its memory.
                (
                    "last",
                    0xf00,
                    if age == Age::V61 { 0x500 } else { 0x100 },
                    text
                ),
                ("variable", 0x1400, 8, SymbolKind::Data),
                ("init_module", 0x2000, 0x10, text),
            ]
        );
        let again = reader(guest.age)
            .read_one(at, &tables(), &guest.mem)
            .unwrap();
        assert_eq!(again.name(), module.name());
        assert_eq!(again.symbols().len(), module.symbols().len());
    }
}

#[test]
fn places_the_kernel_forbids_or_patches_are_known() {
    for age in AGES {
        let mut guest = Guest::new(age);
        full(&mut guest, "m", 0);
        let module = one(&guest);
        let at = |offset| module.text().start.wrapping_add(offset);
        let blacklisted = |function: &str| {
            Some(Forbidden::Blacklisted {
                function: function.to_owned(),
            })
        };
        for (offset, expected) in [
            (0, None),
            (0x10f, None),
            (0x110, Some(Forbidden::JumpLabel)),
            (0x114, Some(Forbidden::JumpLabel)),
            (0x115, None),
            (0x121, Some(Forbidden::JumpLabel)),
            (0x122, None),
            (0x134, Some(Forbidden::StaticCall)),
            (0x135, None),
            (0x140, None),
            (0x21f, blacklisted("listed")),
            (0x220, None),
            (0x280, blacklisted("listed.cold")),
            (0x307, Some(Forbidden::StaticCall)),
            (0x40f, Some(Forbidden::NoInstr)),
            (0x410, Some(Forbidden::Kprobes)),
            (0x420, None),
            (0x2000, None),
        ] {
            assert_eq!(
                module.forbidden(at(offset)),
                expected,
                "{age:?} {offset:#x}"
            );
        }
        assert!(module.has_fixup(at(0x140)) && module.has_fixup(at(0x150)));
        assert!(!module.has_fixup(at(0x141)));
        assert!(module.is_ftrace_site(at(0)) && module.is_ftrace_site(at(0x100)));
        assert!(!module.is_ftrace_site(at(0x105)));
        let lock = module.forbidden_as_is(at(0x160), 0x3e);
        assert_eq!(lock, Some(Forbidden::LockPrefix));
        assert_eq!(module.forbidden_as_is(at(0x160), 0xf0), None);
        assert_eq!(module.forbidden_as_is(at(0x161), 0x3e), None);
    }
}

#[test]
fn init_text_is_gone_when_its_memory_is() {
    for age in AGES {
        let mut guest = Guest::new(age);
        guest.add("m", 0).without_init().symbols(SYMBOLS);
        let module = one(&guest);
        assert_eq!(module.init_text(), None);
        assert!(module.symbols().lookup("init_module").is_err());
        assert!(module.symbols().lookup("last").is_ok());
        assert!(!module.is_text(module.text().start.wrapping_add(0x2000)));
    }
}

#[test]
fn module_is_found_by_any_address_in_its_memory() {
    for age in AGES {
        let mut guest = Guest::new(age);
        let first = guest.add("first", 0).symbols(SYMBOLS).base;
        let second = guest.add("second", 0).without_init().symbols(SYMBOLS).base;
        let at = |at: Gva| {
            let found = reader(age).containing(at, &tables(), &guest.mem);
            found.expect("a sound list")
        };
        let name = |place| at(place).map_or_else(String::new, |module| module.name().to_owned());
        assert_eq!(name(first.wrapping_add(0x10)), "first");
        assert_eq!(name(first.wrapping_add(0x2010)), "first");
        assert_eq!(name(second.wrapping_add(0x1404)), "second");
        for nobodys in [Gva(0), second.wrapping_add(0x2010), Gva(u64::MAX)] {
            assert!(at(nobodys).is_none(), "{nobodys}");
        }
    }
}

#[test]
fn unformed_module_is_named_and_forbidden() {
    let mut guest = Guest::new(Age::V61);
    let at = full(&mut guest, "m", 3);
    // The fields of an unformed module mean nothing yet.
    guest.put(at.wrapping_add(KALLSYMS.into()), &[0xff; 8]);
    let module = one(&guest);
    assert_eq!(
        (module.name(), module.state()),
        ("m", ModuleState::Unformed)
    );
    assert!(module.text().is_empty() && module.symbols().is_empty());
    assert_eq!(module.forbidden(Gva(1)), Some(Forbidden::Loading));
}

#[test]
fn memory_where_no_module_can_be_is_not_the_modules() {
    for start in [
        0,
        TEXT,
        0xffff_ffff_8000_0000,
        0xffff_ffff_feff_f001,
        u64::MAX,
    ] {
        for (age, field) in [(Age::V61, 0x140), (Age::V64, 0x100)] {
            let mut guest = Guest::new(age);
            let at = full(&mut guest, "m", 0);
            guest.put(at.wrapping_add(field), &start.to_le_bytes());
            let module = one(&guest);
            assert!(module.text().is_empty(), "{start:#x}");
            assert!(!module.is_text(Gva(start)));
            assert!(
                module
                    .symbols()
                    .iter()
                    .all(|it| it.name == "init_module" || it.name == "variable")
            );
        }
    }
}

#[test]
fn names_are_found_in_one_module_or_in_all() {
    let mut guest = Guest::new(Age::V61);
    for (name, only) in [("first", "only_first"), ("with_dash", "only_second")] {
        guest
            .add(name, 0)
            .symbols(&[("both", 1, 0x10, 8), (only, 1, 0x20, 8)]);
    }
    let list = read(&guest).unwrap();
    let names: Vec<_> = list.iter().map(Module::name).collect();
    assert_eq!(names, ["with_dash", "first"]);

    let (module, symbol) = list.lookup("only_first").unwrap();
    assert_eq!((module.name(), symbol.name), ("first", "only_first"));
    let (module, symbol) = list.lookup_in("with-dash", "both").unwrap();
    assert_eq!(module.name(), "with_dash");
    let inside = symbol.addr.wrapping_add(3);
    assert_eq!(list.containing(inside).map(Module::name), Some("with_dash"));
    assert!(list.containing(Gva(0)).is_none());

    let text = |result: Result<_, ModuleLookupError>| result.map(|_| ()).unwrap_err().to_string();
    expect_test::expect![[r"
        module `third` is not loaded
        module `first`: unknown symbol `only_secnd`
        no loaded module has a symbol `neither`
        symbol `both` is in several modules: with_dash (0xffffffffc0003010), first (0xffffffffc0000010); name the module or the address
    "]]
    .assert_eq(&format!(
        "{}\n{}\n{}\n{}\n",
        text(list.lookup_in("third", "both")),
        text(list.lookup_in("first", "only_secnd")),
        text(list.lookup("neither")),
        text(list.lookup("both")),
    ));
}

#[test]
fn unreadable_list_forbids_its_module_and_no_other() {
    for (field, list) in [
        (KALLSYMS, "symbols"),
        (JUMPS.0, "jump labels"),
        (CALLS.0, "static calls"),
        (EXTABLE.0, "exception table"),
        (FTRACE.0, "ftrace call sites"),
        (BLACKLIST.0, "kprobe blacklist"),
    ] {
        let mut guest = Guest::new(Age::V64);
        full(&mut guest, "sound", 0);
        let at = full(&mut guest, "broken", 0);
        guest.put(at.wrapping_add(field.into()), &0xdead_u64.to_le_bytes());
        let list_of_all = read(&guest).unwrap();
        let [broken, sound] = list_of_all.modules.as_slice() else {
            panic!("two modules");
        };
        let start = |module: &Module| module.text().start;
        let expected = Some(Forbidden::Unreadable { list });
        assert_eq!(broken.forbidden(start(broken)), expected);
        assert_eq!(sound.forbidden(start(sound)), None);
    }
}

#[test]
fn unreadable_lock_prefixes_forbid_all_modules() {
    let mut guest = Guest::new(Age::V61);
    full(&mut guest, "m", 0);
    guest.put(LOCKS, &8_u64.to_le_bytes());
    let module = one(&guest);
    let list = "lock prefixes";
    let expected = Some(Forbidden::Unreadable { list });
    assert_eq!(module.forbidden(module.text().start), expected);
    assert!(read(&guest).unwrap().restores_lock_prefixes());
}

#[test]
fn kernel_with_an_entry_for_itself_restores_its_lock_prefixes() {
    let mut guest = Guest::new(Age::V61);
    let at = full(&mut guest, "m", 0);
    assert!(!read(&guest).unwrap().restores_lock_prefixes());
    // The module's entry becomes the kernel's own.
    let entry = Gva(guest.word(LOCKS)).wrapping_sub(48);
    assert_eq!(guest.word(entry), at.0);
    guest.put(entry, &[0; 8]);
    assert!(read(&guest).unwrap().restores_lock_prefixes());
}

#[test]
fn list_that_does_not_end_is_an_error() {
    let mut guest = Guest::new(Age::V61);
    assert_eq!(read(&guest).unwrap().iter().count(), 0);
    let first = full(&mut guest, "first", 0);
    let second = full(&mut guest, "second", 0);
    let link = |at: Gva| at.wrapping_add(8);
    // The first module's link leads back to the second instead of the head.
    guest.put(link(first), &link(second).0.to_le_bytes());
    let at = link(second);
    assert_eq!(read(&guest).unwrap_err(), ModuleError::Cycle { at });
    guest.put(link(first), &link(first).0.to_le_bytes());
    let at = link(first);
    assert_eq!(read(&guest).unwrap_err(), ModuleError::Cycle { at });
    for at in [0, 0xffff_ffff_d000_0000, u64::MAX] {
        guest.put(link(first), &at.to_le_bytes());
        let at = Gva(at);
        assert_eq!(read(&guest).unwrap_err(), ModuleError::Unreadable { at });
    }
}

#[test]
fn list_longer_than_any_is_an_error() {
    let guest = Guest::new(Age::V61);
    // Pages of words that each point to the next.
    let first = Gva(0xffff_ffff_c000_0000);
    for n in 0..MODULE_COUNT * 3 * 512 - 1 {
        let at = first.wrapping_add(8 * n);
        guest.put(at, &at.wrapping_add(8).0.to_le_bytes());
    }
    guest.put(MODULES, &first.0.to_le_bytes());
    let error = read(&guest).unwrap_err();
    assert!(matches!(error, ModuleError::TooMany { .. }), "{error}");
}

#[test]
fn tables_longer_than_any_are_an_error() {
    for count in [JUMPS.1, CALLS.1, EXTABLE.1, FTRACE.1, BLACKLIST.1] {
        let mut guest = Guest::new(Age::V61);
        let at = full(&mut guest, "m", 0);
        guest.put(at.wrapping_add(count.into()), &[0xff; 4]);
        let error = read(&guest).unwrap_err();
        assert!(matches!(error, ModuleError::TooMuch { .. }), "{error}");
    }
}

#[test]
fn kernel_without_modules_or_types_is_an_error() {
    let error = ModuleReader::new(&image_with(vec![1, 2, 3])).unwrap_err();
    assert_eq!(error, ModuleError::Layout(BtfError::Malformed(0)));
    let error = ModuleReader::new(&image_with(hvprobe_fixtures::kernel::btf())).unwrap_err();
    let (of, field) = ("module".to_owned(), "state".to_owned());
    assert_eq!(error, ModuleError::Layout(BtfError::NoField { of, field }));
    let bytes = kernel::vmlinux(kernel::Layout::Offsets61);
    let image = KernelImage::parse(&bytes).unwrap();
    assert_eq!(
        ModuleReader::new(&image).unwrap_err(),
        ModuleError::HiddenList
    );
    let (_, sections) = kernel::kernel(kernel::Layout::Offsets61);
    let text = [
        ("_stext", TEXT, 0, true),
        ("_etext", TEXT + 0x4000, 0, true),
    ];
    let image = KernelImage::parse(&kernel::elf(&sections, &text)).unwrap();
    assert_eq!(ModuleReader::new(&image).unwrap_err(), ModuleError::NoList);
}

#[test]
fn unknown_kind_of_memory_is_an_error() {
    let mut damaged = types(Age::V64).bytes();
    // The length of the array of memories is the only word with the value 7 in the types.
    let at = damaged
        .windows(4)
        .position(|word| word == 7_u32.to_le_bytes())
        .unwrap();
    damaged[at] = 8;
    let (found, expected) = (8, 7);
    assert_eq!(
        ModuleReader::new(&image_with(damaged)).unwrap_err(),
        ModuleError::Memories { found, expected }
    );
}

/// Checks what a real kernel says about the layout of its modules. Runs only if `HVPROBE_TEST_VMLINUX` names an
/// uncompressed x86-64 `vmlinux`. Written for Debian's 6.1 cloud kernel, but any distribution's kernel should pass.
#[test]
fn real_kernel_describes_its_modules_when_one_is_given() {
    let Some(path) = std::env::var_os("HVPROBE_TEST_VMLINUX") else {
        eprintln!("skipped: HVPROBE_TEST_VMLINUX does not name a vmlinux");
        return;
    };
    let image = KernelImage::parse(&std::fs::read(path).unwrap()).unwrap();
    let start = std::time::Instant::now();
    let reader = ModuleReader::new(&image).unwrap();
    eprintln!("{:?}", start.elapsed());
    let layout = &reader.layout;
    eprintln!("{layout:?}");
    assert!(layout.len > 0x200 && layout.len < 0x1000);
    for table in [
        layout.extable,
        layout.jump_entries,
        layout.static_call_sites,
        layout.ftrace_callsites,
        layout.kprobe_blacklist,
        layout.noinstr_text,
        layout.kprobes_text,
    ] {
        assert!(table.is_some());
    }
    assert!(layout.lock_entry.is_some() && reader.locks.is_some());
    assert!(reader.unwind_tables().is_some());
}

proptest! {
    #[test]
    fn hostile_modules_are_never_a_panic(
        old: bool,
        words in proptest::collection::vec(
            (any::<u64>(), prop_oneof![
                any::<u64>(),
                // An address in the modules' memory.
                (0..15_u64 * 0x1000).prop_map(|offset| 0xffff_ffff_c000_0000 + offset),
                Just(u64::MAX),
                Just(0xffff_ffff),
            ]),
            0..80,
        ),
        fields in proptest::collection::vec((0..0x480_u64, any::<u64>()), 0..12),
        probe: u64,
    ) {
        let mut guest = Guest::new(if old { Age::V61 } else { Age::V64 });
        let mut modules = Vec::new();
        for n in 0..MODULE_COUNT {
            modules.push(full(&mut guest, "m", u32::try_from(n % 4).unwrap()));
        }
        for (at, word) in words {
            guest.damage(at, &word.to_le_bytes());
        }
        for (offset, word) in fields {
            guest.put(modules[0].wrapping_add(offset), &word.to_le_bytes());
        }
        let kernel = kernel_types(guest.age);
        if let Ok(list) = read(&guest) {
            prop_assert!(list.iter().count() <= 2048);
            for module in &list {
                reader(guest.age).read_types(&list, module, &kernel, &tables(), &guest.mem);
                let _ = module.types().map(|types| types.function("start"));
                let range = module.text();
                for at in [range.start.0, range.end.0.wrapping_sub(1), probe] {
                    let at = Gva(at);
                    let _ = (module.forbidden(at), module.has_fixup(at), module.is_ftrace_site(at));
                }
            }
            let _ = (list.lookup("sites"), list.lookup_in("m", "sites"), list.containing(Gva(probe)));
        }
        for at in modules {
            let _ = reader(guest.age).read_one(at, &tables(), &guest.mem);
        }
    }

    #[test]
    fn damaged_types_are_never_a_panic(
        old: bool,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..10),
    ) {
        let mut damaged = types(if old { Age::V61 } else { Age::V64 }).bytes();
        for (at, value) in damage {
            let at = at.index(damaged.len());
            damaged[at] = value;
        }
        let sound = Guest::new(Age::V61);
        if let Ok(reader) = ModuleReader::new(&image_with(damaged)) {
            let _ = reader.read(&tables(), &sound.mem);
        }
    }
}
