//! A guest for tests, without processors: memory with a synthetic kernel's text mapped where it is
//! linked, and a [`World`] that counts its stops and fails when told to.
//!
//! What is kept true: physical memory is a few hundred KiB whatever the link addresses, and nothing
//! but the engine under test and the test itself ever writes to it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::paging::{Levels, PageTables, entry};
use hvprobe_arch::{Gpa, Gva, Regs};

use crate::hidden::{HiddenRegion, KERNEL_WINDOW};
use crate::image::KernelImage;
use crate::probe::hit::KernelView;
use crate::probe::table::ProbeTable;
use crate::task::TaskUnknown;
use crate::world::{Change, Clock, Reading, Standing, StopError, World};

const PAGE: u64 = 4096;
const ROOT: Gpa = Gpa(0x1000);
/// Where physical memory for text begins.
const TEXT: Gpa = Gpa(0x2_0000);
/// Where the page with the stack, the per-CPU variables and the task is.
pub(crate) const DATA: Gpa = Gpa(0x3_0000);
pub(crate) const DATA_VIRT: Gva = Gva(0xffff_ffff_82a0_0000);
/// Where the page with the interrupt descriptor table is.
const IDT: Gpa = Gpa(0x3_1000);
const IDT_VIRT: Gva = Gva(0xffff_ffff_82a0_1000);
/// Where the hidden region begins; memory ends after it.
pub(crate) const HIDDEN: Gpa = Gpa(0x4_0000);
/// The stack pointer of a hit: the words below and above it are mapped.
pub(crate) const STACK: Gva = Gva(DATA_VIRT.0 + 0x800);
/// Where the pages for modules are, which the guest has no use for otherwise.
pub(crate) const MODULE_FRAMES: Gpa = Gpa(0x3_2000);
/// Where they are mapped.
pub(crate) const MODULE_VIRT: Gva = Gva(0xffff_ffff_c000_0000);
/// How many there are.
pub(crate) const MODULE_PAGES: u64 = 12;
/// How many slots a region of [`hidden`]'s size has.
pub(crate) const SLOTS: usize = 128;

/// The hidden region of the tests: its fixed pages and one page of slots.
pub(crate) fn hidden() -> HiddenRegion {
    HiddenRegion::new(HIDDEN, 4 * PAGE, KERNEL_WINDOW)
}

/// Where a hidden region of full size begins, in [`Guest::boot_whole`].
pub(crate) const WHOLE_HIDDEN: Gpa = Gpa(2 << 20);

/// A hidden region with room for detours.
pub(crate) fn whole_hidden() -> HiddenRegion {
    HiddenRegion::new(WHOLE_HIDDEN, HiddenRegion::FULL_SIZE, KERNEL_WINDOW)
}

thread_local! {
    static WORK: Cell<u64> = const { Cell::new(0) };
}

/// How much the engine has done in this thread: accesses to a guest's memory, and what else calls
/// [`count_work`].
pub(crate) fn work() -> u64 {
    WORK.get()
}

/// Counts as one access to memory; for unit tests alone, as examples that share this memory count
/// instructions.
pub(crate) fn count_work() {
    if cfg!(test) {
        WORK.set(WORK.get() + 1);
    }
}

/// Guest memory from address 0 up. A clone is the same memory.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    bytes: Rc<RefCell<Vec<u8>>>,
    writes: Rc<Cell<u64>>,
    failing: Rc<Cell<Option<u64>>>,
    /// The pages that were written, while that is noted.
    written: Rc<RefCell<Option<Vec<Gpa>>>>,
    /// How often whole pages were read.
    pub(crate) reads: Rc<Cell<u64>>,
}

impl Memory {
    /// Memory up to and with a hidden region of `hidden` bytes.
    pub(crate) fn new(hidden: u64) -> Self {
        let size = usize::try_from(HIDDEN.0 + hidden).expect("small");
        Self {
            bytes: Rc::new(RefCell::new(vec![0; size])),
            writes: Rc::default(),
            failing: Rc::default(),
            written: Rc::default(),
            reads: Rc::default(),
        }
    }

