use hvprobe_fixtures::kernel_file::{bzimage, elf, relocations};
use proptest::prelude::*;

use super::*;
use crate::Kernel;

/// Physical addresses of the text, and of the data after it.
const TEXT: u64 = 0x100_0000;
const DATA: u64 = 0x120_0000;

const SLIDE: Slide = Slide {
    virt: 0x1240_0000,
    phys: 0x60_0000,
};

/// Returns the low half of the virtual address of physical address `at`.
fn low(at: u64) -> u32 {
    u32::try_from(at + 0x8000_0000).unwrap()
}

/// Returns a kernel with `text` and `data`.
fn kernel(text: &[u8], data: &[u8]) -> Vec<u8> {
    let size = data.len() as u64;
    elf(TEXT, &[(TEXT, text, 4096), (DATA, data, size + 4096)])
}

/// Parses the kernel `elf`, followed by `relocations`, and moves it by [`SLIDE`].
fn moved(elf: &[u8], relocations: &[u8]) -> Result<Kernel, KernelError> {
    let mut kernel = Kernel::parse(bzimage(&[elf, relocations].concat()))?;
    assert_eq!(kernel.slide(), None);
    kernel.relocate(SLIDE)?;
    Ok(kernel)
}

#[test]
fn fields_and_headers_are_moved() {
    let text = [
        &0x8100_0008_u32.to_le_bytes()[..],
        &0xffff_ffff_u32.to_le_bytes(),
        &0xffff_ffff_8120_0000_u64.to_le_bytes(),
        &[0x90; 4],
    ]
    .concat();
    let data = [
        &0x10_u32.to_le_bytes()[..],
        &0xffff_ffff_8100_0000_u64.to_le_bytes(),
        &[0; 4],
    ]
    .concat();
    let wide = [low(TEXT + 8), low(DATA + 4)];
    for (inverse, without_inverse) in [(&[low(DATA)][..], false), (&[], true)] {
        let lists = relocations([&wide, inverse, &[low(TEXT)]], without_inverse);
        let kernel = moved(&kernel(&text, &data), &lists).unwrap();
        assert_eq!(kernel.slide(), Some(SLIDE));
        assert_eq!(kernel.entry().unwrap().0, TEXT + SLIDE.phys);
        let segments = kernel.segments().unwrap();
        let starts: Vec<_> = segments.iter().map(|it| it.start.0).collect();
        assert_eq!(starts, [TEXT, DATA].map(|at| at + SLIDE.phys));
        let expected = [
            &0x9340_0008_u32.to_le_bytes()[..],
            &0xffff_ffff_u32.to_le_bytes(),
            &0xffff_ffff_9360_0000_u64.to_le_bytes(),
            &[0x90; 4],
        ];
        assert_eq!(segments[0].bytes, expected.concat());
        let per_cpu = 0x10_u32.wrapping_sub(if without_inverse { 0 } else { 0x1240_0000 });
        let expected = [
            &per_cpu.to_le_bytes()[..],
            &0xffff_ffff_9340_0000_u64.to_le_bytes(),
            &[0; 4],
        ];
        assert_eq!(segments[1].bytes, expected.concat());
        let file = header(kernel.elf()).unwrap();
        let programs = file.program_headers(Le, kernel.elf()).unwrap();
        let addresses = programs.iter().map(|it| it.p_vaddr(Le));
        let expected = [TEXT, DATA].map(|at| KERNEL_MAP + at + SLIDE.virt);
        assert!(addresses.eq(expected));
    }
}

#[test]
fn a_kernel_is_moved_once() {
    let mut kernel = moved(
        &kernel(&[0x90; 8], &[0; 8]),
        &relocations([&[], &[], &[]], false),
    )
    .unwrap();
    assert_eq!(kernel.movable(), Err(Immovable::NoRelocations));
    assert!(kernel.relocate(SLIDE).is_err());
    assert_eq!(kernel.slide(), Some(SLIDE));
}

