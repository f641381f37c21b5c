//! The kernel's unwind tables, and walks of stacks with them.

use std::sync::Arc;

use hvprobe_arch::{Gva, Regs};
use hvprobe_fixtures::kernel::{self, Section, TEXT};
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::unwind::{Start, Surroundings, Unwinder};

use super::input::Input;

/// Size of the text in the images made here.
const TEXT_LEN: usize = 0x1000;
/// Addresses to which the tables are linked.
const ADDRESSES: u64 = 0xffff_ffff_8200_0000;
const ENTRIES: u64 = ADDRESSES + 0x1_0000;
/// Start of the stack.
pub(super) const STACK: u64 = 0xffff_c900_0000_0000;
/// Start of the kernel's text.
pub(super) const KERNEL_TEXT: u64 = 0xffff_ffff_8000_0000;
/// Last word of the entry for a function's first instruction, in each format.
pub(super) const FIRST: [u16; 3] = [0x005, 0x205, 0x203];

/// Stack with bytes of the input.
struct Stack<'a>(&'a [u8]);

impl Surroundings for Stack<'_> {
    fn word(&self, at: Gva) -> Option<u64> {
        let at = usize::try_from(at.0.checked_sub(STACK)?).ok()?;
        let bytes = self.0.get(at..at.checked_add(8)?)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    }

    fn returns_to(&self, found: Gva, _: Gva) -> Option<Gva> {
        Some(found)
    }

    fn in_place(&self, at: Gva) -> (Gva, u64) {
        // Odd addresses stand for code that has pushed something.
        (at, if at.0 & 1 == 0 { 0 } else { at.0 & 0xf0 })
    }
}

/// Walks a stack with any unwind tables. The first byte selects the format of the entries, or arbitrary tables; the
/// next byte is the number of entries. Then follow the entries, the start of the walk, and the stack.
pub fn unwind(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let (format, count) = (usize::from(input.u8()), usize::from(input.u8()));
    let (addresses, entries) = match FIRST.get(format) {
        Some(first) => tables(*first, input.take(count * 6)),
        None => (input.take(count).to_vec(), input.take(count * 2).to_vec()),
    };
    let image = image(addresses, entries);
    let orc = match image.orc() {
        Ok(orc) => orc,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    let (rip, rsp, returned) = (input.u16(), input.u8(), input.u8() & 1 == 1);
    let regs = Regs {
        rip: TEXT + u64::from(rip),
        rsp: STACK + u64::from(rsp) * 8,
        rbp: input.u64(),
        ..Regs::default()
    };
    let start = Start {
        regs: &regs,
        returned,
    };
    let unwinder = Unwinder::new(Arc::clone(orc), None);
    let mut frames = [Gva(0); 31];
    let (count, goes_on) = unwinder.walk(&Stack(input.rest()), start, &mut frames);
    assert!((1..=frames.len()).contains(&count));
    assert_eq!(frames[0].0, regs.rip);
    assert!(frames[..count].iter().all(|at| at.0 >= KERNEL_TEXT));
    assert!(frames[count..].iter().all(|at| at.0 == 0));
    count > 1 || !goes_on
}

/// Returns the image of a kernel with these tables, valid or not.
pub(super) fn image(addresses: Vec<u8>, entries: Vec<u8>) -> KernelImage {
    let symbols = [
        ("_stext", TEXT, 0, true),
        ("one", TEXT, 0x10, true),
        ("two", TEXT + 0x10, 0x10, true),
        ("_etext", TEXT + TEXT_LEN as u64, 0, true),
    ];
    let section = |name, at, exec, data| Section {
        name,
        at,
        exec,
        data,
    };
    let sections = [
        section(".text", TEXT, true, vec![0x90; TEXT_LEN]),
        section(".orc_unwind_ip", ADDRESSES, false, addresses),
        section(".orc_unwind", ENTRIES, false, entries),
    ];
    KernelImage::parse(&kernel::elf(&sections, &symbols))
        .expect("unwind tables are not needed to read an image")
}

/// Returns tables in which two functions have valid first entries. Each further entry covers the next 16 bytes.
pub(super) fn tables(first: u16, entries: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (mut addresses, mut rules) = (Vec::new(), Vec::new());
    let mut add = |at: u64, rule: &[u8]| {
        let place = ADDRESSES + addresses.len() as u64;
        let offset = at.wrapping_sub(place).to_le_bytes();
        addresses.extend(&offset[..4]);
        rules.extend(rule);
    };
    let begin = [&[8, 0, 0, 0], &first.to_le_bytes()[..]].concat();
    add(TEXT, &begin);
    add(TEXT + 0x10, &begin);
    for (at, rule) in (TEXT + 0x20..).step_by(0x10).zip(entries.chunks_exact(6)) {
        add(at, rule);
    }
    (addresses, rules)
}
