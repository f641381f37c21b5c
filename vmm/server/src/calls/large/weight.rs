//! Upper bound for the heap memory that decoding a message takes, computed from its bytes as they arrive.
//!
//! Invariant: after any prefix of a message, the sum of what [`Scanner::scan`] returned is at least what prost has
//! allocated for that prefix. The length of a message is no such bound: an empty list entry of two bytes can take
//! hundreds of bytes once decoded. The wire format is that of protobuf's encoding guide. prost stops at its first
//! error, and so does the scanner, at the same byte or later.

use std::sync::Arc;

use crate::calls::interface::{FieldType, Interface, MessageType};

/// Nesting depth that prost accepts (`RECURSION_LIMIT`).
const DEEPEST: usize = 100;
/// Allocation overhead of a text in a list, with its `String`.
const TEXT: usize = 64;
/// Number of bytes that are counted for each number: a list of 8-byte numbers that has just grown has room for
/// twice as many.
const NUMBER: usize = 16;
/// Number of elements for which a list of messages has room once its first element has been added.
const FIRST: usize = 4;
/// Number of elements that are counted for each element from the third on, because a full list doubles its room.
const DOUBLED: usize = 2;

/// Scanner of one message.
#[derive(Debug)]
pub(super) struct Scanner {
    interface: Arc<Interface>,
    /// The message, and the nested messages around the current byte.
    open: Vec<Open>,
    /// Bytes scanned.
    at: u64,
    /// Number of nested groups around the current byte. The interface has no groups; prost skips unknown ones with
    /// all their fields.
    groups: u32,
    state: State,
}

/// A message whose start has been scanned, but not yet its end.
#[derive(Clone, Copy, Debug)]
struct Open {
    ty: MessageType,
    end: u64,
    /// The list of messages to which an element was added last: its field number, and its length so far.
    list: Option<(u32, usize)>,
}

impl Open {
    fn new(ty: MessageType, end: u64) -> Self {
        Self {
            ty,
            end,
            list: None,
        }
    }

    /// Adds an element to the list `field`. Returns by how many elements the list's room may have grown.
    fn push(&mut self, field: u32) -> usize {
        let before = self
            .list
            .filter(|(of, _)| *of == field)
            .map_or(0, |(_, length)| length);
        self.list = Some((field, before.saturating_add(1)));
        match before {
            0 => FIRST,
            1 => 0,
            _ => DOUBLED,
        }
    }
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Debug)]
enum State {
    Key(Varint),
    Number(Varint),
    /// The length of the field with this number.
    Length(Varint, u32),
    /// A value, with the number of its bytes that are still missing.
    Value(u64),
    /// The message is malformed.
    Malformed,
}

#[derive(Clone, Copy, Debug, Default)]
struct Varint {
    value: u64,
    bits: u32,
}

/// Result of a varint's byte.
enum Step {
    More,
    Done(u64),
    TooLong,
}

impl Varint {
    fn push(&mut self, byte: u8) -> Step {
        if self.bits > 63 {
            return Step::TooLong;
        }
        self.value |= u64::from(byte & 0x7f) << self.bits;
        self.bits += 7;
        if byte < 0x80 {
            Step::Done(self.value)
        } else {
            Step::More
        }
    }
}

impl Scanner {
    /// Creates a scanner for a message of `length` bytes.
    pub(super) fn new(interface: Arc<Interface>, ty: MessageType, length: u64) -> Self {
        Self {
            interface,
            open: vec![Open::new(ty, length)],
            at: 0,
            groups: 0,
            state: State::Key(Varint::default()),
        }
    }

