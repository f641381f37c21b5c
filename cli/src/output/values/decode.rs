//! Decoding of a value's bytes by its type.
//!
//! Invariant: whatever a type says, nothing beyond the bytes is read, and at most [`MOST`] values result.
//! Contradictory input becomes [`Value::Unknown`].

use hvprobe_proto::v1::{self, TypeKind};

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
    /// Number with a name, or with names for its bits.
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
    /// Reads a value of type `ty`, or the bit field `part` of it, from the start of `bytes`.
    pub(crate) fn read(ty: &'a v1::Type, part: Option<v1::Bits>, bytes: &[u8]) -> Self {
        match part {
            Some(part) => of_size(ty, bytes).map_or(Value::Unknown, |bytes| {
                number(ty, bytes, part.offset, part.width)
            }),
            None => Reader { left: MOST }.whole(ty, bytes),
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
    fn whole<'a>(&mut self, ty: &'a v1::Type, bytes: &[u8]) -> Value<'a> {
        let Some(left) = self.left.checked_sub(1) else {
            return Value::More;
        };
        self.left = left;
        if ty.kind() == TypeKind::String {
            return text(bytes, false);
        }
        let Some(bytes) = of_size(ty, bytes) else {
            return Value::Unknown;
        };
        match ty.kind() {
            TypeKind::Unspecified | TypeKind::String => Value::Bytes(bytes.to_vec()),
            TypeKind::Array => self.array(ty, bytes),
            TypeKind::Struct | TypeKind::Union => self.members(ty, bytes),
            _ => match u32::try_from(bytes.len()) {
                Ok(len) if bytes.len() <= NUMBER => number(ty, bytes, 0, len * 8),
                _ => Value::Unknown,
            },
        }
    }

    fn array<'a>(&mut self, ty: &'a v1::Type, bytes: &[u8]) -> Value<'a> {
        let Some(element) = ty.element.as_deref() else {
            return Value::Unknown;
        };
        let (Ok(size), Ok(count)) = (usize::try_from(element.size), usize::try_from(ty.count))
        else {
            return Value::Unknown;
        };
        let all = size
            .checked_mul(count)
            .and_then(|all| bytes.get(..all))
            .filter(|_| size > 0);
        match all {
            None => Value::Unknown,
            Some(all) if element.kind() == TypeKind::Char && size == 1 => text(all, false),
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

    fn members<'a>(&mut self, ty: &'a v1::Type, bytes: &[u8]) -> Value<'a> {
        let mut members = Vec::new();
        for member in &ty.members {
            let value = self.member(member, bytes);
            if value == Value::More {
                members.push(("...", value));
                break;
            }
            members.push((member.name.as_str(), value));
        }
        Value::Struct(members)
    }

    fn member<'a>(&mut self, member: &'a v1::Member, bytes: &[u8]) -> Value<'a> {
        let Some(ty) = member.r#type.as_ref() else {
            return Value::Unknown;
        };
        if let Some(width) = member.width {
            let Some(left) = self.left.checked_sub(1) else {
                return Value::More;
            };
            self.left = left;
            return number(ty, bytes, member.offset, width);
        }
        let at = usize::try_from(member.offset / 8).ok();
        match at.and_then(|at| bytes.get(at..)) {
            Some(bytes) if member.offset.is_multiple_of(8) => self.whole(ty, bytes),
            _ => Value::Unknown,
        }
    }
}

/// Returns the part of `bytes` that a value of type `ty` occupies.
fn of_size<'b>(ty: &v1::Type, bytes: &'b [u8]) -> Option<&'b [u8]> {
    bytes.get(..usize::try_from(ty.size).ok()?)
}

/// Returns the text in `bytes`, up to the first NUL if there is one.
pub(crate) fn text<'a>(bytes: &[u8], truncated: bool) -> Value<'a> {
    let end = bytes.iter().position(|byte| *byte == 0);
    Value::Text {
        bytes: bytes[..end.unwrap_or(bytes.len())].to_vec(),
        truncated: truncated && end.is_none(),
    }
}

/// Returns a number of type `ty` from `width` bits of `bytes`, starting at bit `offset`.
fn number<'a>(ty: &'a v1::Type, bytes: &[u8], offset: u32, width: u32) -> Value<'a> {
    let Some(number) = bits::unsigned(bytes, offset, width) else {
        return Value::Unknown;
    };
    let address = u64::try_from(number);
    match (ty.kind(), address) {
        (TypeKind::Unsigned, _) => Value::Unsigned(number),
        (TypeKind::Signed, _) => Value::Signed(bits::signed(number, width)),
        (TypeKind::Hex, _) => Value::Hex(number),
        (TypeKind::Char, _) => u8::try_from(number).map_or(Value::Unknown, Value::Char),
        (TypeKind::Bool, _) => Value::Bool(number != 0),
        (TypeKind::Pointer, Ok(at)) => Value::Pointer(at),
        (TypeKind::Symbol, Ok(at)) => Value::Symbol(at),
        (TypeKind::Enum, _) => enumerated(ty, number, width),
        _ => Value::Unknown,
    }
}

/// Returns a number with its own name, or with the names of its bits if the enumeration consists of flags.
fn enumerated(ty: &v1::Type, number: u128, width: u32) -> Value<'_> {
    let plain = match ty.signed {
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
    let own = |each: &&v1::Enumerator| each.value == value && each.mask.is_none();
    let own = ty.enumerators.iter().find(own);
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
    if ty.enumerators.iter().any(|each| each.mask.is_some()) {
        let (whole, mut covered) = (rest, 0);
        for each in &ty.enumerators {
            let mask = each.mask.unwrap_or(u64::MAX);
            if whole & mask == each.value.cast_unsigned() && mask & covered == 0 {
                names.push(each.name.as_str());
                covered |= mask;
                rest &= !mask;
            }
        }
    } else if are_flags(&ty.enumerators) {
        for each in &ty.enumerators {
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

/// Returns whether an enumeration consists of flags: whether more of its values are single bits than other
/// non-zero numbers. In an enumeration that counts, few values are single bits.
fn are_flags(all: &[v1::Enumerator]) -> bool {
    let all = all.iter().map(|each| each.value.cast_unsigned());
    let (bits, others): (Vec<u64>, Vec<u64>) = all
        .filter(|value| *value != 0)
        .partition(|value| value.is_power_of_two());
    bits.len() > others.len()
}

#[cfg(test)]
pub(crate) mod tests;
