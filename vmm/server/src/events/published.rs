//! Events that come from no machine.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_hit::event::Sink;
use hvprobe_machine::Listen as _;

use super::broadcast::Broadcast;

/// Streams of events that no machine stands behind, by name.
#[derive(Debug, Default)]
pub(crate) struct Published(BTreeMap<Arc<str>, Broadcast>);

impl Published {
    /// A new one, which goes to its clients by `broadcast`, and takes the place of an old one of that name.
    pub(crate) fn add(&mut self, name: &str, broadcast: Broadcast) -> Sink {
        let mut listener = broadcast.listener();
        self.0.insert(name.into(), broadcast);
        Box::new(move |events, dropped| {
            listener.hear(events, dropped);
        })
    }

    /// The stream called `name`, and the name.
    pub(crate) fn get(&self, name: &str) -> Option<(&Arc<str>, &Broadcast)> {
        self.0.get_key_value(name)
    }
}
