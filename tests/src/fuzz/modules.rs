//! Modules of a malicious guest, and stacks that pass through them.

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use hvprobe_arch::{Gva, Regs};
use hvprobe_fixtures::modules::{AGES, Age, Guest, MODULE_COUNT, MODULES, full, image, types};
use hvprobe_fixtures::{MODULE_VIRT, tables};
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::modules::{Module, ModuleList, ModuleReader, ModuleState};
use hvprobe_linux::types::Types;
use hvprobe_linux::unwind::{Start, Surroundings, Unwinder};

use super::input::Input;
use super::memory::Flat;
use super::unwind::{self, FIRST, KERNEL_TEXT, STACK};

const PAGE: u64 = 0x1000;
/// Size of the memory that contains the modules.
const SPAN: u64 = MODULE_COUNT * 3 * PAGE;
/// Page with the heads of the lists.
const HEADS: Gva = Gva(MODULES.0 & !(PAGE - 1));
/// Address range of modules (Documentation/arch/x86/x86_64/mm.rst in the kernel).
const SPACE: Range<u64> = 0xffff_ffff_a000_0000..0xffff_ffff_ff00_0000;
/// Maximum number of modules read from a list.
const MOST_MODULES: usize = 2048;
/// Maximum number of words read from the stack and from the modules for a trace of [`FRAMES`] frames.
const MOST_WORDS: usize = 5 * FRAMES + (1 << 13);
const FRAMES: usize = 31;

/// A kernel, and the unmodified memory of a guest that runs it.
struct Kernel {
    reader: ModuleReader,
    types: Arc<Types>,
    unwinder: Unwinder,
    memory: Vec<u8>,
    /// Addresses of the modules' `struct module`.
    modules: Vec<Gva>,
}

impl Kernel {
    fn of(age: Age) -> &'static Self {
        static KERNELS: [OnceLock<Kernel>; 2] = [const { OnceLock::new() }; 2];
        KERNELS[usize::from(age == AGES[1])].get_or_init(|| Self::new(age))
    }

    fn new(age: Age) -> Self {
        let known = types(age).bytes();
        let kernel = KernelImage::parse(&image(known.clone())).expect("an image");
        let reader = ModuleReader::new(&kernel).expect("it has modules");
        // A third function is the outermost one.
        let (addresses, entries) = unwind::tables(FIRST[1], &[0, 0, 0, 0, 0, 1]);
        let image = unwind::image(addresses, entries);
        let orc = image.orc().expect("sound tables");
        let mut guest = Guest::new(age);
        let modules = (0..MODULE_COUNT).map(|number| {
            let note = |kind: u8| {
                let words = [4, 20, u32::from(kind)].map(u32::to_le_bytes);
                [&words.concat(), &b"GNU\0"[..], &[kind; 20]].concat()
            };
            let state = u32::try_from(number % 4).expect("small");
            let made = full(&mut guest, &format!("module_{number}"), state);
            let made = made.notes(&[note(1), note(3)]);
            made.unwind(&unwind_rules()).at
        });
        let modules = modules.collect();
        Self {
            unwinder: Unwinder::new(Arc::clone(orc), reader.unwind_tables()),
            types: Arc::new(Types::parse(&known).expect("sound types")),
            reader,
            memory: guest.mem.snapshot(),
            modules,
        }
    }
}

/// Returns unwind rules: offsets in a module's text, each with the entry that applies from there on. An entry gives
/// the distance from the stack pointer to the word after the return address.
fn unwind_rules() -> [(u64, [u8; 6]); 6] {
    [
        (0, 8),
        (0x10, 24),
        (0x100, 8),
        (0x110, 40),
        (0x2000, 8),
        (0x2010, 16),
    ]
    .map(|(offset, sp)| {
        let [low, high] = FIRST[1].to_le_bytes();
        (offset, [sp, 0, 0, 0, low, high])
    })
}

/// Reads the modules of a guest after changes of its memory, and walks a stack through the modules. The first byte
/// selects the age of the guest's kernel. Then follow the changes, each with two bytes of place, one of kind and
/// eight of content; the place 0xffff ends them. Then follow the start of the walk, and the stack.
pub fn modules(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let kernel = Kernel::of(AGES[usize::from(input.u8() & 1)]);
    let mem = Flat::new(&kernel.memory, kernel.memory.len());
    while !input.is_empty() {
        let (place, kind, value) = (u64::from(input.u16()), input.u8(), input.u64());
        if place == u64::from(u16::MAX) {
            break;
        }
        change(&mem, place, kind, value);
    }
    let sound = check(kernel, &mem);
    follow(kernel, &mem, input);
    sound
}

