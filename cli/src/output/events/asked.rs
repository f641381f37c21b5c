//! Actions and budgets of probes, written as the options that request them.

use hvprobe_proto::v1;
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::language::text;
use hvprobe_spec::{Actions, Budget};

use super::valued;

/// Text for a value from a newer server that this client does not know.
pub(super) const UNKNOWN: &str = "?";

/// Returns the actions at a hit of `probe`, without the captures for its arguments.
pub(crate) fn of(probe: &v1::Probe) -> Vec<String> {
    let Some(mut asked) = probe.actions.clone() else {
        return Vec::new();
    };
    let arguments: Vec<usize> = valued::items(probe).collect();
    let mut positions = 0..;
    for items in [&mut asked.capture, &mut asked.capture_at_return] {
        items.retain(|_| {
            let position = positions.next();
            position.is_none_or(|position| !arguments.contains(&position))
        });
    }
    actions(Some(&asked))
}

/// Returns the actions at a hit: `capture=+16(%di):32`, `post`.
pub(crate) fn actions(asked: Option<&v1::Actions>) -> Vec<String> {
    let Some(asked) = asked else {
        return Vec::new();
    };
    let read = Actions::from_wire(asked.clone());
    read.map_or_else(
        |_| vec![UNKNOWN.to_owned()],
        |actions| text::actions(&actions),
    )
}

/// Returns the budget of hits: `max-rate=100/s`, `throttle=sample`.
pub(crate) fn budget(asked: Option<&v1::Budget>) -> Vec<String> {
    let Some(asked) = asked else {
        return Vec::new();
    };
    let read = Budget::from_wire(*asked);
    read.map_or_else(|_| vec![UNKNOWN.to_owned()], |budget| text::budget(&budget))
}

#[cfg(test)]
mod tests {
    use hvprobe_proto::v1::{argument, item};

    use super::*;

    #[test]
    fn what_arguments_take_was_not_asked_for() {
        let stack = |word| v1::Item {
            what: Some(item::What::Stack(word)),
        };
        let argument = |at| v1::Argument {
            source: Some(argument::Source::Item(at)),
            ..Default::default()
        };
        let probe = v1::Probe {
            actions: Some(v1::Actions {
                capture: vec![stack(0), stack(1)],
                capture_at_return: vec![stack(2), stack(3)],
                ..Default::default()
            }),
            arguments: vec![argument(1), argument(2), argument(u32::MAX)],
            ..Default::default()
        };
        assert_eq!(of(&probe), ["capture=$stack0", "capture-return=$stack3"]);
    }
}
