//! Memory for a test's code and data.
//!
//! ```text
//!   +0        code that enters and leaves
//!   +0x1000   the function
//!   +0x3000   code that loads
//!   +0x4000   free for detours, at the distances that shaping requires
//!   +0x400000 words: counters, free lists, states
//!   +0x410000 per-CPU data, the current task
//!   +0x420000 operands of instructions
//!   +0x430000 stack
//!   +0x440000 pages to read, some of which may be made inaccessible
//!   +0x500000 instances
//!   +0xa00000 ring
//! ```

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{CELL, MAX_RECORD_CELLS, Ring, StackFields, TaskFields};

/// Size of an arena, and the distance between arenas.
const SIZE: u64 = 16 << 20;
/// Address of the first arena.
const FIRST: u64 = 0x1000_0000;
/// Maximum number of arenas that a process makes, so that all of them end below 2 GiB.
const MOST: u64 = 96;

/// Offset of the function. The other areas of the module's diagram follow.
const FUNCTION: u64 = 0x1000;
const LOADS: u64 = 0x3000;
const DETOURS: Range<u64> = 0x4000..0x40_0000;
const WORDS: u64 = 0x40_0000;
const PER_CPU: u64 = 0x41_0000;
const TASK: u64 = 0x41_1000;
const DATA: Range<u64> = 0x42_0000..0x42_1000;
const STACK: Range<u64> = 0x43_0000..0x43_8000;
const PAGES: Range<u64> = 0x44_0000..0x48_0000;
const INSTANCES: u64 = 0x50_0000;
const HEAD: u64 = 0xa0_0000;
const LIMIT: u64 = 0xa0_0040;
const BELL: u64 = 0xa0_0048;
const CELLS: u64 = 0xa0_1000;
/// Maximum number of cells of a ring.
const CELLS_MAX: u32 = 1 << 16;

/// Displacements relative to GS, and offsets in the task.
const GS_CPU: u32 = 0x10;
const GS_CURRENT: u32 = 0x20;
const TASK_STACK: u16 = 0x20;
const PID: u16 = 0x98;
const TGID: u16 = 0x9c;
const COMM: u16 = 0x120;
const DISABLED: u16 = 0x1f8;

/// Size of a task's stack (`THREAD_SIZE`).
const THREAD_SIZE: u64 = 16 << 10;

/// Number of the CPU on which all threads appear to run.
pub const CPU: u32 = 0x1234;
/// Name of the current task.
pub const COMM_TEXT: &[u8; 16] = b"kworker/0:1\0abcd";
/// PID and TGID of the current task.
pub const PID_AND_TGID: (u32, u32) = (4711, 4700);

/// Memory below 2 GiB that can be read, written and executed.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
}

