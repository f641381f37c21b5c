//! Determines how the value of a variable is shown.
//!
//! Invariant: types are followed for a bounded number of steps, even if they refer to each other in a loop.

use gimli::{AttributeValue, UnitOffset, constants as dw};
use hvprobe_spec::fetch::{Element, Shown as Digits};

use super::error::DebugError;
use super::info::{Entry, Unit};
use super::typename::{MOST_STEPS, reference};

/// Maximum depth of nested arrays, in case they form a loop.
const DEEPEST: usize = 8;

/// How a value is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// As a number of this type.
    Number(Element),
    /// As an address, or as the text at that address.
    Text,
    /// As a list of its elements.
    Array {
        /// How each element is shown; `None` if an element is not a single number.
        element: Option<Element>,
        /// Number of elements; 0 if unknown.
        count: u64,
        /// Whether the elements are characters.
        is_text: bool,
    },
    /// Not shown, as for a structure or a value of unknown type.
    Whole,
}

impl<'f> Unit<'_, 'f> {
    /// Strips typedefs and qualifiers from a type. `None` for `void`, or for a type with too many of either.
    pub(super) fn bare(&self, mut ty: Option<UnitOffset>) -> Result<Option<Entry<'f>>, DebugError> {
        for _ in 0..MOST_STEPS {
            let Some(at) = ty else { break };
            let entry = self.entry(at)?;
            let is_other_name = matches!(
                entry.tag(),
                dw::DW_TAG_const_type
                    | dw::DW_TAG_volatile_type
                    | dw::DW_TAG_restrict_type
                    | dw::DW_TAG_atomic_type
                    | dw::DW_TAG_typedef
            );
            if !is_other_name {
                return Ok(Some(entry));
            }
            ty = reference(entry.attr_value(dw::DW_AT_type));
        }
        Ok(None)
    }

    /// Returns how a value of type `ty` is shown.
    pub(super) fn shown(&self, ty: Option<UnitOffset>) -> Result<Shown, DebugError> {
        let Some(entry) = self.bare(ty)? else {
            return Ok(Shown::Whole);
        };
        let to = reference(entry.attr_value(dw::DW_AT_type));
        match entry.tag() {
            dw::DW_TAG_pointer_type => {
                let to = self.bare(to)?;
                Ok(match to.is_some_and(|to| is_character(&to)) {
                    true => Shown::Text,
                    false => number(Digits::Hex, 8).map_or(Shown::Whole, Shown::Number),
                })
            }
            dw::DW_TAG_array_type => {
                let of = self.bare(to)?;
                let element = of.as_ref().and_then(|of| match of.tag() {
                    dw::DW_TAG_pointer_type => number(Digits::Hex, 8),
                    _ => simple(of),
                });
                Ok(Shown::Array {
                    element,
                    count: self.elements(entry.offset())?,
                    is_text: of.is_some_and(|of| is_character(&of)),
                })
            }
            _ => Ok(simple(&entry).map_or(Shown::Whole, Shown::Number)),
        }
    }

    /// Returns the total number of elements of an array, over all its dimensions; 0 if unknown.
    fn elements(&self, at: UnitOffset) -> Result<u64, DebugError> {
        let dimensions = self.dimensions(at)?;
        let product = |all: u64, one: Option<u64>| all.checked_mul(one?);
        Ok(dimensions.into_iter().try_fold(1, product).unwrap_or(0))
    }

    /// Returns the size in bytes of a value of type `ty`, if known.
    pub(super) fn size(&self, mut ty: Option<UnitOffset>) -> Result<Option<u64>, DebugError> {
        let mut times = 1_u64;
        for _ in 0..DEEPEST {
            let Some(entry) = self.bare(ty)? else {
                return Ok(None);
            };
            if let Some(size) = byte_size(&entry) {
                return Ok(times.checked_mul(size));
            }
            match entry.tag() {
                dw::DW_TAG_pointer_type => return Ok(times.checked_mul(8)),
                dw::DW_TAG_array_type => {
                    let count = self.elements(entry.offset())?;
                    let Some(all) = times.checked_mul(count) else {
                        return Ok(None);
                    };
                    times = all;
                    ty = reference(entry.attr_value(dw::DW_AT_type));
                }
                _ => return Ok(None),
            }
        }
        Ok(None)
    }
}

fn byte_size(entry: &Entry<'_>) -> Option<u64> {
    let size = entry.attr(dw::DW_AT_byte_size);
    size.and_then(gimli::Attribute::udata_value)
}

fn encoding(entry: &Entry<'_>) -> Option<gimli::DwAte> {
    match entry.attr_value(dw::DW_AT_encoding) {
        Some(AttributeValue::Encoding(encoding)) => Some(encoding),
        _ => None,
    }
}

fn is_character(entry: &Entry<'_>) -> bool {
    let is_one = matches!(
        encoding(entry),
        Some(dw::DW_ATE_signed_char | dw::DW_ATE_unsigned_char)
    );
    is_one && byte_size(entry) == Some(1)
}

/// Returns how values of the type at `entry` are shown; `None` if they are not single integers.
fn simple(entry: &Entry<'_>) -> Option<Element> {
    let digits = match (entry.tag(), encoding(entry)) {
        (_, Some(dw::DW_ATE_signed | dw::DW_ATE_signed_char)) => Digits::Signed,
        (_, Some(dw::DW_ATE_unsigned | dw::DW_ATE_unsigned_char | dw::DW_ATE_boolean))
        | (dw::DW_TAG_enumeration_type, None) => Digits::Unsigned,
        _ => return None,
    };
    number(digits, byte_size(entry)?)
}

/// Returns the integer type of `bytes` bytes; `None` if there is no such type.
pub(super) fn number(shown: Digits, bytes: u64) -> Option<Element> {
    let bits = match bytes {
        1 => 8,
        2 => 16,
        4 => 32,
        8 => 64,
        _ => return None,
    };
    Some(Element::Integer { shown, bits })
}