    /// All of it.
    pub(crate) fn snapshot(&self) -> Vec<u8> {
        self.bytes.borrow().clone()
    }

    /// What the guest sees: all but the hidden region.
    pub(crate) fn visible(&self) -> Vec<u8> {
        let mut bytes = self.snapshot();
        bytes.truncate(usize::try_from(HIDDEN.0).expect("small"));
        bytes
    }

    /// Lets the write after the next `n` fail, once.
    pub(crate) fn fail_after(&self, n: u64) {
        self.failing.set(Some(self.writes.get() + n));
    }

    fn range(&self, at: Gpa, len: usize) -> Result<std::ops::Range<usize>, OutOfRange> {
        let error = OutOfRange { at, len };
        let start = usize::try_from(at.0).map_err(|_| error)?;
        let end = start.checked_add(len).ok_or(error)?;
        (end <= self.bytes.borrow().len())
            .then_some(start..end)
            .ok_or(error)
    }
}

impl PhysMemory for Memory {
    fn ranges(&self) -> Vec<(Gpa, u64)> {
        vec![(Gpa(0), HIDDEN.0)]
    }

    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
        count_work();
        let range = self.range(at, into.len())?;
        self.reads.set(self.reads.get() + into.len() as u64 / PAGE);
        into.copy_from_slice(&self.bytes.borrow()[range]);
        Ok(())
    }

    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
        count_work();
        let range = self.range(at, bytes.len())?;
        let this = self.writes.get();
        self.writes.set(this + 1);
        if self.failing.get() == Some(this) {
            self.failing.set(None);
            let len = bytes.len();
            return Err(OutOfRange { at, len });
        }
        if let Some(written) = self.written.borrow_mut().as_mut() {
            let last = at.0 + (bytes.len() as u64).saturating_sub(1);
            for page in (at.0 / PAGE..=last / PAGE).map(|page| Gpa(page * PAGE)) {
                if !written.contains(&page) {
                    written.push(page);
                }
            }
        }
        self.bytes.borrow_mut()[range].copy_from_slice(bytes);
        Ok(())
    }
}

/// Enters pages into the page tables at [`ROOT`].
pub(crate) struct Mapper<'a> {
    mem: &'a Memory,
    next: Gpa,
}

impl<'a> Mapper<'a> {
    pub(crate) fn new(mem: &'a Memory) -> Self {
        Self {
            mem,
            next: ROOT.wrapping_add(PAGE),
        }
    }

    /// Maps the page at `virt` to `phys`, for the kernel, read and execute only.
    pub(crate) fn map(&mut self, virt: Gva, phys: Gpa) {
        let tables = tables();
        for level in (2..=4).rev() {
            let (at, value) = tables.entry_at(self.mem, virt, level).expect("in memory");
            if value == 0 {
                self.set(at, self.next.0 | entry::WRITABLE);
                self.next = self.next.wrapping_add(PAGE);
            }
        }
        let (at, _) = tables.entry_at(self.mem, virt, 1).expect("in memory");
        self.set(at, phys.0);
    }

    fn set(&self, at: Gpa, value: u64) {
        let value = value | entry::PRESENT | entry::ACCESSED;
        self.mem.write(at, &value.to_le_bytes()).expect("in memory");
    }
}

/// The page tables of every synthetic guest.
pub(crate) fn tables() -> PageTables {
    PageTables {
        root: ROOT,
        levels: Levels::Four,
    }
}

/// What the guest does when it is next stopped, before the change is made.
type Meanwhile = Box<dyn FnOnce(&Guest)>;

/// A booted synthetic kernel.
pub(crate) struct Guest {
    pub(crate) image: Arc<KernelImage>,
    pub(crate) mem: Memory,
    stops: Cell<u64>,
    refuses: Cell<bool>,
    forgets: Cell<bool>,
    /// How often what detours recorded was asked for.
    pub(crate) collected: Cell<u32>,
    meanwhile: RefCell<Option<Meanwhile>>,
    standing: RefCell<Vec<Standing>>,
    table: RefCell<Arc<ProbeTable>>,
}

