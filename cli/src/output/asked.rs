//! What probes were asked to do, as the options that ask for it.

use hvprobe_proto::v1;
use hvprobe_server::wire;
use hvprobe_spec::language::text;

/// What a newer server says and we do not know.
const UNKNOWN: &str = "?";

/// What happens at a hit: `capture=+16(%di):32`, `post`.
pub(crate) fn actions(asked: Option<&v1::Actions>) -> Vec<String> {
    let Some(asked) = asked else {
        return Vec::new();
    };
    let read = wire::actions::actions(asked.clone());
    read.map_or_else(
        |_| vec![UNKNOWN.to_owned()],
        |actions| text::actions(&actions),
    )
}

/// What hits may take: `max-rate=100/s`, `throttle=sample`.
pub(crate) fn budget(asked: Option<&v1::Budget>) -> Vec<String> {
    let Some(asked) = asked else {
        return Vec::new();
    };
    let read = wire::budget::budget(*asked);
    read.map_or_else(|_| vec![UNKNOWN.to_owned()], |budget| text::budget(&budget))
}

/// What an item reads: `+16(%di)`, `$stack3`.
pub(crate) fn item_name(asked: &v1::Item) -> String {
    let read = wire::actions::item(asked.clone());
    read.map_or_else(|_| UNKNOWN.to_owned(), |item| text::item_name(&item))
}
