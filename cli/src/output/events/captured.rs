//! Captured data of events, split into items.

use std::sync::Arc;

use hvprobe_proto::v1::{self, fetched_item, item};
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::language::text;
use hvprobe_spec::{Item, TextHeader};

use super::asked::UNKNOWN;
use super::valued;
use crate::output::values::stack_trace::StackTrace;

/// Captured items of a probe. Clones share the list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Captures(Arc<[Capture]>);

/// Item that is read at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Capture {
    length: Length,
    what: String,
    /// Whether the item is one of the values of a hit.
    is_argument: bool,
}

/// Length of an item in the captured bytes. It is often known even for an item that this program does not
/// understand otherwise, so that the items after it can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    /// Fixed number of bytes.
    Bytes(usize),
    /// Length in the header of the text.
    Text,
    /// Length in the header of the stack.
    StackTrace,
    /// The item is of a kind that only a newer server knows.
    Unknown,
}

/// Captured data of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Captured<'a> {
    /// Items, in the order in which the probe captures them. Some kinds of events capture nothing.
    pub(crate) items: Vec<ItemData<'a>>,
    /// Bytes that could not be split into items: for an unknown probe, all bytes; otherwise, all bytes starting
    /// with the first item of unknown or too large length.
    rest: &'a [u8],
}

/// Item that was read at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ItemData<'a> {
    /// Source of the item: `+16(%di)`, `$stack3`; empty if unknown.
    pub(crate) what: &'a str,
    /// Data; `None` if it could not be read.
    pub(crate) data: Option<Data<'a>>,
    is_argument: bool,
}

/// Data of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data<'a> {
    /// The requested number of bytes.
    Bytes(&'a [u8]),
    /// Text of variable length.
    Text {
        /// Bytes of the text.
        bytes: &'a [u8],
        /// Whether the guest's text is longer.
        truncated: bool,
    },
    /// The kernel's stack.
    StackTrace {
        /// Lower halves of the addresses.
        halves: &'a [u8],
        /// Whether the stack has more addresses.
        goes_on: bool,
    },
}

impl<'a> Data<'a> {
    /// Returns the bytes.
    pub(crate) fn bytes(self) -> &'a [u8] {
        match self {
            Self::Bytes(bytes)
            | Self::Text { bytes, .. }
            | Self::StackTrace { halves: bytes, .. } => bytes,
        }
    }
}

/// Returns whether `probe` records the kernel's stack.
pub(crate) fn records_stacks(probe: &v1::Probe) -> bool {
    let is_stack = |item: &v1::Item| matches!(item.what, Some(item::What::StackTrace(_)));
    let actions = probe.actions.iter();
    let mut items = actions.flat_map(|it| it.capture.iter().chain(&it.capture_at_return));
    items.any(is_stack)
}

impl Captures {
    /// Returns the items of `probe`.
    pub(crate) fn of(probe: &v1::Probe) -> Self {
        let Some(actions) = &probe.actions else {
            return Self::default();
        };
        let items = actions.capture.iter().chain(&actions.capture_at_return);
        let mut captures: Vec<_> = items
            .map(|item| Capture {
                length: length(item),
                what: Item::from_wire(item.clone())
                    .map_or_else(|_| UNKNOWN.to_owned(), |item| text::item_name(&item)),
                is_argument: false,
            })
            .collect();
        for at in valued::items(probe) {
            if let Some(capture) = captures.get_mut(at) {
                capture.is_argument = true;
            }
        }
        Self(captures.into())
    }

    /// Splits the captured data of `event`, an event of this probe.
    pub(crate) fn split<'a>(&'a self, event: &'a v1::Event) -> Captured<'a> {
        let mut rest = &event.captured[..];
        let mut items = Vec::new();
        for (index, capture) in self.0.iter().enumerate() {
            let Some((data, others)) = capture.length.split(rest) else {
                break;
            };
            rest = others;
            let bit = u32::try_from(index)
                .ok()
                .and_then(|at| event.unreadable.checked_shr(at));
            let unreadable = bit.is_some_and(|bit| bit & 1 == 1);
            items.push(ItemData {
                what: &capture.what,
                data: (!unreadable).then_some(data),
                is_argument: capture.is_argument,
            });
        }
        Captured { items, rest }
    }
}

impl<'a> Captured<'a> {
    /// Returns the kernel's stack, if the event has one; the first if it has several.
    pub(crate) fn stack_trace(&self) -> Option<StackTrace> {
        self.items.iter().find_map(|item| match item.data {
            Some(Data::StackTrace { halves, goes_on }) => Some(StackTrace::of(halves, goes_on)),
            _ => None,
        })
    }

    /// Returns the items that are neither values of the hit nor its stack.
    pub(crate) fn others(&self) -> impl Iterator<Item = ItemData<'a>> {
        // There may be a rest, for example, if the probe is unknown because it was removed before its events were
        // sent.
        let rest = (!self.rest.is_empty()).then_some(ItemData {
            what: "",
            data: Some(Data::Bytes(self.rest)),
            is_argument: false,
        });
        let items = self.items.iter().copied();
        let is_stack = |item: &ItemData<'_>| matches!(item.data, Some(Data::StackTrace { .. }));
        items
            .filter(move |item| !item.is_argument && !is_stack(item))
            .chain(rest)
    }
}

