//! Streams of events without a machine.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_hit::event::Sink;
use hvprobe_machine::Listen as _;

use super::broadcast::Broadcast;

/// Streams of events without a machine, by name.
#[derive(Debug, Default)]
pub(crate) struct Published(BTreeMap<Arc<str>, Broadcast>);

impl Published {
    /// Adds a stream that `broadcast` sends to clients, and replaces an existing one of that name. Returns the
    /// sink for its events.
    pub(crate) fn add(&mut self, name: &str, broadcast: Broadcast) -> Sink {
        let mut listener = broadcast.listener();
        self.0.insert(name.into(), broadcast);
        Box::new(move |events, dropped| {
            listener.hear(events, dropped);
        })
    }

    /// Returns the stream called `name`, with its name.
    pub(crate) fn get(&self, name: &str) -> Option<(&Arc<str>, &Broadcast)> {
        self.0.get_key_value(name)
    }
}