/// Writes to the memory of the modules, or to the page with the heads of their lists.
fn change(mem: &Flat, place: u64, kind: u8, value: u64) {
    let at = match place.checked_sub(SPAN) {
        None => MODULE_VIRT.wrapping_add(place.min(SPAN - 8)),
        Some(offset) => HEADS.wrapping_add(offset.min(PAGE - 8)),
    };
    let (value, len) = match kind % 6 {
        0 => (value, 8),
        1 => (MODULE_VIRT.0 + value % SPAN, 8),
        2 => (HEADS.0 + value % PAGE, 8),
        3 => (value, 4),
        4 => (value, 2),
        _ => (value, 1),
    };
    let bytes = value.to_le_bytes();
    tables().write(mem, at, &bytes[..len]).expect("mapped");
}

/// Reads the modules from their list, and each module by its address. Returns whether a module in the list has
/// symbols.
fn check(kernel: &Kernel, mem: &Flat) -> bool {
    let reader = &kernel.reader;
    for at in &kernel.modules {
        if let Err(error) = reader.read_one(*at, &tables(), mem) {
            assert!(!error.to_string().is_empty());
        }
        match reader.containing(*at, &tables(), mem) {
            Ok(module) => assert!(module.is_none_or(|module| is_printable(module.name()))),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    let list = match reader.read(&tables(), mem) {
        Ok(list) => list,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    assert!(list.iter().count() <= MOST_MODULES);
    for module in &list {
        check_module(kernel, &list, module, mem);
    }
    list.iter().any(|module| !module.symbols().is_empty())
}

fn check_module(kernel: &Kernel, list: &ModuleList, module: &Module, mem: &Flat) {
    assert!(is_printable(module.name()));
    let unformed = module.state() == ModuleState::Unformed;
    let texts = [Some(module.text()), module.init_text()];
    for text in texts.into_iter().flatten().filter(|text| !text.is_empty()) {
        assert!(!unformed, "nothing of it may be relied on");
        assert!(SPACE.contains(&text.start.0) && text.end.0 <= SPACE.end);
        for at in [text.start, text.end.wrapping_sub(1)] {
            assert!(module.is_text(at) && list.containing(at).is_some());
            let _ = (module.has_fixup(at), module.is_ftrace_site(at));
            let _ = module.forbidden_as_is(at, 0xf0);
        }
    }
    assert!(!unformed || module.forbidden(module.address()).is_some());
    for symbol in module.symbols().iter() {
        assert!(SPACE.contains(&symbol.addr.0), "{symbol:?}");
        let _ = module.forbidden(symbol.addr);
        if let Err(error) = list.lookup_in(module.name(), symbol.name) {
            assert!(!error.to_string().is_empty());
        }
    }
    if let Err(error) = list.lookup("start") {
        assert!(!error.to_string().is_empty());
    }
    let build_id = kernel.reader.build_id(module, &tables(), mem);
    assert!(build_id.is_none_or(|id| id.len() <= 4096));
    kernel
        .reader
        .read_types(list, module, &kernel.types, &tables(), mem);
    match module.types() {
        Ok(types) => drop(types.function("start")),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn is_printable(name: &str) -> bool {
    name.bytes()
        .all(|byte| byte == b' ' || byte.is_ascii_graphic())
}

/// Walks a stack from somewhere in the modules: all frames are in the kernel, and the number of words read is
/// bounded.
fn follow(kernel: &Kernel, mem: &Flat, mut input: Input<'_>) {
    let (rip, rsp, returned) = (input.u16(), input.u8(), input.u8() & 1 == 1);
    let regs = Regs {
        rip: MODULE_VIRT.0 + u64::from(rip),
        rsp: STACK + u64::from(rsp) * 8,
        rbp: input.u64(),
        ..Regs::default()
    };
    let start = Start {
        regs: &regs,
        returned,
    };
    let whole = Whole {
        mem,
        stack: input.rest(),
        words: Cell::new(0),
    };
    let mut frames = [Gva(0); FRAMES];
    let (count, _) = kernel.unwinder.walk(&whole, start, &mut frames);
    assert!((1..=frames.len()).contains(&count));
    assert!(frames[..count].iter().all(|at| at.0 >= KERNEL_TEXT));
    assert!(frames[count..].iter().all(|at| at.0 == 0));
    assert!(
        whole.words.get() <= MOST_WORDS,
        "{} words",
        whole.words.get()
    );
}

/// A guest, and a stack with bytes of the input.
struct Whole<'a> {
    mem: &'a Flat,
    stack: &'a [u8],
    words: Cell<usize>,
}

impl Surroundings for Whole<'_> {
    fn word(&self, at: Gva) -> Option<u64> {
        self.words.set(self.words.get() + 1);
        let on_stack = || {
            let offset = usize::try_from(at.0.checked_sub(STACK)?).ok()?;
            let bytes = self.stack.get(offset..offset.checked_add(8)?)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        on_stack().or_else(|| tables().read_u64(self.mem, at).ok())
    }

    fn returns_to(&self, found: Gva, _: Gva) -> Option<Gva> {
        Some(found)
    }

    fn in_place(&self, at: Gva) -> (Gva, u64) {
        (at, 0)
    }
}
