//! Describes a type one level deep: the types to which it refers are given by their ids.
//!
//! Invariant: only what this one level needs is looked up. Callers that go deeper limit the number of their steps.

use super::format::{ENUMERATOR, ENUMERATOR_64, Entry, MEMBER, PARAMETER, kind};
use super::table::{TypeId, Types};
use crate::bytes::{i32_at, u32_at, u64_at};

/// Description of a type, one level deep.
#[derive(Clone, Copy, Debug)]
pub enum Kind<'a> {
    /// No type.
    Void,
    /// An integer.
    Int(Int),
    /// A floating-point number.
    Float,
    /// A pointer to this type.
    Pointer(TypeId),
    /// Consecutive elements of one type.
    Array {
        /// The type of each element.
        element: TypeId,
        /// Number of elements; 0 if the array has no bound.
        count: u32,
    },
    /// A structure, or a union.
    Struct {
        /// Whether it is a union, whose members share the same bytes.
        union: bool,
        /// The members.
        members: Members<'a>,
    },
    /// An enumeration.
    Enum {
        /// Whether its values are signed.
        signed: bool,
        /// The named values.
        values: Enumerators<'a>,
    },
    /// A structure or union of which only the name is known.
    Forward {
        /// Whether it is a union.
        union: bool,
    },
    /// Another name of this type.
    Typedef(TypeId),
    /// This type with `const`.
    Const(TypeId),
    /// This type with `volatile`.
    Volatile(TypeId),
    /// This type with `restrict`.
    Restrict(TypeId),
    /// This type with a type tag, such as `__user`.
    Tag(TypeId),
    /// A function with this prototype.
    Function(TypeId),
    /// The prototype of a function.
    Prototype {
        /// The return type; [`TypeId::VOID`] if the function returns nothing.
        returns: TypeId,
        /// The parameters.
        parameters: Parameters<'a>,
    },
    /// A variable, or something else that is not a type.
    Other,
}

/// An integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int {
    /// Whether the integer is signed (two's complement).
    pub signed: bool,
    /// Whether the integer is `char`.
    pub char: bool,
    /// Whether the integer is `_Bool`.
    pub bool: bool,
    /// The first bit and the number of bits, if the integer does not use all bits of its bytes.
    pub bits: Option<(u8, u8)>,
}

/// A member of a structure, one level deep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    /// The name; empty if the member has none.
    pub name: &'a str,
    /// Offset in bits from the start of the structure.
    pub bit_offset: u64,
    /// Width in bits, if the member is a bit field.
    pub width: Option<u8>,
    /// The type.
    pub ty: TypeId,
}

impl Types {
    /// Returns the description of a type; `None` if the id is invalid or the entry malformed.
    #[must_use]
    pub fn kind(&self, id: TypeId) -> Option<Kind<'_>> {
        if id == TypeId::VOID {
            return Some(Kind::Void);
        }
        let entry = self.entry(id)?;
        let other = TypeId(entry.size_or_type);
        Some(match entry.kind {
            kind::INT => Kind::Int(self.int(&entry)?),
            kind::FLOAT => Kind::Float,
            kind::PTR => Kind::Pointer(other),
            kind::ARRAY => Kind::Array {
                element: TypeId(u32_at(entry.rest, 0)?),
                count: u32_at(entry.rest, 8)?,
            },
            kind::STRUCT | kind::UNION => Kind::Struct {
                union: entry.kind == kind::UNION,
                members: self.members_of(&entry),
            },
            kind::ENUM | kind::ENUM64 => {
                let wide = entry.kind == kind::ENUM64;
                let signed = self.is_signed(&entry);
                let values = Enumerators {
                    types: self,
                    raw: entry.rest,
                    wide,
                    signed,
                };
                Kind::Enum { signed, values }
            }
            kind::FWD => Kind::Forward { union: entry.flag },
            kind::TYPEDEF => Kind::Typedef(other),
            kind::CONST => Kind::Const(other),
            kind::VOLATILE => Kind::Volatile(other),
            kind::RESTRICT => Kind::Restrict(other),
            kind::TYPE_TAG => Kind::Tag(other),
            kind::FUNC => Kind::Function(other),
            kind::FUNC_PROTO => Kind::Prototype {
                returns: other,
                parameters: Parameters {
                    types: self,
                    raw: entry.rest,
                },
            },
            _ => Kind::Other,
        })
    }

    fn int(&self, entry: &Entry<'_>) -> Option<Int> {
        const SIGNED: u32 = 1 << 24;
        const BOOL: u32 = 1 << 26;

        let word = u32_at(entry.rest, 0)?;
        let [bits, _, offset, _] = word.to_le_bytes();
        let whole = offset == 0 && u32::from(bits) == entry.size_or_type.saturating_mul(8);
        Some(Int {
            signed: word & SIGNED != 0,
            // The format has a bit that marks `char`, but compilers do not set it.
            char: entry.size_or_type == 1 && self.is_named(entry.name, "char"),
            bool: word & BOOL != 0,
            bits: (!whole).then_some((offset, bits)),
        })
    }

    /// Returns whether an enumeration has signed values. If no enumeration in the data is marked as signed, one
    /// with a negative value counts as signed.
    fn is_signed(&self, entry: &Entry<'_>) -> bool {
        entry.flag
            || !self.signs
                && entry
                    .rest
                    .chunks_exact(ENUMERATOR)
                    .any(|raw| i32_at(raw, 4).is_some_and(|value| value < 0))
    }

    /// Returns the members of a structure.
    pub(super) fn members_of<'a>(&'a self, entry: &Entry<'a>) -> Members<'a> {
        Members {
            types: self,
            raw: entry.rest,
            bit_fields: entry.flag,
        }
    }

    /// Returns the first bit and the number of bits of an integer that does not use all bits of its bytes. BTF
    /// describes bit fields by such integers if the structure itself does not give their widths.
    fn odd_bits(&self, id: TypeId) -> Option<(u8, u8)> {
        let entry = self.resolved(id)?;
        let int = (entry.kind == kind::INT).then(|| self.int(&entry))?;
        int?.bits
    }
}

