//! Tests of unwinding through modules of a made-up guest, sound and hostile.

use std::cell::Cell;

use hvprobe_fixtures::modules::{AGES, Age, Guest, MODULES, UNWIND, image, types};
use hvprobe_fixtures::tables;

use super::*;
use crate::image::KernelImage;
use crate::modules::ModuleReader;
use crate::unwind::ModuleTables;

/// `MODULE_STATE_LIVE`.
const LIVE: u32 = 0;
/// Maximum number of words that may be read: those of the stack, and those of modules.
const MOST_READ: u32 = 31 * 5 + (1 << 13);

/// A guest with modules and a stack. Counts the words that are read.
struct Whole {
    guest: Guest,
    stack: HashMap<u64, u64>,
    read: Cell<u32>,
}

impl Surroundings for Whole {
    fn word(&self, at: Gva) -> Option<u64> {
        self.read.set(self.read.get() + 1);
        let on_stack = self.stack.get(&at.0).copied();
        on_stack.or_else(|| tables().read_u64(&self.guest.mem, at).ok())
    }

    fn returns_to(&self, found: Gva, _: Gva) -> Option<Gva> {
        Some(found)
    }

    fn in_place(&self, at: Gva) -> (Gva, u64) {
        (at, 0)
    }
}

fn module_tables(age: Age) -> ModuleTables {
    let image = KernelImage::parse(&image(types(age).bytes())).expect("an image");
    let reader = ModuleReader::new(&image).expect("it has modules");
    reader.unwind_tables().expect("their tables are told of")
}

/// Unwinds a stack of `guest` that consists of `words`.
fn follow(guest: Guest, dialect: Dialect, rip: u64, words: &[(u64, u64)]) -> (Vec<u64>, bool) {
    let orc = read(&entries(dialect)).expect("tables");
    let unwinder = Unwinder::new(Arc::new(orc), Some(module_tables(guest.age)));
    let whole = Whole {
        guest,
        stack: words.iter().copied().collect(),
        read: Cell::new(0),
    };
    let regs = Regs {
        rip,
        rsp: STACK,
        ..Regs::default()
    };
    let start = Start {
        regs: &regs,
        returned: false,
    };
    let mut frames = [Gva(0); 31];
    let (count, goes_on) = unwinder.walk(&whole, start, &mut frames);
    assert!(whole.read.get() <= MOST_READ, "{} words", whole.read.get());
    (frames[..count].iter().map(|at| at.0).collect(), goes_on)
}

/// Returns rules for the functions of the second module in [`with_modules`]. After its start, each function keeps
/// at least one word on the stack besides the return address.
fn rules(dialect: Dialect) -> Vec<(u64, [u8; 6])> {
    let word = dialect.call | dialect.sp;
    [
        (0, 8),
        (0x10, 24),
        (0x100, 8),
        (0x110, 40),
        (0x2000, 8),
        (0x2010, 16),
    ]
    .map(|(offset, sp)| (offset, entry(sp, 0, word)))
    .into()
}

/// Returns a guest with two modules, and the address of the second one.
fn with_modules(age: Age, dialect: Dialect) -> (Guest, u64) {
    let mut guest = Guest::new(age);
    // The module that was added last is the first on the list.
    let base = guest.add("second", LIVE).unwind(&rules(dialect)).base.0;
    guest.add("first", LIVE).unwind(&[(0, [0xff; 6])]);
    (guest, base)
}

/// Returns the stack of the second module's function at 0x120. Its callers are the function at 0x20, init text,
/// and the kernel's outermost function.
fn through(base: u64) -> [(u64, u64); 3] {
    [
        (STACK + 32, base + 0x20),
        (STACK + 40 + 16, base + 0x2020),
        (STACK + 64 + 8, TEXT + 0x620),
    ]
}

