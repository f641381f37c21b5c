//! All sources of a machine's records.

use std::sync::{Arc, Mutex, PoisonError};

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{BY_HOST, Call};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_spec::ProbeId;
use rustc_hash::FxHashMap;

use super::source::RecordSource;
use super::stack::Follower;
use crate::followed::Begun;
use crate::region::KERNEL_WINDOW;

/// How many return probes one call can be followed by.
pub const NESTED_MAX: usize = 16;

/// All sources, and what their records are read with.
#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    /// By the number that records have.
    pub(super) by_id: FxHashMap<u32, Arc<RecordSource>>,
    /// Of copied stacks.
    pub(super) follower: Option<Arc<dyn Follower>>,
}

impl Map {
    /// Where the function of this call really returns to: it may have been jumped to by another that a return probe
    /// follows, whose stub it found on its stack. That one's call began before this one, so if its instance is one's
    /// that began later, nobody can tell any more, and it is zero.
    pub(super) fn return_address(&self, call: &Call, mem: &dyn PhysMemory) -> Gva {
        let mut begun = Begun {
            to: call.return_address,
            tsc: call.tsc,
            by_host: call.cpu == Some(BY_HOST),
        };
        for _ in 0..NESTED_MAX {
            if !KERNEL_WINDOW.contains(begun.to) {
                break;
            }
            let mut followed = self.by_id.values().filter_map(|source| source.followed());
            let before = followed.find_map(|calls| calls.begun(begun.to, mem));
            match before {
                Some(before) if before.by_host == begun.by_host && before.tsc <= begun.tsc => {
                    begun = before;
                }
                Some(_) | None => return Gva(0),
            }
        }
        begun.to
    }
}

/// The sources that there are now. The control side changes them, the reader takes what there is.
#[derive(Clone, Debug, Default)]
pub struct RecordSources(Arc<Mutex<Arc<Map>>>);

impl RecordSources {
    pub(super) fn now(&self) -> Arc<Map> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Map) -> T) -> T {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut map))
    }

    /// That of probe `id`.
    #[must_use]
    pub fn get(&self, id: ProbeId) -> Option<Arc<RecordSource>> {
        self.now().by_id.get(&id.0).cloned()
    }

    /// Adds one, in the place of another of the same probe.
    pub fn add(&self, source: Arc<RecordSource>) {
        self.change(|map| map.by_id.insert(source.probe.0, source));
    }

    /// Takes out that of probe `id`.
    pub fn remove(&self, id: ProbeId) -> Option<Arc<RecordSource>> {
        self.change(|map| map.by_id.remove(&id.0))
    }

    /// Has `follower` follow the stacks that were copied.
    pub fn follow_stacks(&self, follower: impl Follower + 'static) {
        self.change(|map| map.follower = Some(Arc::new(follower)));
    }

    /// All there are now.
    pub fn iter(&self) -> impl Iterator<Item = Arc<RecordSource>> + use<> {
        let sources: Vec<_> = self.now().by_id.values().cloned().collect();
        sources.into_iter()
    }
}
