//! Tests of the types of modules.

use std::sync::atomic::AtomicUsize;

use hvprobe_fixtures::modules::TYPES;

use super::super::NoModuleTypes;
use super::*;

/// Reads the types of each module in `list`, on top of those of its kernel.
fn read_types(guest: &Guest, list: &ModuleList) -> Vec<Result<Arc<Types>, NoModuleTypes>> {
    let kernel = kernel_types(guest.age);
    let types = |module: &Module| {
        reader(guest.age).read_types(list, module, &kernel, &tables(), &guest.mem);
        module.types().map(Arc::clone)
    };
    list.iter().map(types).collect()
}

/// Returns the error of reading the types of the only module of `guest`.
fn refused(guest: &Guest) -> NoModuleTypes {
    let types = read_types(guest, &read(guest).unwrap()).into_iter();
    types.last().unwrap().unwrap_err()
}

/// Returns the address of the `struct btf_module` of the module added last, and that of its `struct btf`.
fn entry(guest: &Guest) -> (Gva, Gva) {
    let entry = Gva(guest.word(TYPES));
    (entry, Gva(guest.word(entry.wrapping_add(24))))
}

#[test]
fn types_of_a_module_go_on_where_those_of_its_kernel_end() {
    for age in AGES {
        let mut guest = Guest::new(age);
        full(&mut guest, "first", 0);
        full(&mut guest, "second", 1);
        let list = read(&guest).unwrap();
        for module in &list {
            assert_eq!(module.types().unwrap_err(), NoModuleTypes::NotRead);
        }
        for types in read_types(&guest, &list) {
            let types = types.unwrap();
            let start = types.function("start").unwrap();
            let [device] = &start.parameters[..] else {
                panic!("{start:?}");
            };
            assert_eq!(types.name(device.ty), "struct device *");
            let device = types.pointee(device.ty).unwrap();
            let name = types.member(device, "name").unwrap();
            assert_eq!(
                (name.bit_offset, types.name(name.ty)),
                (0x80, "char".into())
            );
            assert!(types.function("sites").is_err());
        }
    }
}

#[test]
fn functions_of_a_module_are_its_own_whatever_the_kernel_has() {
    let mut kernel = types(Age::V64);
    let wide = kernel.int("long", 8, 1);
    kernel.function("start", 0, &[("kernels", wide)]);
    kernel.function("both", 0, &[("value", wide)]);
    let own = own_types(&kernel);
    let kernel = Arc::new(Types::parse(&kernel.bytes()).unwrap());
    let types = Types::split(kernel, &own).unwrap();
    let name = |function: &str| types.function(function).unwrap().parameters[0].name.clone();
    assert_eq!(
        (name("start"), name("both")),
        ("device".into(), "value".into())
    );
}

#[test]
fn kernels_and_modules_without_types_say_so() {
    let mut guest = Guest::new(Age::V64);
    guest.add("m", 0);
    assert_eq!(refused(&guest), NoModuleTypes::None);

    let (_, mut sections) = kernel::kernel(kernel::Layout::Offsets61);
    for section in &mut sections {
        if section.name == ".BTF" {
            section.data = types(Age::V64).bytes();
        }
    }
    let symbols = [
        ("_stext", TEXT, 0, true),
        ("_etext", TEXT + 0x4000, 0, true),
        ("modules", hvprobe_fixtures::modules::MODULES.0, 16, false),
    ];
    let image = KernelImage::parse(&kernel::elf(&sections, &symbols)).unwrap();
    let list = read(&guest).unwrap();
    let module = list.iter().next().unwrap();
    let reader = ModuleReader::new(&image).unwrap();
    assert!(!reader.has_types() && super::reader(Age::V64).has_types());
    reader.read_types(
        &list,
        module,
        &kernel_types(Age::V64),
        &tables(),
        &guest.mem,
    );
    assert_eq!(module.types().unwrap_err(), NoModuleTypes::NotKept);
}

#[test]
fn types_that_cannot_be_read_or_make_no_sense_are_refused() {
    let made = || {
        let mut guest = Guest::new(Age::V64);
        full(&mut guest, "m", 0);
        let (link, btf) = entry(&guest);
        (guest, link, btf)
    };
    let word = |word: u64| word.to_le_bytes();
    let nowhere = Gva(0xffff_fff0_0000_0000);
    let unreadable = |at| NoModuleTypes::Unreadable(ModuleError::Unreadable { at });

    let (guest, link, _) = made();
    guest.put(link, &word(nowhere.0));
    assert_eq!(refused(&guest), unreadable(nowhere));

    let (guest, link, _) = made();
    guest.put(link, &word(link.0));
    let cycle = ModuleError::Cycle { at: link };
    assert_eq!(refused(&guest), NoModuleTypes::Unreadable(cycle));

    let (guest, link, _) = made();
    guest.put(link.wrapping_add(24), &word(nowhere.0));
    assert_eq!(refused(&guest), unreadable(nowhere.wrapping_add(0x10)));

    let (guest, _, btf) = made();
    guest.put(btf.wrapping_add(0x10), &word(nowhere.0));
    assert_eq!(refused(&guest), unreadable(nowhere));

    let (guest, _, btf) = made();
    guest.put(btf.wrapping_add(0x38), &word(u64::MAX));
    let too_much = matches!(
        refused(&guest),
        NoModuleTypes::Unreadable(ModuleError::TooMuch { .. })
    );
    assert!(too_much);

    let (guest, _, btf) = made();
    guest.put(btf.wrapping_add(0x38), &word(0));
    assert!(matches!(refused(&guest), NoModuleTypes::Malformed(_)));
}

#[test]
fn types_of_all_modules_together_are_bounded() {
    let mut guest = Guest::new(Age::V64);
    full(&mut guest, "first", 0);
    full(&mut guest, "second", 0);
    let mut list = read(&guest).unwrap();
    let one = own_types(&types(Age::V64)).len();
    list.types_left = AtomicUsize::new(2 * one - 1);
    let [second, first] = &read_types(&guest, &list)[..] else {
        panic!("two modules");
    };
    assert!(second.is_ok());
    let NoModuleTypes::Unreadable(ModuleError::TooMuch { .. }) = first.as_ref().unwrap_err() else {
        panic!("{first:?}");
    };
}

#[test]
fn types_that_cannot_be_read_count_against_the_bound() {
    let mut guest = Guest::new(Age::V64);
    full(&mut guest, "first", 0);
    full(&mut guest, "second", 0);
    let (_, btf) = entry(&guest);
    let nowhere = Gva(0xffff_fff0_0000_0000);
    guest.put(btf.wrapping_add(0x10), &nowhere.0.to_le_bytes());
    let mut list = read(&guest).unwrap();
    let one = own_types(&types(Age::V64)).len();
    list.types_left = AtomicUsize::new(2 * one - 1);
    let errors: Vec<_> = read_types(&guest, &list)
        .into_iter()
        .map(Result::unwrap_err)
        .collect();
    let unreadable = ModuleError::Unreadable { at: nowhere };
    assert_eq!(errors[0], NoModuleTypes::Unreadable(unreadable));
    assert!(matches!(
        errors[1],
        NoModuleTypes::Unreadable(ModuleError::TooMuch { .. })
    ));
}