impl Length {
    /// Splits `bytes` into the data of an item of this length and the bytes after it. Returns `None` if the length
    /// is unknown or too large.
    fn split(self, bytes: &[u8]) -> Option<(Data<'_>, &[u8])> {
        match self {
            Self::Bytes(len) => {
                let (bytes, rest) = bytes.split_at_checked(len)?;
                Some((Data::Bytes(bytes), rest))
            }
            Self::Text | Self::StackTrace => {
                let (header, rest) = bytes.split_first_chunk()?;
                let TextHeader { len, truncated } = TextHeader::from_bytes(*header);
                let (bytes, rest) = rest.split_at_checked(len.into())?;
                let data = match self {
                    Self::StackTrace => Data::StackTrace {
                        halves: bytes,
                        goes_on: truncated,
                    },
                    _ => Data::Text { bytes, truncated },
                };
                Some((data, rest))
            }
            Self::Unknown => None,
        }
    }
}

fn length(item: &v1::Item) -> Length {
    let bytes = |length| usize::try_from(length).map_or(Length::Unknown, Length::Bytes);
    match &item.what {
        Some(item::What::Memory(memory)) => bytes(memory.length),
        Some(item::What::Stack(_)) => Length::Bytes(Item::Stack(0).len()),
        Some(item::What::StackTrace(_)) => Length::StackTrace,
        Some(item::What::Fetched(fetched)) => match fetched.read {
            Some(fetched_item::Read::Bytes(length)) => bytes(length),
            Some(fetched_item::Read::Text(_)) => Length::Text,
            None => Length::Unknown,
        },
        None => Length::Unknown,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a probe that captures three bytes at rdi-4, and a stack word at the return.
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

    /// Captured bytes of this probe.
    pub(crate) const BYTES: [u8; 11] = [0, 0x11, 0xaa, 1, 2, 0, 0, 0, 0, 0, 0];

    fn split(
        captures: &Captures,
        captured: &[u8],
        unreadable: u32,
    ) -> Vec<(String, Option<Vec<u8>>)> {
        let event = v1::Event {
            captured: captured.to_vec().into(),
            unreadable,
            ..Default::default()
        };
        let shown = |item: ItemData<'_>| {
            let data = item.data.map(|data| data.bytes().to_vec());
            (item.what.to_owned(), data)
        };
        captures.split(&event).others().map(shown).collect()
    }

    #[test]
    fn bytes_are_split_as_the_probe_asked_for_them() {
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
    fn items_that_are_not_understood_keep_their_length() {
        let mut probe = probe();
        let actions = probe.actions.as_mut().unwrap();
        let [item] = actions.capture.as_mut_slice() else {
            panic!("{actions:?}");
        };
        let Some(item::What::Memory(memory)) = &mut item.what else {
            panic!("{item:?}");
        };
        memory.base = 99;
        assert_eq!(
            split(&Captures::of(&probe), &BYTES, 0),
            [
                ("?".to_owned(), Some(BYTES[..3].to_vec())),
                ("$stack2".to_owned(), Some(BYTES[3..].to_vec())),
            ]
        );
        // The length of an item of an unknown kind is unknown, so all bytes from there on are shown as one item.
        let actions = probe.actions.as_mut().unwrap();
        actions.capture[0].what = None;
        let all = (String::new(), Some(BYTES.to_vec()));
        assert_eq!(split(&Captures::of(&probe), &BYTES, 0), [all]);
    }

    #[test]
    fn bytes_of_an_unknown_probe_are_one_item_without_a_name() {
        let all = (String::new(), Some(BYTES.to_vec()));
        assert_eq!(split(&Captures::default(), &BYTES, 0b10), [all]);
    }

    /// Returns a probe that captures a text at the entry and, as one of its values, a number at the return.
    pub(crate) fn with_text() -> v1::Probe {
        let fetched = |read| v1::Item {
            what: Some(item::What::Fetched(v1::FetchedItem {
                base: Some(fetched_item::Base::Register(v1::Register::Rdi.into())),
                pointers: vec![v1::Pointer::default()],
                read: Some(read),
            })),
        };
        v1::Probe {
            actions: Some(v1::Actions {
                capture: vec![fetched(fetched_item::Read::Text(64))],
                capture_at_return: vec![fetched(fetched_item::Read::Bytes(2))],
                ..Default::default()
            }),
            arguments: vec![v1::Argument {
                source: Some(v1::argument::Source::Item(1)),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn texts_have_as_many_bytes_as_they_say() {
        let captures = Captures::of(&with_text());
        let event = |captured: &[u8]| v1::Event {
            captured: captured.to_vec().into(),
            ..Default::default()
        };
        let whole = event(b"\x03\x80abc\x11\x22");
        let split = captures.split(&whole);
        let text = Data::Text {
            bytes: b"abc",
            truncated: true,
        };
        assert_eq!(split.items[0].data, Some(text));
        assert_eq!(split.items[1].data, Some(Data::Bytes(&[0x11, 0x22])));
        // The second item is a value.
        let others: Vec<_> = split.others().collect();
        assert_eq!(others, [split.items[0]]);

        // Texts that are shorter than their header says, and one with half a header.
        for captured in [&b"\x05\x00abc"[..], b"\x05", b"\xff\xff"] {
            let short = event(captured);
            let split = captures.split(&short);
            assert_eq!(split.items, []);
            assert_eq!(split.rest, captured);
        }
        let cut = event(b"\0\0\x11");
        assert_eq!(captures.split(&cut).items.len(), 1);
    }
}
