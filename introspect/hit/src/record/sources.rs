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

/// Maximum number of return probes that follow one call.
pub const NESTED_MAX: usize = 16;

/// All sources, and what is needed to read their records.
#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    /// Sources by their number in records.
    pub(super) by_number: FxHashMap<u32, Arc<RecordSource>>,
    by_probe: FxHashMap<ProbeId, Arc<RecordSource>>,
    /// The sources that follow calls.
    followed: Stubs,
    /// Unwinds copied stacks.
    pub(super) follower: Option<Arc<dyn Follower>>,
}

impl Map {
    /// Removes `source` from all maps except the map by probe.
    fn take_out(&mut self, source: &Arc<RecordSource>) {
        self.followed.remove(source);
        self.by_number.remove(&source.number());
    }

    /// Returns the real return address of `call`. If another function jumped to this one, and a return probe
    /// follows the other function's call, then `call` found the stub of that other call in place of its return
    /// address. The other call began before `call`. So if the stub's instance belongs to a call that began later or
    /// was timed by another clock, the real address is not known any more, and zero is returned.
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

/// The current sources. The control side changes them. A pass of the reader uses the sources that exist when the
/// pass begins.
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

    /// Returns the source of probe `id`.
    #[must_use]
    pub fn get(&self, id: ProbeId) -> Option<Arc<RecordSource>> {
        self.now().by_probe.get(&id).cloned()
    }

    /// Adds a source. It replaces another source of the same probe.
    pub fn add(&self, source: Arc<RecordSource>) {
        self.change(|map| {
            if let Some(before) = map.by_probe.insert(source.probe, Arc::clone(&source)) {
                map.take_out(&before);
            }
            map.followed.add(&source);
            map.by_number.insert(source.number(), source);
        });
    }

    /// Removes the source of probe `id`.
    pub fn remove(&self, id: ProbeId) -> Option<Arc<RecordSource>> {
        self.change(|map| {
            let source = map.by_probe.remove(&id)?;
            map.take_out(&source);
            Some(source)
        })
    }

    /// Sets the `follower` that unwinds copied stacks.
    pub fn follow_stacks(&self, follower: impl Follower + 'static) {
        self.change(|map| map.follower = Some(Arc::new(follower)));
    }

    /// Iterates over all current sources.
    pub fn iter(&self) -> impl Iterator<Item = Arc<RecordSource>> + use<> {
        let sources: Vec<_> = self.now().by_number.values().cloned().collect();
        sources.into_iter()
    }

    /// Returns whether a source has this number.
    #[must_use]
    pub fn has_number(&self, number: u32) -> bool {
        self.now().by_number.contains_key(&number)
    }
}
