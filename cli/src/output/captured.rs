//! What events captured, told apart item by item.

use std::sync::Arc;

use hvprobe_proto::v1::{self, item};

use super::asked;

/// Bytes of a word of the stack.
const WORD: usize = 8;

/// What a probe captures: how long each item is, and what it is. Copies share it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Captures(Arc<[(usize, String)]>);

/// Something that was read at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item<'a> {
    /// What was asked for: `+16(%di)`, `$stack3`; empty if that is not known.
    pub(crate) what: &'a str,
    /// What was read; `None` if that was not possible.
    pub(crate) data: Option<&'a [u8]>,
}

impl Captures {
    /// Those of `probe`.
    pub(crate) fn of(probe: &v1::Probe) -> Self {
        let Some(actions) = &probe.actions else {
            return Self::default();
        };
        let items = actions.capture.iter().chain(&actions.capture_at_return);
        Self(
            items
                .map(|item| (len(item), asked::item_name(item)))
                .collect(),
        )
    }

    /// What `event`, which is of this probe, captured.
    pub(crate) fn split<'a>(&'a self, event: &'a v1::Event) -> Vec<Item<'a>> {
        let mut rest = event.captured.as_slice();
        let mut items = Vec::new();
        for (index, (len, what)) in self.0.iter().enumerate() {
            // Nothing is captured with some kinds of events.
            let Some((data, others)) = rest.split_at_checked(*len) else {
                break;
            };
            rest = others;
            let bit = u32::try_from(index)
                .ok()
                .and_then(|at| event.unreadable.checked_shr(at));
            let unreadable = bit.is_some_and(|bit| bit & 1 == 1);
            items.push(Item {
                what,
                data: (!unreadable).then_some(data),
            });
        }
        // Of a probe that was removed before its events were sent nothing is known.
        if !rest.is_empty() {
            items.push(Item {
                what: "",
                data: Some(rest),
            });
        }
        items
    }
}

fn len(item: &v1::Item) -> usize {
    match &item.what {
        Some(item::What::Memory(memory)) => usize::try_from(memory.length).unwrap_or(usize::MAX),
        Some(item::What::Stack(_)) => WORD,
        Some(item::What::Fetched(_)) => 0,
        None => 0,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A probe that captures three bytes at rdi-4, and a word of the stack at the return.
    pub(crate) fn probe() -> v1::Probe {
        let item = |what| v1::Item { what: Some(what) };
        let memory = item(item::What::Memory(v1::MemoryItem {
            base: v1::Register::Rdi.into(),
            offset: -4,
            length: 3,
        }));
        v1::Probe {
            actions: Some(v1::Actions {
                capture: vec![memory],
                capture_at_return: vec![item(item::What::Stack(2))],
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    /// What it captured, all but the last item being readable.
    pub(crate) const BYTES: [u8; 11] = [0, 0x11, 0xaa, 1, 2, 0, 0, 0, 0, 0, 0];

    fn split(
        captures: &Captures,
        captured: &[u8],
        unreadable: u32,
    ) -> Vec<(String, Option<Vec<u8>>)> {
        let event = v1::Event {
            captured: captured.to_vec(),
            unreadable,
            ..Default::default()
        };
        let items = captures.split(&event).into_iter();
        items
            .map(|item| (item.what.to_owned(), item.data.map(<[u8]>::to_vec)))
            .collect()
    }

    #[test]
    fn bytes_are_told_apart_as_the_probe_asked_for_them() {
        let captures = Captures::of(&probe());
        assert_eq!(
            split(&captures, &BYTES, 0),
            [
                ("-4(%di)".to_owned(), Some(BYTES[..3].to_vec())),
                ("$stack2".to_owned(), Some(BYTES[3..].to_vec())),
            ]
        );
        assert_eq!(
            split(&captures, &BYTES, 0b10)[1],
            ("$stack2".to_owned(), None)
        );
        assert_eq!(split(&captures, &[], 0), []);
    }

    #[test]
    fn bytes_of_an_unknown_probe_are_one_item_without_a_name() {
        let all = (String::new(), Some(BYTES.to_vec()));
        assert_eq!(split(&Captures::default(), &BYTES, 0b10), [all]);
    }
}
