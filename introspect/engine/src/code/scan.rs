//! Looking through the guest's memory for who may come to some code, while the guest runs.
//!
//! Return addresses, and the registers of what was interrupted, lie on stacks at multiples of 8 (SDM
//! vol. 3, 6.14.2), so an address that no aligned word and no register of a virtual CPU holds is one
//! that nobody is going to.
//!
//! ```text
//!   guest runs:    note which pages are written ─► all pages ─► those written meanwhile ─► …
//!   guest stands:  those written since, at most STOPPED_MAX; registers
//! ```
//! Invariants: what was seen at any time of the look counts, so nothing is missed that was there at
//! its end; a look that would take the stopped guest too long, or for which its writes cannot be
//! noted, tells nothing, and whoever asked assumes the worst.
//!
//! Writes of the host are not noted. It writes addresses of code of ours only for probes that are
//! there, into frames and into instances; instances are read when the guest stands still.

use std::collections::BTreeSet;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_hit::region::KERNEL_WINDOW;

use crate::world::{Standing, World};

const PAGE: usize = 4096;
/// The most of the guest's memory, in bytes, that is looked through for one change: a second or so. What the guest has
/// never touched does not count.
pub(crate) const AT_ONCE_MAX: u64 = 4 << 30;
/// The same for a change that a virtual CPU waits for.
pub(crate) const AT_HOOK_MAX: u64 = 256 << 20;
/// The same for what nobody waits for.
pub(crate) const EVER_MAX: u64 = 64 << 30;
/// In how many times as much memory it is looked for what was touched.
const SPARSE: u64 = 16;
/// The most pages that are looked through while the guest stands still: 32 MiB, some 10 ms, and in an
/// emulated machine, where that is slower, within the 200 ms that a stop may take.
pub(crate) const STOPPED_MAX: usize = 8192;
/// With no more pages than this written meanwhile, the guest is stopped.
const FEW: usize = STOPPED_MAX / 4;
/// After how many bytes it is looked whether there is a guest any more: some 10 ms.
const PIECE: u64 = 32 << 20;
/// How often what was written meanwhile is looked at before that.
const ROUNDS: usize = 6;

/// Where code of ours can be.
const WINDOW: u64 = KERNEL_WINDOW.end.0 - KERNEL_WINDOW.start.0;

/// Which addresses of the window were seen: a bit each, whatever the guest fills its memory with.
#[derive(Debug)]
struct Marks(Vec<u64>);

impl Marks {
    fn new() -> Self {
        Self(vec![0; usize::try_from(WINDOW / 64).unwrap_or(0)])
    }

    /// Marks what is `offset` bytes into the window.
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

/// What a look has seen.
#[derive(Debug)]
pub(crate) struct Seen {
    ours: Marks,
    /// Addresses elsewhere that are looked for, and where they lie.
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

    /// `None` when the page cannot be read.
    fn page(&mut self, mem: &dyn PhysMemory, at: Gpa) -> Option<()> {
        let mut page = [0; PAGE];
        mem.read(at, &mut page).ok()?;
        let (words, _) = page.as_chunks();
        // Nearly all pages hold none: a loop without branches.
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

    /// Whether somebody may go on at `point`: what was not looked for may be.
    pub(crate) fn point(&self, point: Gva) -> bool {
        !self.points.contains(&point) || self.found.contains(&point)
    }

    /// Whether somebody may go on in `len` bytes of our code from `start`.
    pub(crate) fn code(&self, start: Gva, len: u64) -> bool {
        self.ours.any(start, len)
    }
}

/// A look that has begun. While there is one, the guest's writes are noted, and there is no other.
pub(crate) struct Look<'w> {
    world: &'w dyn World,
    seen: Seen,
}

impl<'w> Look<'w> {
    /// Looks, while the guest runs, for `points` and for all addresses of our code, in at most `most`
    /// bytes. `None` if that is not possible.
    pub(crate) fn begin(points: BTreeSet<Gva>, most: u64, world: &'w dyn World) -> Option<Self> {
        let mem = world.memory();
        let size = |ranges: Vec<(Gpa, u64)>| ranges.iter().map(|(_, len)| len).sum::<u64>();
        let all = size(mem.ranges());
        // Noting what is written is not for nothing: it costs the guest something.
        let is_too_much = || all > most && (all / SPARSE > most || size(mem.touched()) > most);
        if all == 0 || is_too_much() || !world.note_writes(true) {
            return None;
        }
        let mut look = Self {
            world,
            seen: Seen::new(points),
        };
        // What is touched from here on is noted.
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

    /// The end of the look, while the virtual CPUs stand still. `None` if it tells nothing.
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

/// Where the guest stands, for a change.
#[derive(Clone, Copy)]
pub(crate) struct Still<'a> {
    /// Each virtual CPU.
    pub(crate) standing: &'a [Standing],
    /// What a look has seen; `None` if there was none, or it told nothing.
    pub(crate) seen: Option<&'a Seen>,
}

/// Whether so much memory can be looked through.
pub(crate) fn is_feasible(mem: &dyn PhysMemory) -> bool {
    let ranges = mem.ranges();
    !ranges.is_empty() && ranges.iter().map(|(_, len)| len).sum::<u64>() <= EVER_MAX
}