impl Guest {
    /// Boots the kernel in `elf`, whose text begins at `_stext` and takes up to 16 pages. A task
    /// runs: thread 77 of process 70, named `worker`.
    pub(crate) fn boot(elf: &[u8]) -> Self {
        Self::boot_with(elf, 4 * PAGE)
    }

    /// As [`Guest::boot`], with memory for [`whole_hidden`].
    pub(crate) fn boot_whole(elf: &[u8]) -> Self {
        let hidden = WHOLE_HIDDEN.0 - HIDDEN.0 + HiddenRegion::FULL_SIZE;
        Self::boot_with(elf, hidden)
    }

    fn boot_with(elf: &[u8], hidden: u64) -> Self {
        let image = Arc::new(KernelImage::parse(elf).expect("the fixture is a kernel"));
        let mem = Memory::new(hidden);
        let mut mapper = Mapper::new(&mem);
        let symbol = |name| image.symbols().address_of(name).expect("in the fixture");
        let (start, end) = (symbol("_stext"), symbol("_etext"));
        for n in 0..(end.0 - start.0).div_ceil(PAGE) {
            mapper.map(start.wrapping_add(n * PAGE), TEXT.wrapping_add(n * PAGE));
        }
        mapper.map(DATA_VIRT, DATA);
        mapper.map(IDT_VIRT, IDT);
        for n in 0..MODULE_PAGES {
            let frame = MODULE_FRAMES.wrapping_add(n * PAGE);
            mapper.map(MODULE_VIRT.wrapping_add(n * PAGE), frame);
        }
        let len = usize::try_from(end.0 - start.0).expect("small");
        mem.write(TEXT, image.bytes_at(start, len).expect("text"))
            .expect("in memory");
        let guest = Self {
            image,
            mem,
            stops: Cell::new(0),
            refuses: Cell::new(false),
            forgets: Cell::new(false),
            collected: Cell::new(0),
            meanwhile: RefCell::default(),
            standing: RefCell::default(),
            table: RefCell::default(),
        };
        guest.write_task();
        guest.write_idt();
        guest
    }

    /// Where the guest handles exception `vector`.
    pub(crate) fn handler(vector: u8) -> Gva {
        Gva(0xffff_ffff_8160_0000 + u64::from(vector) * 0x100)
    }

    fn write_idt(&self) {
        for vector in 0..=255_u8 {
            let [a, b, c, d, e, f, g, h] = Self::handler(vector).0.to_le_bytes();
            let gate = [a, b, 0x10, 0, 0, 0x8e, c, d, e, f, g, h, 0, 0, 0, 0];
            self.write(IDT_VIRT.wrapping_add(u64::from(vector) * 16), &gate);
        }
    }

    fn write_task(&self) {
        let Ok(layout) = self.image.task_layout() else {
            return;
        };
        let task = DATA_VIRT.wrapping_add(0x100);
        self.write(DATA_VIRT, &task.0.to_le_bytes());
        self.write(task.wrapping_add(layout.pid), &77_i32.to_le_bytes());
        self.write(task.wrapping_add(layout.tgid), &70_i32.to_le_bytes());
        self.write(task.wrapping_add(layout.comm), b"worker\0");
    }

    /// GS base while the task runs in the kernel.
    pub(crate) fn gs_base(&self) -> u64 {
        let offset = self.image.task_layout().map_or(0, |it| it.current_task);
        DATA_VIRT.0.wrapping_sub(offset)
    }

    /// How the engine sees the kernel.
    pub(crate) fn view(&self) -> KernelView {
        KernelView {
            tables: tables(),
            task: self.image.task_layout().map_err(|_| TaskUnknown::NoClues),
            cpu_number: self.image.cpu_number(),
            idt: IDT_VIRT,
        }
    }

