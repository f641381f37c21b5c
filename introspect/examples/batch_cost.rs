//! Registers as many probes as asked for in one batch, on the text of a real kernel, and tells what
//! that takes: all in all, and while the guest stands still.
//!
//! ```text
//! hvprobe unpack /boot/vmlinuz vmlinux
//! cargo run --release --package hvprobe-introspect --example batch_cost -- vmlinux 10000
//! ```
//!
//! With `r`, return probes; with `boosted`, slots for all of them. Every round comes twice, as the
//! second finds the slots of the first.
//!
//! The guest has no processors: what is missing is only what it takes to stop them.

use std::cell::RefCell;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::paging::{Levels, PageTables, entry};
use hvprobe_arch::{Gpa, Gva};
use hvprobe_introspect::definition::{Definition, Kind, Target};
use hvprobe_introspect::hidden::{HiddenRegion, KERNEL_WINDOW};
use hvprobe_introspect::image::KernelImage;
use hvprobe_introspect::probe::hit::KernelView;
use hvprobe_introspect::probe::registry::Registry;
use hvprobe_introspect::probe::{Mechanism, ProbeId, ProbeSpec, Refusals};
use hvprobe_introspect::symbols::SymbolKind;
use hvprobe_introspect::world::{Change, StopError, World};

const PAGE: u64 = 4096;
/// Where page tables, the interrupt descriptor table and the hidden region are; the text is below.
const TABLES: Gpa = Gpa(64 << 20);
const IDT: Gpa = Gpa(80 << 20);
const HIDDEN: Gpa = Gpa(82 << 20);
const END: u64 = 84 << 20;
const IDT_VIRT: Gva = Gva(0xffff_ffff_f000_0000);

/// A guest with the text of a kernel that has booted.
struct Guest {
    memory: Memory,
    stopped: RefCell<Duration>,
}

struct Memory(RefCell<Vec<u8>>);

impl Memory {
    fn range(&self, at: Gpa, len: usize) -> Result<std::ops::Range<usize>, OutOfRange> {
        let start = usize::try_from(at.0).map_err(|_| OutOfRange { at, len })?;
        let end = start.checked_add(len).ok_or(OutOfRange { at, len })?;
        let fits = end <= self.0.borrow().len();
        fits.then_some(start..end).ok_or(OutOfRange { at, len })
    }
}

impl PhysMemory for Memory {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
        let range = self.range(at, into.len())?;
        into.copy_from_slice(&self.0.borrow()[range]);
        Ok(())
    }

    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
        let range = self.range(at, bytes.len())?;
        self.0.borrow_mut()[range].copy_from_slice(bytes);
        Ok(())
    }
}

impl World for Guest {
    fn memory(&self) -> &dyn PhysMemory {
        &self.memory
    }

    fn stopped(&self, change: &mut Change<'_>) -> Result<Duration, StopError> {
        let since = Instant::now();
        change(&self.memory, &[]);
        let stopped = since.elapsed();
        *self.stopped.borrow_mut() = stopped;
        Ok(stopped)
    }

    fn collect(&self) {}
}

const TABLES_OF_KERNEL: PageTables = PageTables {
    root: TABLES,
    levels: Levels::Four,
};

impl Guest {
    fn boot(image: &KernelImage) -> Self {
        let memory = Memory(RefCell::new(vec![
            0;
            usize::try_from(END).expect("64 bits")
        ]));
        let mut next = TABLES.wrapping_add(PAGE);
        let symbol = |name| image.symbols().address_of(name).expect("a kernel");
        let (start, end) = (symbol("_stext"), symbol("_etext"));
        let mut page = Gva(start.0 & !(PAGE - 1));
        while page < end {
            let phys = Gpa(page.0.wrapping_sub(image.virt_to_phys_offset()));
            map(&memory, &mut next, page, phys);
            page = page.wrapping_add(PAGE);
        }
        map(&memory, &mut next, IDT_VIRT, IDT);
        let len = usize::try_from(end.0 - start.0).expect("64 bits");
        let text = image.bytes_at(start, len).expect("text");
        let tables = TABLES_OF_KERNEL;
        for (at, bytes) in (0_u64..).zip(text.chunks(4096)) {
            let at = start.wrapping_add(at * PAGE);
            tables.write(&memory, at, bytes).expect("mapped");
        }
        // As ftrace leaves them at boot.
        for symbol in image.symbols().iter() {
            if image.is_text(symbol.addr) && image.is_ftrace_site(symbol.addr) {
                let nop = [0x0f, 0x1f, 0x44, 0, 0];
                tables.write(&memory, symbol.addr, &nop).expect("mapped");
            }
        }
        Self {
            memory,
            stopped: RefCell::default(),
        }
    }
}

