//! Registers a given number of probes in one batch, on the text of a real kernel. Shows how long that takes: the
//! whole change, and the part during which the guest is stopped.
//!
//! ```text
//! hvprobe unpack /boot/vmlinuz vmlinux
//! cargo run --release --package hvprobe-engine --example batch_cost -- vmlinux 10000
//! ```
//!
//! A third argument selects one kind of probes:
//!
//! | kind        | what is planted                                                                   |
//! |-------------|-----------------------------------------------------------------------------------|
//! | `optimized` | at each function's entry a jump to a detour of its own                            |
//! | `inside`    | jumps over several instructions, for which all of the guest's memory is looked through |
//! | `r`         | return probes, with jumps as long as there is room for their instances            |
//! | `emulated`  | int3s                                                                             |
//! | `boosted`   | int3s, and a slot each                                                            |
//!
//! There are two rounds, because the second finds the slots and detours of the first. The guest waits with ftrace's
//! locks held when it begins and when it ends patching function entries, where the probes are; `traced` is the
//! longer of these two times. The last column is the number of optimized probes. The guest has no processors, so
//! the times do not include stopping them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::num::NonZero;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::paging::{Levels, PageTables, entry};
use hvprobe_arch::{Gpa, Gva};
use hvprobe_engine::{HiddenRegion, ProbeInfo, Refusals, Registry, StopError, WhileStopped, World};
use hvprobe_hit::KernelView;
use hvprobe_hit::region::KERNEL_WINDOW;
use hvprobe_hit::table::{HookSet, ProbeTable, Role};
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::symbols::SymbolKind;
use hvprobe_linux::task::TaskUnknown;
use hvprobe_spec::definition::{Definition, Kind, Marks, Target};
use hvprobe_spec::{Mechanism, ProbeId, ProbeSpec};

const PAGE: u64 = 4096;
/// Addresses of the page tables, of the interrupt descriptor table and of the hidden region. The kernel is below
/// them. The hidden region begins at the end of the guest's memory, which has the size that hvprobe gives a guest
/// by default.
const TABLES: Gpa = Gpa(128 << 20);
const IDT: Gpa = Gpa(144 << 20);
const HIDDEN: Gpa = Gpa(256 << 20);
const END: u64 = HIDDEN.0 + HiddenRegion::FULL_SIZE;
const IDT_VIRT: Gva = Gva(0xffff_ffff_f000_0000);

/// A guest with the text of a kernel that has booted.
struct Guest {
    memory: Memory,
    stopped: RefCell<Duration>,
    table: RefCell<Arc<ProbeTable>>,
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

    fn ranges(&self) -> Vec<(Gpa, u64)> {
        vec![(Gpa(0), HIDDEN.0)]
    }
}

impl World for Guest {
    fn memory(&self) -> &dyn PhysMemory {
        &self.memory
    }

    fn stopped(&self, change: &mut WhileStopped<'_>) -> Result<Duration, StopError> {
        let since = Instant::now();
        let table = change(&self.memory, &[]);
        let stopped = since.elapsed();
        if let Some(table) = table {
            *self.table.borrow_mut() = table;
        }
        *self.stopped.borrow_mut() = stopped;
        Ok(stopped)
    }

    fn has_ended(&self) -> bool {
        false
    }

    /// Logs nothing, because nothing writes to the guest's memory while a change is made.
    fn note_writes(&self, _on: bool) -> bool {
        true
    }

    fn written(&self) -> Option<Vec<Gpa>> {
        Some(Vec::new())
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
        let behind = symbol("_end").0.wrapping_sub(image.virt_to_phys_offset());
        assert!(behind <= TABLES.0, "the kernel ends at {behind:#x}");
        let mut page = Gva(start.0 & !(PAGE - 1));
        while page < end {
            let phys = Gpa(page.0.wrapping_sub(image.virt_to_phys_offset()));
            map(&memory, &mut next, page, phys);
            page = page.wrapping_add(PAGE);
        }
        map(&memory, &mut next, IDT_VIRT, IDT);
        // The guest has no kprobes of its own: a table of 64 chains, and a mutex.
        let ends = |name, len: u64| [symbol(name), symbol(name).wrapping_add(len - 1)];
        let data = [ends("kprobe_table", 64 * 8), ends("kprobe_mutex", 64)];
        let pages = data.as_flattened().iter().map(|at| Gva(at.0 & !(PAGE - 1)));
        for page in pages.collect::<BTreeSet<_>>() {
            let phys = Gpa(page.0.wrapping_sub(image.virt_to_phys_offset()));
            map(&memory, &mut next, page, phys);
        }
        let len = usize::try_from(end.0 - start.0).expect("64 bits");
        let text = image.bytes_at(start, len).expect("text");
        let tables = TABLES_OF_KERNEL;
        for (at, bytes) in (0_u64..).zip(text.chunks(4096)) {
            let at = start.wrapping_add(at * PAGE);
            tables.write(&memory, at, bytes).expect("mapped");
        }
        // Write the nops that ftrace leaves at boot.
        for symbol in image.symbols().iter() {
            if image.is_text(symbol.addr) && image.is_ftrace_site(symbol.addr) {
                let nop = [0x0f, 0x1f, 0x44, 0, 0];
                tables.write(&memory, symbol.addr, &nop).expect("mapped");
            }
        }
        Self {
            memory,
            stopped: RefCell::default(),
            table: RefCell::default(),
        }
    }