    /// The `N` bytes at `at`.
    pub(crate) fn read<const N: usize>(&self, at: Gva) -> [u8; N] {
        let mut bytes = [0; N];
        tables().read(&self.mem, at, &mut bytes).expect("mapped");
        bytes
    }

    /// Writes as the guest would.
    pub(crate) fn write(&self, at: Gva, bytes: &[u8]) {
        tables().write(&self.mem, at, bytes).expect("mapped");
    }

    /// How often the virtual CPUs were stopped.
    pub(crate) fn stops(&self) -> u64 {
        self.stops.get()
    }

    /// Whether the virtual CPUs do not stop any more.
    pub(crate) fn refuse_stops(&self, refuses: bool) {
        self.refuses.set(refuses);
    }

    /// Whether nobody can tell any more what the guest writes.
    pub(crate) fn forget_writes(&self, forgets: bool) {
        self.forgets.set(forgets);
    }

    /// Has it seem that these pages were written since that was last asked.
    pub(crate) fn pretend_written(&self, pages: Vec<Gpa>) {
        if let Some(written) = self.mem.written.borrow_mut().as_mut() {
            *written = pages;
        }
    }

    /// Where the virtual CPUs stand when they are stopped from now on.
    pub(crate) fn stand(&self, standing: &[Standing]) {
        *self.standing.borrow_mut() = standing.to_vec();
    }

    /// Lets the guest do something just before it is stopped the next time.
    pub(crate) fn meanwhile(&self, act: impl FnOnce(&Self) + 'static) {
        *self.meanwhile.borrow_mut() = Some(Box::new(act));
    }

    /// The table the virtual CPUs have.
    pub(crate) fn table(&self) -> Arc<ProbeTable> {
        Arc::clone(&self.table.borrow())
    }
}

impl World for Guest {
    fn memory(&self) -> &dyn PhysMemory {
        &self.mem
    }

    fn stopped(&self, change: &mut Change<'_>) -> Result<Duration, StopError> {
        if self.refuses.get() {
            return Err(StopError::Unresponsive {
                vcpu: 1,
                waited: Duration::from_secs(10),
            });
        }
        self.stops.set(self.stops.get() + 1);
        if let Some(act) = self.meanwhile.take() {
            act(self);
        }
        let since = Instant::now();
        if let Some(table) = change(&self.mem, &self.standing.borrow()) {
            *self.table.borrow_mut() = table;
        }
        Ok(since.elapsed())
    }

    fn note_writes(&self, on: bool) -> bool {
        *self.mem.written.borrow_mut() = (on && !self.forgets.get()).then(Vec::new);
        !self.forgets.get()
    }

    fn written(&self) -> Option<Vec<Gpa>> {
        Some(std::mem::take(self.mem.written.borrow_mut().as_mut()?))
    }

    fn collect(&self) {
        self.collected.set(self.collected.get() + 1);
    }
}

/// A clock that goes on by 10 ns whenever it is read; the guest's is 1000 ahead.
#[derive(Debug, Default)]
pub(crate) struct Ticks(Cell<u64>);

impl Clock for Ticks {
    fn now(&self) -> Reading {
        self.0.set(self.0.get() + 10);
        Reading {
            host_ns: self.0.get(),
            guest_tsc: self.0.get() + 1000,
        }
    }

    fn since(&self, then: &Reading) -> u64 {
        self.now().host_ns - then.host_ns
    }
}

/// Registers of a hit: each one different, the stack at [`STACK`].
pub(crate) fn regs() -> Regs {
    Regs {
        rax: 1,
        rbx: 2,
        rcx: 3,
        rdx: 4,
        rsi: 5,
        rdi: 6,
        rsp: STACK.0,
        rbp: 7,
        r8: 8,
        r9: 9,
        r10: 10,
        r11: 11,
        r12: 12,
        r13: 13,
        r14: 14,
        r15: 15,
        rip: 0xdead,
        rflags: 0x246,
    }
}
