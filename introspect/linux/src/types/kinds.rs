//! What a type is, one step deep.
//!
//! What is kept true: nothing is looked up here but what the step needs; who goes on bounds the way.

use super::format::{ENUMERATOR, ENUMERATOR_64, Entry, MEMBER, PARAMETER, kind};
use super::table::{TypeId, Types};
use crate::bytes::{i32_at, u32_at, u64_at};

/// What a type is, one step deep.
#[derive(Clone, Copy, Debug)]
pub enum Kind<'a> {
    /// No type.
    Void,
    /// An integer.
    Int(Int),
    /// A floating-point number.
    Float,
    /// A pointer.
    Pointer(TypeId),
    /// Elements one behind the other.
    Array {
        /// What each is.
        element: TypeId,
        /// How many there are; 0 if the array has no bound.
        count: u32,
    },
    /// A structure, or a union.
    Struct {
        /// Whether the members lie in the same place.
        union: bool,
        /// The members.
        members: Members<'a>,
    },
    /// An enumeration.
    Enum {
        /// Whether its values are signed.
        signed: bool,
        /// The names of values.
        values: Enumerators<'a>,
    },
    /// A structure, or a union, of which no more is known than its name.
    Forward {
        /// Whether it is a union.
        union: bool,
    },
    /// Another name of a type.
    Typedef(TypeId),
    /// `const`.
    Const(TypeId),
    /// `volatile`.
    Volatile(TypeId),
    /// `restrict`.
    Restrict(TypeId),
    /// A mark on a type, such as `__user`.
    Tag(TypeId),
    /// A function, of this prototype.
    Function(TypeId),
    /// What a function takes and returns.
    Prototype {
        /// [`TypeId::VOID`] for nothing.
        returns: TypeId,
        /// What it takes.
        parameters: Parameters<'a>,
    },
    /// A variable, or another thing that is no type.
    Other,
}

/// An integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int {
    /// Whether it is in two's complement.
    pub signed: bool,
    /// Whether it is `char`.
    pub char: bool,
    /// Whether it is `_Bool`.
    pub bool: bool,
    /// The first bit, and how many, if these are not all of its bytes.
    pub bits: Option<(u8, u8)>,
}

/// A member of a structure, one level deep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    /// Its name; empty if it has none.
    pub name: &'a str,
    /// Bits from the beginning of the structure.
    pub bit_offset: u64,
    /// How many bits it has, if it is a bit field.
    pub width: Option<u8>,
    /// Its type.
    pub ty: TypeId,
}

impl Types {
    /// What the type is.
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
            // Compilers do not set the bit that the format has for it.
            char: entry.size_or_type == 1 && self.is_named(entry.name, "char"),
            bool: word & BOOL != 0,
            bits: (!whole).then_some((offset, bits)),
        })
    }

    /// Whether an enumeration has signed values. Where none says so, those that have one below zero are.
    fn is_signed(&self, entry: &Entry<'_>) -> bool {
        entry.flag
            || !self.signs
                && entry
                    .rest
                    .chunks_exact(ENUMERATOR)
                    .any(|raw| i32_at(raw, 4).is_some_and(|value| value < 0))
    }

    /// The members of a structure.
    pub(super) fn members_of<'a>(&'a self, entry: &Entry<'a>) -> Members<'a> {
        Members {
            types: self,
            raw: entry.rest,
            bit_fields: entry.flag,
        }
    }

    /// The first bit of an integer, and how many, if these are not all of its bytes: how BTF without
    /// bit fields in its structures has them.
    fn odd_bits(&self, id: TypeId) -> Option<(u8, u8)> {
        let entry = self.resolved(id)?;
        let int = (entry.kind == kind::INT).then(|| self.int(&entry))?;
        int?.bits
    }
}

/// Takes the first `len` bytes.
fn take<'a>(raw: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (first, rest) = raw.split_at_checked(len)?;
    *raw = rest;
    Some(first)
}

/// The members of a structure, in their order.
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

/// A name of a value of an enumeration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value<'a> {
    /// The name.
    pub name: &'a str,
    /// The value; of an unsigned enumeration, its bits.
    pub value: i64,
}

/// The names of the values of an enumeration, in their order.
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
    /// Its name; empty if it has none.
    pub name: &'a str,
    /// Its type; [`TypeId::VOID`] for the `...` at the end of the list.
    pub ty: TypeId,
}

/// What a prototype takes, in its order.
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
