//! Scans the guest's memory, while the guest runs, for addresses from which a task may reach given code.
//!
//! Return addresses, and the saved registers of interrupted code, are on stacks at multiples of 8 (SDM vol. 3,
//! 6.14.2). So a task can go to an address only if it is in an aligned word or in a register of a virtual CPU.
//!
//! ```text
//!   guest runs:     log the pages it writes ─► scan all pages ─► scan those written meanwhile ─► …
//!   guest stopped:  scan the pages written since, at most STOPPED_MAX; scan the registers
//! ```
//! Invariants: an address counts if it was seen at any time during a look, so no address that exists at the end of
//! the look is missed. A look that would stop the guest too long, or for which guest writes cannot be logged, has
//! no result, and the caller assumes the worst.
//!
//! Writes of the host are not logged. The host writes addresses of code of ours only for probes that exist,
//! into frames and into instances; instances are read while the guest is stopped.

use std::collections::BTreeSet;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_hit::region::KERNEL_WINDOW;

use crate::world::{Standing, World};

const PAGE: usize = 4096;
/// Maximum size of the guest memory to scan for one change, in bytes. The scan takes about a second. Memory that
/// the guest has never touched does not count.
pub(crate) const AT_ONCE_MAX: u64 = 4 << 30;
/// As [`AT_ONCE_MAX`], for a change that a virtual CPU waits for.
pub(crate) const AT_HOOK_MAX: u64 = 256 << 20;
/// As [`AT_ONCE_MAX`], for a look that nothing waits for.
pub(crate) const EVER_MAX: u64 = 64 << 30;
/// Factor by which the guest's memory may exceed the maximum. The memory that the guest has touched must not exceed
/// it.
const SPARSE: u64 = 16;
/// Maximum number of pages to scan while the guest is stopped: 32 MiB, some 10 ms. In an emulated machine,
/// where the scan is slower, it still takes less than the 200 ms that a stop may take.
pub(crate) const STOPPED_MAX: usize = 8192;
/// If at most this number of pages was written during a scan, the guest is stopped without another scan.
const FEW: usize = STOPPED_MAX / 4;
/// Number of bytes to scan between two checks whether the guest has ended: some 10 ms.
const PIECE: u64 = 32 << 20;
/// Maximum number of scans that cover only the pages written meanwhile, before the guest is stopped.
const ROUNDS: usize = 6;

/// Size of the window for code of ours, in bytes.
const WINDOW: u64 = KERNEL_WINDOW.end.0 - KERNEL_WINDOW.start.0;

/// The addresses in the window that were seen: one bit each, so the size does not depend on the guest's data.
#[derive(Debug)]
struct Marks(Vec<u64>);

impl Marks {
    fn new() -> Self {
        Self(vec![0; usize::try_from(WINDOW / 64).unwrap_or(0)])
    }

    /// Marks the address `offset` bytes into the window.
    fn set(&mut self, offset: u64) {
        let word = usize::try_from(offset / 64).unwrap_or(usize::MAX);
        if let Some(word) = self.0.get_mut(word) {
            *word |= 1 << (offset % 64);
        }
    }

    fn any(&self, start: Gva, len: u64) -> bool {
        let first = start.0.wrapping_sub(KERNEL_WINDOW.start.0);
        (0..len).any(|n| {
            let offset = first.wrapping_add(n);
            let word = usize::try_from(offset / 64).unwrap_or(usize::MAX);
            let word = self.0.get(word);
            word.is_some_and(|word| word >> (offset % 64) & 1 != 0)
        })
    }
}

/// The addresses that a look has seen.
#[derive(Debug)]
pub(crate) struct Seen {
    ours: Marks,
    /// Addresses outside the window to look for. All are in the `len` bytes at `low`.
    points: BTreeSet<Gva>,
    low: u64,
    len: u64,
    found: BTreeSet<Gva>,
}

impl Seen {
    fn new(points: BTreeSet<Gva>) -> Self {
        let low = points.first().map_or(0, |at| at.0);
        let len = points.last().map_or(0, |at| at.0 - low + 1);
        Self {
            ours: Marks::new(),
            points,
            low,
            len,
            found: BTreeSet::new(),
        }
    }

    fn is_of_interest(&self, word: u64) -> bool {
        word.wrapping_sub(KERNEL_WINDOW.start.0) < WINDOW || word.wrapping_sub(self.low) < self.len
    }

