//! Lookup of stubs, among all return probes that follow calls without exits.
//!
//! Invariant: the sources are sorted by the addresses of their stubs, and no two sources share a stub. So a stub is
//! found by binary search.

use std::sync::Arc;

use hvprobe_arch::Gva;

use super::source::RecordSource;
use crate::followed::Followed;

/// The return probes that follow calls without exits.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stubs(Vec<Arc<RecordSource>>);

impl Stubs {
    /// Collects the sources among `sources` that follow calls.
    pub(crate) fn of(sources: impl IntoIterator<Item = Arc<RecordSource>>) -> Self {
        let follows = |source: &Arc<RecordSource>| source.followed().is_some();
        let mut sources: Vec<_> = sources.into_iter().filter(follows).collect();
        sources.sort_unstable_by_key(|source| first(source));
        Self(sources)
    }

    /// Adds `source` if it follows calls.
    pub(crate) fn add(&mut self, source: &Arc<RecordSource>) {
        if source.followed().is_some() {
            let at = self.0.partition_point(|other| first(other) < first(source));
            self.0.insert(at, Arc::clone(source));
        }
    }

    /// Removes `source`.
    pub(crate) fn remove(&mut self, source: &Arc<RecordSource>) {
        self.0.retain(|other| !Arc::ptr_eq(other, source));
    }

    /// Iterates over all sources that follow calls.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &RecordSource> {
        self.0.iter().map(Arc::as_ref)
    }

    /// Returns the source whose stub is at `at`, and its calls.
    pub(crate) fn whose(&self, at: Gva) -> Option<(&RecordSource, &Followed)> {
        let behind = self.0.partition_point(|source| first(source) <= at);
        let source = self.0.get(behind.checked_sub(1)?)?;
        let calls = source.followed().filter(|calls| calls.has_stub(at))?;
        Some((source, calls))
    }
}

/// Returns the address of the first stub of `source`.
fn first(source: &RecordSource) -> Gva {
    source.followed().map_or(Gva(0), |calls| calls.stubs)
}
