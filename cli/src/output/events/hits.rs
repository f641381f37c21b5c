//! Which events are hits.

use hvprobe_proto::v1::{self, EventKind};

/// Returns whether `event` is a hit or a return, rather than an event after a hit. A hit may have several events.
pub(crate) fn is_hit(event: &v1::Event) -> bool {
    match event.kind() {
        EventKind::Unspecified | EventKind::Hit | EventKind::Return => true,
        EventKind::Post | EventKind::Fault => false,
    }
}