fn map(memory: &Memory, next: &mut Gpa, virt: Gva, phys: Gpa) {
    let set = |at: Gpa, value: u64| {
        let value = value | entry::PRESENT | entry::ACCESSED | entry::WRITABLE;
        memory.write(at, &value.to_le_bytes()).expect("in memory");
    };
    for level in (2..=4).rev() {
        let (at, value) = TABLES_OF_KERNEL
            .entry_at(memory, virt, level)
            .expect("in memory");
        if value == 0 {
            set(at, next.0);
            *next = next.wrapping_add(PAGE);
        }
    }
    let (at, _) = TABLES_OF_KERNEL
        .entry_at(memory, virt, 1)
        .expect("in memory");
    set(at, phys.0);
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let parsed = || {
        let [kernel, count, kind @ ..] = arguments.as_slice() else {
            return None;
        };
        let kind = match kind {
            [] => Kind::Probe,
            [kind] if kind == "r" => Kind::Return { maxactive: None },
            [how] if how == "boosted" => Kind::Probe,
            _ => return None,
        };
        let boosted = arguments.len() == 3 && kind == Kind::Probe;
        let mechanism = boosted.then_some(Mechanism::Boosted);
        Some((kernel, count.parse::<usize>().ok()?, kind, mechanism))
    };
    let Some((kernel, count, kind, mechanism)) = parsed() else {
        eprintln!("usage: batch_cost VMLINUX PROBES [r|boosted]");
        return ExitCode::from(2);
    };
    let elf = std::fs::read(kernel).expect("the kernel can be read");
    let image = Arc::new(KernelImage::parse(&elf).expect("an ELF kernel"));
    let guest = Guest::boot(&image);
    let hidden = HiddenRegion::new(HIDDEN, END - HIDDEN.0, KERNEL_WINDOW);
    let mut registry = Registry::new(Arc::clone(&image), 2, hidden);
    let view = KernelView {
        tables: TABLES_OF_KERNEL,
        task: image.task_layout().ok(),
        idt: IDT_VIRT,
    };
    registry
        .go_live(view, None, &guest)
        .expect("nobody to stop");
    let mut specs = functions(&image, &mut registry, &guest, count, kind);
    for spec in &mut specs {
        spec.mechanism = mechanism;
    }

    for round in ["first", "second"] {
        let since = Instant::now();
        let done = registry.register_batch(&specs, Refusals::Fail, &guest);
        let done = done.expect("these can be probed");
        tell(round, "register", done.probes.len(), since, &guest);
        let since = Instant::now();
        registry.watch(&guest.memory);
        println!("{round}: text under all looked at in {:?}", since.elapsed());
        let ids = done.ids();
        let since = Instant::now();
        registry
            .set_enabled(&ids, false, &guest)
            .expect("registered");
        tell(round, "disable", ids.len(), since, &guest);
        let since = Instant::now();
        registry
            .set_enabled(&ids, true, &guest)
            .expect("registered");
        tell(round, "enable", ids.len(), since, &guest);
        let since = Instant::now();
        registry.unregister(&ids, &guest).expect("registered");
        tell(round, "unregister", ids.len(), since, &guest);
    }
    ExitCode::SUCCESS
}

fn tell(round: &str, what: &str, count: usize, since: Instant, guest: &Guest) {
    println!(
        "{round}: {what} {count}: {:?}, stopped for {:?}",
        since.elapsed(),
        guest.stopped.borrow()
    );
}

/// `count` functions that can be probed, all over the kernel.
fn functions(
    image: &KernelImage,
    registry: &mut Registry,
    guest: &Guest,
    count: usize,
    kind: Kind,
) -> Vec<ProbeSpec> {
    let symbols = image.symbols();
    let functions = symbols.iter().filter(|symbol| {
        symbol.kind == SymbolKind::Text
            && image.is_text(symbol.addr)
            && image.is_ftrace_site(symbol.addr)
            && symbols.lookup(symbol.name).is_ok()
    });
    let specs: Vec<_> = functions
        .map(|symbol| {
            let name = symbol.name.to_owned();
            ProbeSpec::from(Definition {
                kind,
                name: None,
                target: Target::Symbol {
                    module: None,
                    name,
                    offset: 0,
                },
            })
        })
        .collect();
    let mut good = Vec::new();
    for batch in specs.chunks(4096) {
        let done = registry.register_batch(batch, Refusals::Skip, guest);
        let done = done.expect("nobody to stop");
        good.extend(done.probes.iter().map(|(index, _)| batch[*index].clone()));
        let ids: Vec<ProbeId> = done.ids();
        registry.unregister(&ids, guest).expect("registered");
    }
    assert!(good.len() >= count, "only {} can be probed", good.len());
    let step = good.len() / count.max(1);
    good.into_iter().step_by(step.max(1)).take(count).collect()
}
