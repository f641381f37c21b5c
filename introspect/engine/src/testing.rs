//! A guest for tests, without processors: memory with the text of a synthetic kernel mapped at its linked
//! address, and a [`World`] that counts its stops and fails on request.
//!
//! Invariant: physical memory is small at any link addresses (a few hundred KiB, or 16 MiB with detours), and only
//! the engine under test and the test itself write to it.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva, Regs};
use hvprobe_fixtures::{
    DATA, DATA_VIRT, HIDDEN, IDT, IDT_VIRT, MODULE_FRAMES, MODULE_PAGES, MODULE_VIRT, Mapper,
    Memory, PAGE, STACK, TEXT, tables,
};
use hvprobe_hit::region::KERNEL_WINDOW;
use hvprobe_hit::table::ProbeTable;
use hvprobe_hit::{Clock, KernelView, Reading};
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::task::TaskUnknown;

use crate::{HiddenRegion, Standing, StopError, WhileStopped, World};

/// Number of slots in a region of [`hidden`]'s size.
pub(crate) const SLOTS: usize = 128;

/// Returns the hidden region of most tests: its fixed pages and one page of slots.
pub(crate) fn hidden() -> HiddenRegion {
    HiddenRegion::new(HIDDEN, 4 * PAGE, KERNEL_WINDOW)
}

/// Physical address of the hidden region of full size in [`TestGuest::boot_whole`].
pub(crate) const WHOLE_HIDDEN: Gpa = Gpa(2 << 20);

/// Returns a hidden region with room for detours.
pub(crate) fn whole_hidden() -> HiddenRegion {
    HiddenRegion::new(WHOLE_HIDDEN, HiddenRegion::FULL_SIZE, KERNEL_WINDOW)
}

/// Action of the guest just before its next stop.
type Meanwhile = Box<dyn FnOnce(&TestGuest)>;

/// A booted synthetic kernel.
pub(crate) struct TestGuest {
    pub(crate) image: Arc<KernelImage>,
    pub(crate) mem: Memory,
    stops: Cell<u64>,
    refuses: Cell<bool>,
    forgets: Cell<bool>,
    /// Number of calls of [`World::collect`].
    pub(crate) collected: Cell<u32>,
    meanwhile: RefCell<Option<Meanwhile>>,
    standing: RefCell<Vec<Standing>>,
    table: RefCell<Arc<ProbeTable>>,
}

impl TestGuest {
    /// Boots the kernel in `elf`, whose text begins at `_stext` and takes up to 16 pages. A task
    /// runs: thread 77 of process 70, named `worker`.
    pub(crate) fn boot(elf: &[u8]) -> Self {
        Self::boot_with(elf, 4 * PAGE)
    }

    /// As [`TestGuest::boot`], with memory for [`whole_hidden`].
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

    /// Returns the address of the guest's handler for exception `vector`.
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

    /// Returns the GS base while the task runs in the kernel.
    pub(crate) fn gs_base(&self) -> u64 {
        let offset = self.image.task_layout().map_or(0, |it| it.current_task);
        DATA_VIRT.0.wrapping_sub(offset)
    }

    /// Returns the engine's view of the kernel.
    pub(crate) fn view(&self) -> KernelView {
        KernelView {
            tables: tables(),
            task: self.image.task_layout().map_err(|_| TaskUnknown::NoClues),
            cpu_number: self.image.cpu_number(),
            idt: IDT_VIRT,
        }
    }

    /// Reads `N` bytes at `at`.
    pub(crate) fn read<const N: usize>(&self, at: Gva) -> [u8; N] {
        let mut bytes = [0; N];
        tables().read(&self.mem, at, &mut bytes).expect("mapped");
        bytes
    }

    /// Writes as the guest would.
    pub(crate) fn write(&self, at: Gva, bytes: &[u8]) {
        tables().write(&self.mem, at, bytes).expect("mapped");
    }

    /// Returns how often the virtual CPUs were stopped.
    pub(crate) fn stops(&self) -> u64 {
        self.stops.get()
    }

    /// Sets whether the virtual CPUs refuse to stop.
    pub(crate) fn refuse_stops(&self, refuses: bool) {
        self.refuses.set(refuses);
    }

    /// Sets whether the log of guest writes is unavailable.
    pub(crate) fn forget_writes(&self, forgets: bool) {
        self.forgets.set(forgets);
    }

    /// Adds `pages` to the log of guest writes.
    pub(crate) fn pretend_written(&self, pages: Vec<Gpa>) {
        self.mem.pretend_written(pages);
    }

    /// Sets the states of the virtual CPUs for all later stops.
    pub(crate) fn stand(&self, standing: &[Standing]) {
        *self.standing.borrow_mut() = standing.to_vec();
    }

    /// Runs `act` just before the next stop.
    pub(crate) fn meanwhile(&self, act: impl FnOnce(&Self) + 'static) {
        *self.meanwhile.borrow_mut() = Some(Box::new(act));
    }

    /// Returns the table that the virtual CPUs use.
    pub(crate) fn table(&self) -> Arc<ProbeTable> {
        Arc::clone(&self.table.borrow())
    }
}

impl World for TestGuest {
    fn memory(&self) -> &dyn PhysMemory {
        &self.mem
    }

    fn stopped(&self, change: &mut WhileStopped<'_>) -> Result<Duration, StopError> {
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

    fn has_ended(&self) -> bool {
        false
    }

    fn note_writes(&self, on: bool) -> bool {
        if on && (self.forgets.get() || self.mem.notes_writes()) {
            return false;
        }
        self.mem.note_writes(on);
        true
    }

    fn written(&self) -> Option<Vec<Gpa>> {
        self.mem.take_written()
    }

    fn collect(&self) {
        self.collected.set(self.collected.get() + 1);
    }
}

/// A clock that advances by 10 ns with each reading. The guest's counter is 1000 ahead of it.
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

/// Returns registers for a hit. Each register has a different value; the stack pointer is [`STACK`].
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
