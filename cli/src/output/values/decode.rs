//! Decoding of a value's bytes by its type.
//!
//! Invariant: for every type, valid or not, only the given bytes are read, and at most [`MOST`] values are decoded.
//! Contradictory input becomes [`Value::Unknown`].

use hvprobe_spec::Bits;
use hvprobe_spec::shape::{Enumerator, Member, Shape, ShapeKind};

use super::bits;

/// Maximum number of values in one decoded value.
const MOST: usize = 1024;
/// Maximum size of a number in bytes.
const NUMBER: usize = 16;

/// Decoded value. Names in it come from the value's type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    /// The value could not be read.
    Fault,
    /// The event lacks the value, or the value's type contradicts the event.
    Unknown,
    /// Further elements or members are not shown.
    More,
    /// Number in decimal.
    Unsigned(u128),
    /// Signed number in decimal.
    Signed(i128),
    /// Number in hexadecimal.
    Hex(u128),
    /// Character.
    Char(u8),
    /// Truth value.
    Bool(bool),
    /// Address.
    Pointer(u64),
    /// Kernel address, which may be in a symbol.
    Symbol(u64),
    /// Number that has a name, or whose bits have names.
    Named {
        /// Names.
        names: Vec<&'a str>,
        /// Bits without a name.
        rest: u64,
    },
    /// Array elements.
    Array(Vec<Value<'a>>),
    /// Members with their names.
    Struct(Vec<(&'a str, Value<'a>)>),
    /// Text.
    Text {
        /// Bytes of the text.
        bytes: Vec<u8>,
        /// Whether the guest's text is longer.
        truncated: bool,
    },
    /// Bytes of a type without a known format.
    Bytes(Vec<u8>),
}

impl<'a> Value<'a> {
    /// Reads a value of this shape, or the bit field `part` of it, from the start of `bytes`.
    pub(crate) fn read(shape: &'a Shape, part: Option<Bits>, bytes: &[u8]) -> Self {
        match part {
            Some(part) => of_size(shape, bytes).map_or(Value::Unknown, |bytes| {
                number(&shape.kind, bytes, part.offset.into(), part.width.into())
            }),
            None => Reader { left: MOST }.whole(shape, bytes),
        }
    }

    /// Calls `visit` with each symbol address in the value.
    pub(crate) fn symbols(&self, visit: &mut impl FnMut(u64)) {
        match self {
            Self::Symbol(at) => visit(*at),
            Self::Array(elements) => elements.iter().for_each(|each| each.symbols(visit)),
            Self::Struct(members) => members.iter().for_each(|(_, each)| each.symbols(visit)),
            _ => {}
        }
    }
}

/// Decoder with a limit on the number of values.
struct Reader {
    left: usize,
}

impl Reader {
    fn whole<'a>(&mut self, shape: &'a Shape, bytes: &[u8]) -> Value<'a> {
        let Some(left) = self.left.checked_sub(1) else {
            return Value::More;
        };
        self.left = left;
        if shape.kind == ShapeKind::String {
            return text(bytes, false);
        }
        let Some(bytes) = of_size(shape, bytes) else {
            return Value::Unknown;
        };
        match &shape.kind {
            ShapeKind::Bytes => Value::Bytes(bytes.to_vec()),
            ShapeKind::Array { element, count } => self.array(element, *count, bytes),
            ShapeKind::Struct { members, .. } => self.members(members, bytes),
            kind => match u32::try_from(bytes.len()) {
                Ok(len) if bytes.len() <= NUMBER => number(kind, bytes, 0, len * 8),
                _ => Value::Unknown,
            },
        }
    }

    fn array<'a>(&mut self, element: &'a Shape, count: u32, bytes: &[u8]) -> Value<'a> {
        let (Ok(size), Ok(count)) = (usize::try_from(element.size), usize::try_from(count)) else {
            return Value::Unknown;
        };
        let all = size
            .checked_mul(count)
            .and_then(|all| bytes.get(..all))
            .filter(|_| size > 0);
        match all {
            None => Value::Unknown,
            Some(all) if element.kind == ShapeKind::Char && size == 1 => text(all, false),
            Some(all) => {
                let mut elements = Vec::new();
                for bytes in all.chunks(size) {
                    elements.push(self.whole(element, bytes));
                    if elements.last() == Some(&Value::More) {
                        break;
                    }
                }
                Value::Array(elements)
            }
        }
    }

    fn members<'a>(&mut self, all: &'a [Member], bytes: &[u8]) -> Value<'a> {
        let mut members = Vec::new();
        for member in all {
            let value = self.member(member, bytes);
            if value == Value::More {
                members.push(("...", value));
                break;
            }
            members.push((member.name.as_str(), value));
        }
        Value::Struct(members)
    }

    fn member<'a>(&mut self, member: &'a Member, bytes: &[u8]) -> Value<'a> {
        let shape = &member.shape;
        if let Some(width) = member.width {
            let Some(left) = self.left.checked_sub(1) else {
                return Value::More;
            };
            self.left = left;
            return number(&shape.kind, bytes, member.offset, width.into());
        }
        let at = usize::try_from(member.offset / 8).ok();
        match at.and_then(|at| bytes.get(at..)) {
            Some(bytes) if member.offset.is_multiple_of(8) => self.whole(shape, bytes),
            _ => Value::Unknown,
        }
    }
}