/// Checks that a kernel with `tail` after its ELF file is not moved, with the error `expected`.
fn refused(tail: &[u8], expected: &str) {
    let error = moved(&kernel(&[0x90; 16], &[0; 16]), tail).unwrap_err();
    assert_eq!(error.to_string(), expected, "{tail:02x?}");
}

#[test]
fn kernels_without_known_relocations_stay_where_they_are() {
    let unknown =
        "the kernel cannot be moved to another address: its relocations have an unknown form";
    refused(
        &[],
        "the kernel cannot be moved to another address: its file has no relocations",
    );
    refused(&[0; 4], unknown);
    refused(&[0; 9], unknown);
    refused(&[0; 16], unknown);
    refused(&[&[1, 0, 0, 0], &[0; 8][..]].concat(), unknown);
    let mut vmlinux = Kernel::parse(kernel(&[0x90; 16], &[0; 16])).unwrap();
    assert_eq!(vmlinux.movable(), Err(Immovable::NoRelocations));
    assert!(vmlinux.relocate(SLIDE).is_err());
}

#[test]
fn relocations_outside_of_the_kernel_are_refused() {
    let wide = |at| relocations([&[at], &[], &[]], false);
    let narrow = |at| relocations([&[], &[], &[at]], true);
    let outside = |at: u32| {
        format!(
            "the kernel image is damaged: it has a relocation at 0xffffffff{at:08x}, outside of it"
        )
    };
    // The last bytes of the text, and of what is only zeros in memory.
    let end = low(TEXT + 16);
    assert!(moved(&kernel(&[0x90; 16], &[0; 16]), &wide(end - 8)).is_ok());
    refused(&wide(end - 7), &outside(end - 7));
    assert!(moved(&kernel(&[0x90; 16], &[0; 16]), &narrow(end - 4)).is_ok());
    refused(&narrow(end - 3), &outside(end - 3));
    refused(&narrow(end), &outside(end));
    // Addresses that belong to no physical one.
    for at in [1, 0x7fff_ffff, low(0), u32::MAX] {
        refused(&wide(at), &outside(at));
    }
}

#[test]
fn a_kernel_must_fit_the_addresses_that_it_is_moved_to() {
    let payload = [
        kernel(&[0x90; 8], &[0; 8]),
        relocations([&[], &[], &[]], false),
    ]
    .concat();
    let mut kernel = Kernel::parse(bzimage(&payload)).unwrap();
    let slide = Slide {
        virt: 0,
        phys: u64::MAX - TEXT - 64,
    };
    let error = kernel.relocate(slide).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the kernel image is damaged: segment 0 ends beyond all addresses"
    );
    assert_eq!(kernel.slide(), None);
}

#[test]
fn zeros_stay_zeros() {
    let lists = relocations([&[low(DATA), low(DATA + 8)], &[], &[low(TEXT)]], true);
    let data = [[0; 8], 0xffff_ffff_8100_0000_u64.to_le_bytes()].concat();
    let kernel = moved(&kernel(&[0; 8], &data), &lists).unwrap();
    let segments = kernel.segments().unwrap();
    // Only words of 64 bits are addresses of their own.
    assert_eq!(segments[0].bytes[..4], 0x1240_0000_u32.to_le_bytes());
    let expected = [[0; 8], 0xffff_ffff_9340_0000_u64.to_le_bytes()].concat();
    assert_eq!(segments[1].bytes, expected);
}

#[test]
fn bytes_that_are_not_loaded_have_no_fields() {
    let mut elf = elf(TEXT, &[(TEXT, &[0x90; 16], 16), (DATA, &[0x55; 16], 16)]);
    // The second program header gets a size of zero in memory.
    elf[64 + 56 + 40..64 + 56 + 48].fill(0);
    let lists = relocations([&[low(DATA)], &[], &[]], true);
    let error = moved(&elf, &lists).unwrap_err().to_string();
    assert!(error.contains("a relocation at"), "{error}");
}

