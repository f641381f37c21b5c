//! The result of a registration for clients.

use hvprobe_engine::{Refusals, Registered, Skipped};
use hvprobe_proto::v1::{self, RegisterResponse};
use hvprobe_sources::remedy;
use hvprobe_spec::chain;

/// Returns what happens to a batch when one of its probes is refused.
pub(crate) fn refusals(skip: bool) -> Refusals {
    if skip { Refusals::Skip } else { Refusals::Fail }
}

/// Converts the result of a batch for clients.
pub(crate) fn response(registered: &Registered) -> RegisterResponse {
    RegisterResponse {
        ids: registered.probes.iter().map(|(_, id)| id.0).collect(),
        entries: registered
            .probes
            .iter()
            .map(|(index, _)| entry(*index))
            .collect(),
        skipped: skipped(&registered.skipped),
        stopped_ns: u64::try_from(registered.stopped_for.as_nanos()).unwrap_or(u64::MAX),
    }
}

/// Converts the skipped probes for clients.
fn skipped(skipped: &[Skipped]) -> Vec<v1::SkippedProbe> {
    let one = |skipped: &Skipped| {
        let (remedy, when) = remedy(skipped.why.remedy());
        v1::SkippedProbe {
            entry: entry(skipped.index),
            symbol: skipped.target.clone(),
            reason: chain(&skipped.why),
            remedy: remedy.into(),
            when: when.to_owned(),
        }
    };
    skipped.iter().map(one).collect()
}

/// Converts the index of an entry in a batch, which has far fewer entries than a `u32` can count.
fn entry(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hvprobe_engine::Refused;
    use hvprobe_spec::ProbeId;

    use super::*;

    #[test]
    fn answer_says_what_came_of_each_entry_and_what_was_left_out() {
        let answer = response(&Registered {
            probes: vec![(0, ProbeId(7)), (2, ProbeId(8)), (2, ProbeId(9))],
            skipped: vec![Skipped {
                index: 1,
                definition: "p ext4:x".to_owned(),
                target: "ext4:x".to_owned(),
                column: Some(2),
                why: Refused::ModuleNotLoaded {
                    module: "ext4".to_owned(),
                },
            }],
            stopped_for: Duration::from_micros(3),
        });
        assert_eq!(answer.ids, [7, 8, 9]);
        assert_eq!(answer.entries, [0, 2, 2]);
        assert_eq!(answer.stopped_ns, 3000);
        let [skipped] = answer.skipped.as_slice() else {
            panic!("{:?}", answer.skipped);
        };
        assert_eq!((skipped.entry, skipped.symbol.as_str()), (1, "ext4:x"));
        assert_eq!(skipped.reason, "module ext4 is not loaded");
    }
}