    /// Scans the next bytes. Returns an upper bound for the heap memory that decoding them takes.
    pub(super) fn scan(&mut self, mut bytes: &[u8]) -> usize {
        let mut weight = 0_usize;
        while let Some((byte, rest)) = bytes.split_first() {
            if let State::Value(left) = &mut self.state {
                let here = bytes
                    .len()
                    .min(usize::try_from(*left).unwrap_or(usize::MAX));
                let scanned = u64::try_from(here).unwrap_or(u64::MAX);
                *left = left.saturating_sub(scanned);
                let is_over = *left == 0;
                self.at = self.at.saturating_add(scanned);
                bytes = bytes.get(here..).unwrap_or_default();
                if is_over {
                    self.end_field();
                }
                continue;
            }
            self.at = self.at.saturating_add(1);
            bytes = rest;
            weight = weight.saturating_add(self.byte(*byte));
        }
        weight
    }

    fn byte(&mut self, byte: u8) -> usize {
        let (State::Key(varint) | State::Number(varint) | State::Length(varint, _)) =
            &mut self.state
        else {
            return 0;
        };
        let value = match varint.push(byte) {
            Step::More => return 0,
            Step::Done(value) => value,
            Step::TooLong => {
                self.state = State::Malformed;
                return 0;
            }
        };
        match self.state {
            State::Key(_) => self.key(value),
            State::Length(_, field) => self.length(value, field),
            State::Number(_) | State::Value(_) | State::Malformed => {
                self.end_field();
                0
            }
        }
    }

    fn key(&mut self, key: u64) -> usize {
        // A key that is too large counts as that of field 0, which does not exist. prost refuses both.
        let field = u32::try_from(key >> 3).unwrap_or(0);
        match key & 7 {
            0 => self.state = State::Number(Varint::default()),
            1 => self.state = State::Value(8),
            2 => self.state = State::Length(Varint::default(), field),
            3 => {
                self.groups = self.groups.saturating_add(1);
                self.end_field();
            }
            4 if self.groups > 0 => {
                self.groups -= 1;
                self.end_field();
            }
            5 => self.state = State::Value(4),
            _ => self.state = State::Malformed,
        }
        let is_number = matches!(key & 7, 0 | 1 | 5);
        if is_number && self.field(field).is_some() {
            NUMBER
        } else {
            0
        }
    }

    /// Returns the type of a field of the current message; `None` within a group.
    fn field(&self, number: u32) -> Option<FieldType> {
        let open = self.open.last().filter(|_| self.groups == 0)?;
        self.interface.field(open.ty, number)
    }

    fn length(&mut self, length: u64, field: u32) -> usize {
        // prost compares a length with the end of the whole message only. It decodes a field that reaches beyond
        // its parent before it notices that.
        let whole = self.open.first().map_or(0, |it| it.end);
        let Some(end) = self.at.checked_add(length).filter(|end| *end <= whole) else {
            self.state = State::Malformed;
            return 0;
        };
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let (ty, weight) = match self.field(field) {
            Some(FieldType::Element(ty)) => {
                let grown = self.open.last_mut().map_or(FIRST, |it| it.push(field));
                (Some(ty), self.interface.size(ty).saturating_mul(grown))
            }
            Some(FieldType::Inline(ty)) => (Some(ty), 0),
            Some(FieldType::Boxed(ty)) => (Some(ty), self.interface.size(ty)),
            Some(FieldType::Text) => (None, bytes.saturating_add(TEXT)),
            Some(FieldType::Number) => (None, bytes.saturating_mul(NUMBER)),
            None => (None, 0),
        };
        if let Some(ty) = ty {
            if self.open.len() > DEEPEST {
                self.state = State::Malformed;
                return 0;
            }
            self.open.push(Open::new(ty, end));
            self.end_field();
        } else if length == 0 {
            self.end_field();
        } else {
            self.state = State::Value(length);
        }
        weight
    }

    /// Ends a field, and the messages that end with it.
    fn end_field(&mut self) {
        self.state = State::Key(Varint::default());
        while let Some(last) = self.open.last()
            && last.end <= self.at
        {
            if last.end < self.at || self.groups > 0 {
                self.state = State::Malformed;
                return;
            }
            if self.open.len() == 1 {
                return;
            }
            self.open.pop();
        }
    }
}

#[cfg(test)]
mod tests;