#[test]
fn a_file_with_symbols_says_what_it_lacks() {
    // One section header, of a symbol table, at the end.
    let with_symbols = |tail: &[u8]| {
        let mut elf = kernel(&[0x90; 16], &[0; 16]);
        let at = elf.len().next_multiple_of(8);
        elf.resize(at + 64, 0);
        elf[40..48].copy_from_slice(&(at as u64).to_le_bytes());
        elf[60..62].copy_from_slice(&1_u16.to_le_bytes());
        elf[at + 4..at + 8].copy_from_slice(&2_u32.to_le_bytes());
        Kernel::parse([&elf[..], tail].concat()).unwrap().movable()
    };
    assert_eq!(with_symbols(&[]), Err(Immovable::NoRelocations));
    let lists = relocations([&[], &[], &[]], true);
    assert_eq!(with_symbols(&lists), Err(Immovable::HasSymbols));
}

/// Returns a list of words, nearly all of which are the addresses of fields of `len` bytes in the kernel's bytes.
fn list(len: u64) -> impl Strategy<Value = Vec<u32>> {
    let field = (prop_oneof![Just(TEXT), Just(DATA)], 0..=24 - len);
    let field = field.prop_map(|(start, at)| low(start + at));
    let word = prop_oneof![200 => field, 1 => any::<u32>()];
    prop::collection::vec(word, 0..6)
}

/// Returns `bytes` after a field of `N` bytes at `address` was changed, if the bytes are those at `start` and the
/// field is in them.
fn change<const N: usize>(
    bytes: &mut [u8],
    start: u64,
    address: u32,
    to: impl Fn([u8; N]) -> [u8; N],
) {
    let at = usize::try_from(address.wrapping_sub(low(start))).unwrap();
    if let Some(field) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *field = to(*field);
    }
}

proptest! {
    /// Moving a kernel changes the fields, one after the other, and nothing else.
    #[test]
    fn any_relocations(
        wide in list(8),
        inverse in list(4),
        narrow in list(4),
        without_inverse: bool,
        extra in prop_oneof![9 => Just(0_usize), 1 => 1..4_usize],
    ) {
        let contents = [[0x91; 24], [0x55; 24]];
        let original = kernel(&contents[0], &contents[1]);
        let mut tail = relocations([&wide, &inverse, &narrow], without_inverse);
        tail.resize(tail.len() + extra, 0);
        let inverse = if without_inverse { Vec::new() } else { inverse };
        let is_field = |len: u32| move |at: &&u32| {
            [TEXT, DATA].iter().any(|start| (low(*start)..=low(*start) + 24 - len).contains(at))
        };
        let count = |list: &[u32], len| list.iter().filter(is_field(len)).count();
        let all = [(&wide, 8), (&inverse, 4), (&narrow, 4)];
        // A word of zero ends its list.
        let is_sound = extra == 0
            && all.iter().all(|(list, len)| count(list, *len) == list.len() && !list.contains(&0));
        let kernel = match moved(&original, &tail) {
            Ok(kernel) => kernel,
            Err(_) => {
                prop_assert!(!is_sound);
                return Ok(());
            }
        };
        prop_assert!(is_sound);
        prop_assert_eq!(kernel.elf().len(), original.len());
        for ((start, mut expected), segment) in [TEXT, DATA]
            .into_iter()
            .zip(contents)
            .zip(kernel.segments().unwrap())
        {
            for at in &wide {
                change(&mut expected, start, *at, |it| match u64::from_le_bytes(it) {
                    0 => it,
                    value => value.wrapping_add(SLIDE.virt).to_le_bytes(),
                });
            }
            for at in &inverse {
                change(&mut expected, start, *at, |it| {
                    u32::from_le_bytes(it).wrapping_sub(0x1240_0000).to_le_bytes()
                });
            }
            for at in &narrow {
                change(&mut expected, start, *at, |it| {
                    u32::from_le_bytes(it).wrapping_add(0x1240_0000).to_le_bytes()
                });
            }
            prop_assert_eq!(segment.bytes, &expected[..]);
        }
    }
}