#[test]
fn functions_of_modules_lead_to_their_callers() {
    for (age, dialect) in AGES
        .into_iter()
        .flat_map(|age| ALL.map(|dialect| (age, dialect)))
    {
        let (guest, base) = with_modules(age, dialect);
        let found = follow(guest, dialect, base + 0x120, &through(base));
        let expected = vec![base + 0x120, base + 0x20, base + 0x2020, TEXT + 0x620];
        assert_eq!(found, (expected, false), "{age:?} {dialect:?}");
        // The stack leads from the kernel into a module and back. The module's function has just been entered.
        let (guest, base) = with_modules(age, dialect);
        let words = [(STACK, base + 0x101), (STACK + 8, TEXT + 0x620)];
        let found = follow(guest, dialect, TEXT + 0x100, &words);
        assert_eq!(found.0, [TEXT + 0x100, base + 0x101, TEXT + 0x620]);
    }
}

#[test]
fn text_that_is_no_modules_any_more_ends_a_stack() {
    for age in AGES {
        let mut guest = Guest::new(age);
        let made = guest.add("second", LIVE).unwind(&rules(V64));
        let base = made.without_init().base.0;
        let found = follow(guest, V64, base + 0x120, &through(base));
        assert_eq!(
            found,
            (vec![base + 0x120, base + 0x20, base + 0x2020], true)
        );

        let (guest, base) = with_modules(age, V64);
        guest.put(MODULES, &MODULES.0.to_le_bytes());
        let found = follow(guest, V64, base + 0x120, &through(base));
        assert_eq!(found, (vec![base + 0x120], true));
    }
}

#[test]
fn modules_without_tables_end_a_stack() {
    let mut guest = Guest::new(Age::V64);
    let base = guest.add("bare", LIVE).base.0;
    let found = follow(guest, V64, base + 0x120, &through(base));
    assert_eq!(found, (vec![base + 0x120], true));
    // Addresses before the first entry have no rule.
    let mut guest = Guest::new(Age::V64);
    let made = guest.add("late", LIVE);
    let base = made.unwind(&rules(V64)[2..]).base.0;
    let found = follow(guest, V64, base + 0x20, &through(base));
    assert_eq!(found, (vec![base + 0x20], true));
}

#[test]
fn lists_and_tables_without_an_end_are_left() {
    // The list returns to its first module instead of its head, so it never ends.
    let (guest, base) = with_modules(Age::V64, V64);
    let first = guest.word(MODULES);
    let last = guest.word(Gva(first));
    guest.put(Gva(last), &first.to_le_bytes());
    let nowhere = base + 0x4_0000;
    let found = follow(guest, V64, nowhere, &through(base));
    assert_eq!(found, (vec![nowhere], true));

    // The table claims to fill all of memory.
    let mut guest = Guest::new(Age::V64);
    let made = guest.add("second", LIVE).unwind(&rules(V64));
    made.field(UNWIND.1, &u32::MAX.to_le_bytes());
    let base = made.base.0;
    let found = follow(guest, V64, base + 0x120, &through(base));
    assert_eq!(found, (vec![base + 0x120], true));
}

proptest! {
    /// For any modules and stacks, frames are kernel text, and the number of words read is bounded.
    #[test]
    fn hostile_modules_end(
        ages in 0..2_usize,
        damage in proptest::collection::vec((0..0xf000_u64, 0..4_u8, any::<u64>()), 0..16),
        words in proptest::collection::vec((0..64_u64, 0..3_u8, any::<u64>()), 0..64),
        rip in 0..0x8000_u64,
    ) {
        let (guest, base) = with_modules(AGES[ages], V64);
        let near = |kind: u8, word: u64| match kind {
            0 => word,
            1 => base + word % 0x8000,
            2 => MODULES.0 + word % 0x100,
            _ => word % 0x1_0000,
        };
        for (offset, kind, word) in damage {
            guest.damage(offset, &near(kind, word).to_le_bytes());
        }
        let words: Vec<_> = words
            .into_iter()
            .map(|(at, kind, word)| (STACK + 8 * at, near(kind, word)))
            .collect();
        let (frames, _) = follow(guest, V64, base + rip, &words);
        prop_assert!(frames.iter().all(|frame| *frame >= 0xffff_ffff_8000_0000));
    }
}