    /// Returns the hooks that the engine has at the beginning of `function`.
    fn hooks(&self, function: Gva) -> HookSet {
        let table = self.table.borrow();
        // A hook may be after an ENDBR64 and after the instruction that ftrace patches.
        let places = (0..16).map(|offset| function.wrapping_add(offset));
        let members = places
            .filter_map(|at| table.at(at))
            .flat_map(|(_, site)| &site.members);
        let hooks = members.map(|member| match &member.role {
            Role::Internal(internal) => internal.notifies.0,
            Role::Probe(_) | Role::Return { .. } => 0,
        });
        HookSet(hooks.fold(0, |all, one| all | one))
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

/// Maximum time for a batch of 10,000 probes, in milliseconds: for the whole registration, and for the part during
/// which the guest is stopped.
const TARGET: (u32, u32) = (2000, 200);
/// Functions that the guest calls before and after its ftrace patches, in that order.
const FTRACE: [&str; 2] = [
    "ftrace_arch_code_modify_prepare",
    "ftrace_arch_code_modify_post_process",
];
const KINDS: [&str; 5] = ["optimized", "inside", "r", "emulated", "boosted"];

/// The probes of a batch.
#[derive(Clone, Copy)]
struct Wanted {
    kind: Kind,
    offset: u64,
    mechanism: Option<Mechanism>,
}

impl Wanted {
    fn named(what: &str) -> Option<Self> {
        let mut wanted = Self {
            kind: Kind::Probe,
            offset: 0,
            mechanism: Some(Mechanism::Optimized),
        };
        match what {
            "optimized" => {}
            // After the nop at the entry.
            "inside" => wanted.offset = 5,
            "r" => {
                wanted.kind = Kind::Return { maxactive: None };
                wanted.mechanism = None;
            }
            "emulated" => wanted.mechanism = Some(Mechanism::Emulated),
            "boosted" => wanted.mechanism = Some(Mechanism::Boosted),
            _ => return None,
        }
        Some(wanted)
    }
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let parsed = || {
        let (kernel, count, kinds) = match arguments.as_slice() {
            [kernel, count] => (kernel, count, KINDS.to_vec()),
            [kernel, count, kind] => (kernel, count, vec![kind.as_str()]),
            _ => return None,
        };
        let named = |kind| Some((kind, Wanted::named(kind)?));
        let kinds: Option<Vec<_>> = kinds.into_iter().map(named).collect();
        let count = count.parse::<NonZero<usize>>().ok()?;
        Some((kernel, count.get(), kinds?))
    };
    let Some((kernel, count, kinds)) = parsed() else {
        eprintln!("usage: batch_cost VMLINUX PROBES [{}]", KINDS.join("|"));
        return ExitCode::from(2);
    };
    let elf = std::fs::read(kernel).expect("the kernel can be read");
    let image = Arc::new(KernelImage::parse(&elf).expect("an ELF kernel"));
    let (all, stopped) = TARGET;
    println!(
        "{count} probes in one batch, {} MiB of memory: ms in all / while the guest stands still",
        HIDDEN.0 >> 20
    );
    println!(
        "to register them is to take at most {all} / {stopped}, as long as the guest's tracer at most {stopped}"
    );
    println!(
        "{:<20}{:>14}{:>14}{:>14}{:>14}{:>14}{:>8}  verdict{:>8}",
        "", "register", "disable", "enable", "unregister", "traced", "watch", "jumps"
    );
    let mut status = ExitCode::SUCCESS;
    for (name, wanted) in kinds {
        if let Err(why) = measure(name, wanted, count, &image) {
            println!("{name}: {why}");
            status = ExitCode::FAILURE;
        }
    }
    status
}

/// Duration of a change as a whole, and of the part during which the guest was stopped.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Took {
    all: Duration,
    stopped: Duration,
}

impl Took {
    fn of<T>(guest: &Guest, change: impl FnOnce() -> T) -> (T, Self) {
        let since = Instant::now();
        let done = change();
        let all = since.elapsed();
        let stopped = *guest.stopped.borrow();
        (done, Self { all, stopped })
    }
}

impl std::fmt::Display for Took {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = format!("{} / {}", self.all.as_millis(), self.stopped.as_millis());
        f.pad(&text)
    }
}

