//! All sources of a machine's records.

use std::sync::{Arc, Mutex, PoisonError};

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{BY_HOST, Call};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_spec::ProbeId;
use rustc_hash::FxHashMap;

use super::source::RecordSource;
use super::stack::Follower;
use super::stubs::Stubs;
use crate::followed::Begun;
use crate::region::KERNEL_WINDOW;

/// How many return probes one call can be followed by.
pub const NESTED_MAX: usize = 16;

/// All sources, and what their records are read with.
#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    /// By the number that records have.
    pub(super) by_number: FxHashMap<u32, Arc<RecordSource>>,
    by_probe: FxHashMap<ProbeId, Arc<RecordSource>>,
    /// Those of them that follow calls.
    followed: Stubs,
    /// Of copied stacks.
    pub(super) follower: Option<Arc<dyn Follower>>,
}

impl Map {
    /// Forgets all but the probe of `source`.
    fn take_out(&mut self, source: &Arc<RecordSource>) {
        self.followed.remove(source);
        self.by_number.remove(&source.number());
    }

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
            let whose = self.followed.whose(begun.to);
            match whose.and_then(|(_, calls)| calls.begun(begun.to, mem)) {
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
        self.now().by_probe.get(&id).cloned()
    }

    /// Adds one, in the place of another of the same probe.
    pub fn add(&self, source: Arc<RecordSource>) {
        self.change(|map| {
            if let Some(before) = map.by_probe.insert(source.probe, Arc::clone(&source)) {
                map.take_out(&before);
            }
            map.followed.add(&source);
            map.by_number.insert(source.number(), source);
        });
    }

    /// Takes out that of probe `id`.
    pub fn remove(&self, id: ProbeId) -> Option<Arc<RecordSource>> {
        self.change(|map| {
            let source = map.by_probe.remove(&id)?;
            map.take_out(&source);
            Some(source)
        })
    }

    /// Has `follower` follow the stacks that were copied.
    pub fn follow_stacks(&self, follower: impl Follower + 'static) {
        self.change(|map| map.follower = Some(Arc::new(follower)));
    }

    /// All there are now.
    pub fn iter(&self) -> impl Iterator<Item = Arc<RecordSource>> + use<> {
        let sources: Vec<_> = self.now().by_number.values().cloned().collect();
        sources.into_iter()
    }

    /// Whether records with this number are one's.
    #[must_use]
    pub fn has_number(&self, number: u32) -> bool {
        self.now().by_number.contains_key(&number)
    }
}