/// Splits the first `len` bytes off `raw`, and returns them; `None` if there are fewer.
fn take<'a>(raw: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (first, rest) = raw.split_at_checked(len)?;
    *raw = rest;
    Some(first)
}

/// Iterator over the members of a structure, in order.
#[derive(Clone, Copy, Debug)]
pub struct Members<'a> {
    types: &'a Types,
    raw: &'a [u8],
    bit_fields: bool,
}

impl<'a> Iterator for Members<'a> {
    type Item = Field<'a>;

    fn next(&mut self) -> Option<Field<'a>> {
        let raw = take(&mut self.raw, MEMBER)?;
        let ty = TypeId(u32_at(raw, 4)?);
        let mut bit_offset = u64::from(u32_at(raw, 8)?);
        let mut width = None;
        if self.bit_fields {
            let [.., bits] = u32_at(raw, 8)?.to_le_bytes();
            bit_offset &= 0xff_ffff;
            width = (bits != 0).then_some(bits);
        } else if let Some((offset, bits)) = self.types.odd_bits(ty) {
            bit_offset += u64::from(offset);
            width = Some(bits);
        }
        Some(Field {
            name: self.types.string(u32_at(raw, 0)?),
            bit_offset,
            width,
            ty,
        })
    }
}

/// A named value of an enumeration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value<'a> {
    /// The name.
    pub name: &'a str,
    /// The value. For an unsigned enumeration, the bits of the value.
    pub value: i64,
}

/// Iterator over the named values of an enumeration, in order.
#[derive(Clone, Copy, Debug)]
pub struct Enumerators<'a> {
    types: &'a Types,
    raw: &'a [u8],
    wide: bool,
    signed: bool,
}

impl<'a> Iterator for Enumerators<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        let value;
        let raw;
        if self.wide {
            raw = take(&mut self.raw, ENUMERATOR_64)?;
            value = u64_at(raw, 4)?.cast_signed();
        } else {
            raw = take(&mut self.raw, ENUMERATOR)?;
            value = if self.signed {
                i64::from(i32_at(raw, 4)?)
            } else {
                i64::from(u32_at(raw, 4)?)
            };
        }
        Some(Value {
            name: self.types.string(u32_at(raw, 0)?),
            value,
        })
    }
}

/// A parameter of a prototype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument<'a> {
    /// The name; empty if the parameter has none.
    pub name: &'a str,
    /// The type; [`TypeId::VOID`] for the `...` at the end of the list.
    pub ty: TypeId,
}

/// Iterator over the parameters of a prototype, in order.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<'a> {
    types: &'a Types,
    raw: &'a [u8],
}

impl<'a> Iterator for Parameters<'a> {
    type Item = Argument<'a>;

    fn next(&mut self) -> Option<Argument<'a>> {
        let raw = take(&mut self.raw, PARAMETER)?;
        Some(Argument {
            name: self.types.string(u32_at(raw, 0)?),
            ty: TypeId(u32_at(raw, 4)?),
        })
    }
}