/// Returns a guest whose text is final, and a registry without probes.
fn booted(image: &Arc<KernelImage>) -> (Guest, Registry) {
    let guest = Guest::boot(image);
    let hidden = HiddenRegion::new(HIDDEN, END - HIDDEN.0, KERNEL_WINDOW);
    let mut registry = Registry::new(Arc::clone(image), 2, hidden);
    let view = KernelView {
        tables: TABLES_OF_KERNEL,
        task: image.task_layout().map_err(|_| TaskUnknown::NoClues),
        cpu_number: image.cpu_number(),
        idt: IDT_VIRT,
    };
    let live = registry.go_live(view, None, &guest);
    live.expect("nobody to stop");
    (guest, registry)
}

/// Prints two rows about probes of one kind.
fn measure(
    name: &str,
    wanted: Wanted,
    count: usize,
    image: &Arc<KernelImage>,
) -> Result<(), String> {
    let specs = {
        let (guest, mut registry) = booted(image);
        functions(image, &mut registry, &guest, count, wanted)?
    };
    let (guest, mut registry) = booted(image);
    for round in ["first", "second"] {
        let (done, register) = Took::of(&guest, || {
            registry.register_batch(&specs, Refusals::Fail, &guest)
        });
        let ids = done.map_err(|error| error_chain(&error))?.ids();
        let is_jump = |probe: &ProbeInfo| probe.mechanism == Some(Mechanism::Optimized);
        let listed = registry.list(&guest.memory);
        let jumps = listed.iter().filter(|probe| is_jump(probe)).count();
        let ((), watch) = Took::of(&guest, || registry.check_text(&guest));
        let (done, disable) = Took::of(&guest, || registry.set_enabled(&ids, false, &guest));
        done.expect("registered");
        let (done, enable) = Took::of(&guest, || registry.set_enabled(&ids, true, &guest));
        done.expect("registered");
        let mut traced = Took::default();
        for function in FTRACE {
            let function = image.symbols().address_of(function).expect("a kernel");
            let hooks = guest.hooks(function);
            let (_, took) = Took::of(&guest, || registry.run_hooks(hooks, Gva(0), &guest));
            traced = traced.max(took);
        }
        let (done, unregister) = Took::of(&guest, || registry.unregister(&ids, &guest));
        done.expect("registered");
        // Release the ghosts of the jumps, which no task can reach any more, as a machine's supervisor does.
        if let Some(retry) = registry.retry() {
            let looked = retry.look(&guest);
            registry.end_retry(looked, &guest);
        }
        let (all, stopped) = TARGET;
        let met = register.all.as_millis() <= all.into()
            && register.stopped.as_millis() <= stopped.into()
            && traced.all.as_millis() <= stopped.into();
        println!(
            "{:<20}{register:>14}{disable:>14}{enable:>14}{unregister:>14}{traced:>14}{:>8}  {:<7}{jumps:>8}",
            format!("{name}, {round}"),
            watch.all.as_millis(),
            if met { "met" } else { "missed" }
        );
    }
    Ok(())
}

/// Returns definitions of probes for `count` functions that can be probed, spread over the kernel. If there are
/// fewer, returns the reason.
fn functions(
    image: &KernelImage,
    registry: &mut Registry,
    guest: &Guest,
    count: usize,
    wanted: Wanted,
) -> Result<Vec<ProbeSpec>, String> {
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
            let target = Target::Symbol {
                module: None,
                name,
                offset: wanted.offset,
            };
            let mut spec = ProbeSpec::from(Definition {
                kind: wanted.kind,
                name: None,
                target,
                arguments: Vec::new(),
                filter: None,
                marks: Marks::default(),
            });
            spec.mechanism = wanted.mechanism;
            spec
        })
        .collect();
    // For few probes, not every function has to be tried.
    let some = specs.len() / (4 * count);
    let specs: Vec<_> = specs.into_iter().step_by(some.max(1)).collect();
    let (mut good, mut refused) = (Vec::new(), None);
    for batch in specs.chunks(4096) {
        let done = registry.register_batch(batch, Refusals::Skip, guest);
        let done = done.expect("nobody to stop");
        good.extend(done.probes.iter().map(|(index, _)| batch[*index].clone()));
        let ids: Vec<ProbeId> = done.ids();
        registry.unregister(&ids, guest).expect("registered");
        refused = refused.or(done.skipped.into_iter().next());
    }
    if good.len() < count {
        let (possible, tried) = (good.len(), specs.len());
        let why = refused.map_or_else(String::new, |first| {
            format!("; {first} cannot: {}", error_chain(&first.why))
        });
        return Err(format!(
            "only {possible} of {tried} functions can be probed{why}"
        ));
    }
    let step = good.len() / count;
    Ok(good.into_iter().step_by(step).take(count).collect())
}

/// Returns the text of an error, followed by those of its sources.
fn error_chain(error: &dyn std::error::Error) -> String {
    let source = error
        .source()
        .map(|source| format!(": {}", error_chain(source)));
    format!("{error}{}", source.unwrap_or_default())
}