    fn note(&mut self, word: u64) {
        let offset = word.wrapping_sub(KERNEL_WINDOW.start.0);
        if offset < WINDOW {
            self.ours.set(offset);
        } else if self.points.contains(&Gva(word)) {
            self.found.insert(Gva(word));
        }
    }

    /// Scans a page. Returns `None` if it cannot be read.
    fn page(&mut self, mem: &dyn PhysMemory, at: Gpa) -> Option<()> {
        let mut page = [0; PAGE];
        mem.read(at, &mut page).ok()?;
        let (words, _) = page.as_chunks();
        // Hardly any page holds such an address, so a first loop, without branches, only checks whether this page
        // does.
        let any = |any, word: &[u8; 8]| any | self.is_of_interest(u64::from_le_bytes(*word));
        if words.iter().fold(false, any) {
            for word in words {
                self.note(u64::from_le_bytes(*word));
            }
        }
        Some(())
    }

    fn pages(&mut self, mem: &dyn PhysMemory, pages: &[Gpa]) -> Option<()> {
        pages.iter().try_for_each(|at| self.page(mem, *at))
    }

    /// Returns whether a task may resume at `point`; true for a point that was not looked for.
    pub(crate) fn point(&self, point: Gva) -> bool {
        !self.points.contains(&point) || self.found.contains(&point)
    }

    /// Returns whether a task may resume in the `len` bytes of our code at `start`.
    pub(crate) fn code(&self, start: Gva, len: u64) -> bool {
        self.ours.any(start, len)
    }
}

/// A look in progress. While it exists, the guest's writes are logged, and there is no other look.
pub(crate) struct Look<'w> {
    world: &'w dyn World,
    seen: Seen,
}

impl<'w> Look<'w> {
    /// Scans the running guest's memory for `points` and for all addresses of our code. Returns `None` if there are
    /// more than `most` bytes to scan, or if the scan is not possible.
    pub(crate) fn begin(points: BTreeSet<Gva>, most: u64, world: &'w dyn World) -> Option<Self> {
        let mem = world.memory();
        let size = |ranges: Vec<(Gpa, u64)>| ranges.iter().map(|(_, len)| len).sum::<u64>();
        let all = size(mem.ranges());
        // Checked before logging begins, because logging slows the guest down.
        let is_too_much = || all > most && (all / SPARSE > most || size(mem.touched()) > most);
        if all == 0 || is_too_much() || !world.note_writes(true) {
            return None;
        }
        let mut look = Self {
            world,
            seen: Seen::new(points),
        };
        // Memory that is touched from here on is logged.
        let ranges = mem.touched();
        if ranges.iter().map(|(_, len)| len).sum::<u64>() > most {
            return None;
        }
        for (start, len) in ranges {
            for offset in (0..len).step_by(PAGE) {
                if offset.is_multiple_of(PIECE) && world.has_ended() {
                    return None;
                }
                look.seen.page(mem, start.wrapping_add(offset))?;
            }
        }
        for _ in 0..ROUNDS {
            if world.has_ended() {
                return None;
            }
            let written = world.written()?;
            look.seen.pages(mem, &written)?;
            if written.len() <= FEW {
                break;
            }
        }
        Some(look)
    }

    /// Ends the look while the virtual CPUs are stopped. Returns `None` if it has no result.
    pub(crate) fn end(&mut self, standing: &[Standing]) -> Option<&Seen> {
        let written = self.world.written()?;
        if written.len() > STOPPED_MAX {
            return None;
        }
        self.seen.pages(self.world.memory(), &written)?;
        for address in standing.iter().flat_map(Standing::addresses) {
            self.seen.note(address.0);
        }
        Some(&self.seen)
    }
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        self.world.note_writes(false);
    }
}

/// The stopped guest, during a change.
#[derive(Clone, Copy)]
pub(crate) struct Still<'a> {
    /// State of each virtual CPU.
    pub(crate) standing: &'a [Standing],
    /// Result of the look; `None` if there was no look or it had no result.
    pub(crate) seen: Option<&'a Seen>,
}

/// Returns whether the guest has little enough memory to scan.
pub(crate) fn is_feasible(mem: &dyn PhysMemory) -> bool {
    let ranges = mem.ranges();
    !ranges.is_empty() && ranges.iter().map(|(_, len)| len).sum::<u64>() <= EVER_MAX
}
