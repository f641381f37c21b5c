//! Tests on the types of a real kernel, if one is given.

use std::time::Instant;

use hvprobe_arch::regs::Gpr;

use super::one;
use crate::image::KernelImage;
use crate::types::{Kind, Limits, Place, PrototypeError, Types};

/// Checks the types of a real kernel, from 5.10 on. Runs only if `HVPROBE_TEST_VMLINUX` names an uncompressed
/// x86-64 `vmlinux` with BTF.
#[test]
fn types_of_a_real_kernel_are_read_when_one_is_given() {
    let Some(path) = std::env::var_os("HVPROBE_TEST_VMLINUX") else {
        eprintln!("skipped: HVPROBE_TEST_VMLINUX does not name a vmlinux");
        return;
    };
    let image = KernelImage::parse(&std::fs::read(path).unwrap()).unwrap();
    let types = image.types().unwrap();
    let timed = |what: &str| {
        let start = Instant::now();
        let prototype = types.function("do_sys_openat2").unwrap();
        eprintln!("{what} look-up of a function: {:?}", start.elapsed());
        prototype
    };
    let openat = timed("first");
    assert_eq!(timed("second"), openat);
    let places = [Gpr::Rdi, Gpr::Rsi, Gpr::Rdx].map(Place::Register);
    assert_eq!(types.places(&openat), places);
    let function = types.named("do_sys_openat2").next().unwrap();
    assert_eq!(
        types.declaration(function),
        "int do_sys_openat2(int dfd, const char *filename, struct open_how *how);"
            .replace("int do", &(types.name(openat.returns.unwrap()) + " do"))
    );
    assert_eq!(
        types.declaration(one(types, "struct open_how")),
        "struct open_how {\n\t__u64 flags;\n\t__u64 mode;\n\t__u64 resolve;\n};"
    );
    for (name, size) in [("unsigned long", 8), ("char", 1), ("pid_t", 4), ("u64", 8)] {
        assert_eq!(types.size(one(types, name)), Some(size), "{name}");
    }
    members_agree(&image, types, "task_struct");
    members_agree(&image, types, "file");
    check_all_types(types);
}

/// Checks that both ways to look up a member find it at the same position.
fn members_agree(image: &KernelImage, types: &Types, of: &str) {
    let id = one(types, &format!("struct {of}"));
    let Some(Kind::Struct { members, .. }) = types.kind(id) else {
        panic!("{of} is a structure");
    };
    let plain: Vec<_> = members
        .filter(|it| !it.name.is_empty() && it.width.is_none())
        .collect();
    let questions: Vec<_> = plain.iter().map(|it| (of, it.name)).collect();
    let found = image.members(&questions).unwrap();
    assert!(found.len() > 10, "{of}");
    for (field, found) in plain.iter().zip(found) {
        let found = found.unwrap_or_else(|| panic!("{of} has no {}", field.name));
        assert_eq!(field.bit_offset, found.offset * 8, "{of}.{}", field.name);
        let size = types.size(field.ty).unwrap_or(0);
        assert_eq!(size, found.size, "{of}.{}", field.name);
        let member = types.member(id, field.name).unwrap();
        assert_eq!((member.bit_offset, member.ty), (field.bit_offset, field.ty));
    }
}

/// Checks that every type can be named, and that every function has a prototype or is ambiguous.
fn check_all_types(types: &Types) {
    let start = Instant::now();
    let (mut functions, mut ambiguous, mut unknown, mut shapes) = (0, 0, 0, 0);
    for id in types.ids() {
        let name = types.own_name(id);
        match types.kind(id).unwrap() {
            Kind::Function(_) => match types.function(name) {
                Ok(prototype) => {
                    functions += 1;
                    unknown += u32::from(types.places(&prototype).contains(&Place::Unknown));
                }
                Err(PrototypeError::Ambiguous(_)) => ambiguous += 1,
                Err(error) => panic!("{error}"),
            },
            Kind::Struct { .. } | Kind::Enum { .. } => {
                let shape = types.shape(id, Limits::default()).unwrap();
                assert_eq!(u64::from(shape.size), types.size(id).unwrap());
                shapes += 1;
            }
            _ => {}
        }
        // In a name, `...` marks what is left out, except for the parameters of variadic functions.
        let text = types.name(id).replace("{...}", "").replace(", ...", "");
        let is_other = matches!(types.kind(id), Some(Kind::Other));
        assert!(is_other || !text.contains("..."), "{text}");
        let declaration = types.declaration(id);
        assert!(declaration.len() < 100_000, "{name}");
    }
    eprintln!(
        "{functions} functions, {unknown} of them with a parameter whose place is not known, \
         {ambiguous} ambiguous; {shapes} shapes; all in {:?}",
        start.elapsed()
    );
    assert!(functions > 10_000 && ambiguous < functions / 100 && unknown < functions / 100);
}