/// Returns the part of `bytes` that a value of this shape occupies.
fn of_size<'b>(shape: &Shape, bytes: &'b [u8]) -> Option<&'b [u8]> {
    bytes.get(..usize::try_from(shape.size).ok()?)
}

/// Returns the text in `bytes`, up to the first NUL if there is one.
pub(crate) fn text<'a>(bytes: &[u8], truncated: bool) -> Value<'a> {
    let end = bytes.iter().position(|byte| *byte == 0);
    Value::Text {
        bytes: bytes[..end.unwrap_or(bytes.len())].to_vec(),
        truncated: truncated && end.is_none(),
    }
}

/// Returns a number of this kind from `width` bits of `bytes`, starting at bit `offset`.
fn number<'a>(kind: &'a ShapeKind, bytes: &[u8], offset: u32, width: u32) -> Value<'a> {
    let Some(number) = bits::unsigned(bytes, offset, width) else {
        return Value::Unknown;
    };
    let address = u64::try_from(number);
    match (kind, address) {
        (ShapeKind::Unsigned, _) => Value::Unsigned(number),
        (ShapeKind::Signed, _) => Value::Signed(bits::signed(number, width)),
        (ShapeKind::Hex, _) => Value::Hex(number),
        (ShapeKind::Char, _) => u8::try_from(number).map_or(Value::Unknown, Value::Char),
        (ShapeKind::Bool, _) => Value::Bool(number != 0),
        (ShapeKind::Pointer, Ok(at)) => Value::Pointer(at),
        (ShapeKind::Symbol, Ok(at)) => Value::Symbol(at),
        (ShapeKind::Enum { signed, values }, _) => enumerated(*signed, values, number, width),
        _ => Value::Unknown,
    }
}

/// Returns `number` with the name of its value or, if the enumeration consists of flags, with the names of its
/// bits.
fn enumerated(signed: bool, all: &[Enumerator], number: u128, width: u32) -> Value<'_> {
    let plain = match signed {
        true => Value::Signed(bits::signed(number, width)),
        false => Value::Unsigned(number),
    };
    let value = match plain {
        Value::Signed(value) => i64::try_from(value).ok(),
        _ => u64::try_from(number).ok().map(u64::cast_signed),
    };
    let Some(value) = value else {
        return plain;
    };
    let own = |each: &&Enumerator| each.value == value && each.mask.is_none();
    let own = all.iter().find(own);
    if let Some(own) = own {
        return Value::Named {
            names: vec![&own.name],
            rest: 0,
        };
    }
    let mut rest = value.cast_unsigned();
    if width < u64::BITS {
        rest &= (1 << width) - 1;
    }
    let mut names = Vec::new();
    if all.iter().any(|each| each.mask.is_some()) {
        let (whole, mut covered) = (rest, 0);
        for each in all {
            let mask = each.mask.unwrap_or(u64::MAX);
            if whole & mask == each.value.cast_unsigned() && mask & covered == 0 {
                names.push(each.name.as_str());
                covered |= mask;
                rest &= !mask;
            }
        }
    } else if are_flags(all) {
        for each in all {
            let bit = each.value.cast_unsigned();
            if bit.is_power_of_two() && rest & bit != 0 {
                names.push(each.name.as_str());
                rest &= !bit;
            }
        }
    }
    match names.as_slice() {
        [] => plain,
        _ => Value::Named { names, rest },
    }
}

/// Returns whether an enumeration consists of flags, as judged by its non-zero values: more than half of them are
/// single bits. In an enumeration that counts up, few values are single bits.
fn are_flags(all: &[Enumerator]) -> bool {
    let all = all.iter().map(|each| each.value.cast_unsigned());
    let (bits, others): (Vec<u64>, Vec<u64>) = all
        .filter(|value| *value != 0)
        .partition(|value| value.is_power_of_two());
    bits.len() > others.len()
}

#[cfg(test)]
pub(crate) mod tests;