// SAFETY: the memory belongs to the arena until it is dropped, and is accessed through atomics only; the caller
// of generated code is responsible for what that code does there.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps a new arena that contains only a task, and per-CPU data: the number of the CPU and the pointer to the
    /// task.
    ///
    /// # Errors
    /// When no more addresses for arenas are free, or the memory cannot be mapped.
    pub fn new() -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            if number >= MOST {
                return Err(io::ErrorKind::AddrNotAvailable.into());
            }
            match Self::at(FIRST + number * SIZE) {
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
                other => return other,
            }
        }
    }

    fn at(address: u64) -> io::Result<Self> {
        let wanted = usize::try_from(address).map_err(io::Error::other)?;
        let size = usize::try_from(SIZE).map_err(io::Error::other)?;
        // SAFETY: a new mapping that replaces none.
        let base = unsafe {
            libc::mmap(
                std::ptr::with_exposed_provenance_mut(wanted),
                size,
                libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
                libc::MAP_PRIVATE
                    | libc::MAP_ANONYMOUS
                    | libc::MAP_NORESERVE
                    | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let arena = Self { base };
        let gs = arena.gs();
        let task = arena.gva(TASK);
        arena.write(gs.wrapping_add(u64::from(GS_CPU)), &CPU.to_le_bytes());
        arena.write(
            gs.wrapping_add(u64::from(GS_CURRENT)),
            &task.0.to_le_bytes(),
        );
        let (pid, tgid) = PID_AND_TGID;
        arena.write(task.wrapping_add(u64::from(PID)), &pid.to_le_bytes());
        arena.write(task.wrapping_add(u64::from(TGID)), &tgid.to_le_bytes());
        arena.write(task.wrapping_add(u64::from(COMM)), COMM_TEXT);
        Ok(arena)
    }

    fn gva(&self, offset: u64) -> Gva {
        Gva(self.base.addr().get() as u64 + offset)
    }

    fn range(&self, offsets: Range<u64>) -> Range<Gva> {
        self.gva(offsets.start)..self.gva(offsets.end)
    }

    /// Address for the bench's code.
    #[must_use]
    pub fn entry(&self) -> Gva {
        self.gva(0)
    }

    /// Address for the function to probe.
    #[must_use]
    pub fn function(&self) -> Gva {
        self.gva(FUNCTION)
    }

    /// Address for code that loads from memory and recovers from a fault.
    #[must_use]
    pub fn loads(&self) -> Gva {
        self.gva(LOADS)
    }

    /// Addresses for detours.
    #[must_use]
    pub fn detours(&self) -> Range<Gva> {
        self.range(DETOURS)
    }

    /// Address of word `index`; each of these words has a cache line of its own.
    #[must_use]
    pub fn counter(&self, index: u64) -> Gva {
        self.gva(WORDS + index * 64)
    }

    /// Base of GS.
    #[must_use]
    pub fn gs(&self) -> Gva {
        self.gva(PER_CPU)
    }

    /// Address of the current task.
    #[must_use]
    pub fn current(&self) -> Gva {
        self.gva(TASK)
    }

    /// Fields by which code finds the current task.
    #[must_use]
    pub fn task(&self) -> TaskFields {
        TaskFields {
            current: GS_CURRENT,
            pid: i32::from(PID),
            tgid: i32::from(TGID),
            comm: i32::from(COMM),
        }
    }

    /// Fields by which code finds the stack of the current task.
    #[must_use]
    pub fn stack_fields(&self) -> StackFields {
        StackFields {
            current: GS_CURRENT,
            stack: i32::from(TASK_STACK),
        }
    }

    /// Makes the current task's stack end at `end`.
    pub fn set_stack_end(&self, end: Gva) {
        let at = self.current().wrapping_add(u64::from(TASK_STACK));
        let start = end.0.wrapping_sub(THREAD_SIZE);
        self.write(at, &start.to_le_bytes());
    }

    /// Offset of `pagefault_disabled` in the task. The four bytes after it are unused.
    #[must_use]
    pub fn disabled(&self) -> i32 {
        i32::from(DISABLED)
    }

    /// Displacement of the CPU's number relative to GS.
    #[must_use]
    pub fn cpu(&self) -> u32 {
        GS_CPU
    }

    /// Page for operands of instructions.
    #[must_use]
    pub fn data(&self) -> Range<Gva> {
        self.range(DATA)
    }

    /// Memory for a stack.
    #[must_use]
    pub fn stack(&self) -> Range<Gva> {
        self.range(STACK)
    }

    /// Pages to read.
    #[must_use]
    pub fn pages(&self) -> Range<Gva> {
        self.range(PAGES)
    }

    /// Makes the page at `at`, one of [`Self::pages`], inaccessible for good.
    ///
    /// # Errors
    /// When the system call fails.
    pub fn take_away(&self, at: Gva) -> io::Result<()> {
        const PAGE: usize = 4096;
        assert!(self.pages().contains(&at), "{at}");
        let offset = self.offset(at, PAGE);
        // SAFETY: in the mapping. Accesses to the page fault from here on, as if it were not present.
        let page = unsafe { self.base.add(offset) };
        // SAFETY: as above.
        match unsafe { libc::mprotect(page.as_ptr().cast(), PAGE, libc::PROT_NONE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Address for instances.
    #[must_use]
    pub fn instances(&self) -> Gva {
        self.gva(INSTANCES)
    }

    /// Returns a ring of `capacity` cells whose doorbell rings when `watermark` of them are in use.
    #[must_use]
    pub fn ring(&self, capacity: u32, watermark: u32, doorbell_port: u8) -> Ring {
        assert!(capacity <= CELLS_MAX, "{capacity}");
        assert!(CELLS + (u64::from(CELLS_MAX) + u64::from(MAX_RECORD_CELLS)) * CELL as u64 <= SIZE);
        let ring = Ring {
            head: self.gva(HEAD),
            limit: self.gva(LIMIT),
            bell: self.gva(BELL),
            cells: self.gva(CELLS),
            capacity,
            watermark,
            doorbell_port,
        };
        // The contents that an earlier ring left here count as read.
        self.publish_tail(&ring, self.word(ring.head).load(Ordering::SeqCst));
        ring
    }

    /// Publishes to the writers of `ring` that it was read up to `tail`.
    pub fn publish_tail(&self, ring: &Ring, tail: u64) {
        let [limit, bell] = [ring.capacity, ring.watermark].map(|cells| tail + u64::from(cells));
        self.word(ring.limit).store(limit, Ordering::Release);
        self.word(ring.bell).store(bell, Ordering::Release);
    }

    /// Returns the tail that was published last.
    #[must_use]
    pub fn tail(&self, ring: &Ring) -> u64 {
        self.word(ring.limit).load(Ordering::SeqCst) - u64::from(ring.capacity)
    }

    fn offset(&self, at: Gva, len: usize) -> usize {
        let offset = at
            .offset_from(self.gva(0))
            .expect("an address in the arena");
        let end = offset.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= SIZE), "{at} is in the arena");
        usize::try_from(offset).expect("less than the arena's size")
    }

    /// Returns the word at `at`.
    #[must_use]
    pub fn word(&self, at: Gva) -> &AtomicU64 {
        let offset = self.offset(at, 8);
        assert!(at.0.is_multiple_of(8), "{at} is aligned");
        // SAFETY: in the mapping, aligned, and alive as long as `self`.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    fn bytes(&self, at: Gva, len: usize) -> &[AtomicU8] {
        let offset = self.offset(at, len);
        // SAFETY: in the mapping, alive as long as `self`; an `AtomicU8` is a byte.
        unsafe { std::slice::from_raw_parts(self.base.add(offset).as_ptr().cast(), len) }
    }

    /// Copies `bytes` to `at`.
    pub fn write(&self, at: Gva, bytes: &[u8]) {
        for (to, from) in self.bytes(at, bytes.len()).iter().zip(bytes) {
            to.store(*from, Ordering::Relaxed);
        }
    }

    /// Returns the `len` bytes at `at`.
    #[must_use]
    pub fn read(&self, at: Gva, len: usize) -> Vec<u8> {
        let bytes = self.bytes(at, len).iter();
        bytes.map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    /// Returns a pointer for calling the code at `at`.
    #[must_use]
    pub fn code(&self, at: Gva) -> *const () {
        let offset = self.offset(at, 1);
        // SAFETY: in the mapping.
        unsafe { self.base.add(offset) }
            .as_ptr()
            .cast_const()
            .cast()
    }

    /// Points the GS base of the calling thread to this arena's per-CPU data. The thread must not use GS otherwise.
    pub fn enter(&self) {
        const ARCH_SET_GS: libc::c_int = 0x1001;
        // SAFETY: nothing in this process refers to memory through GS but generated code.
        let result = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, self.gs().0) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let size = usize::try_from(SIZE).unwrap_or(0);
        // SAFETY: the mapping that `at` made; borrows of it have ended. If the call fails, the memory stays mapped.
        unsafe { libc::munmap(self.base.as_ptr().cast(), size) };
    }
}
