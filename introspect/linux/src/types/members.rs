//! Looks up fields of structures by name.
//!
//! Invariants: all questions about structures that are asked together take one pass over the types. The work for
//! one question is bounded.

use super::error::BtfError;
use super::format::{Entry, kind};
use super::kinds::Field;
use super::table::{DEEPEST, TypeId, Types};
use crate::bytes::u32_at;

/// Maximum number of members examined per question; no structure of a kernel has more.
const MOST_MEMBERS: u32 = 1 << 16;
/// Maximum number of parts of a path.
const LONGEST_PATH: usize = 8;

/// Position of a member in a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Offset in bytes from the start of the structure.
    pub offset: u64,
    /// Size in bytes; for an array, that of all elements together. 0 if BTF does not say.
    pub size: u64,
}

impl Member {
    /// Returns the offset of `found`, which is the member `field` of the structure `of`. Fails if the member was
    /// not found, or does not have `size` bytes.
    pub(crate) fn exactly(
        found: Option<Self>,
        of: &str,
        field: &str,
        size: u64,
    ) -> Result<u64, BtfError> {
        let (of, field) = (of.to_owned(), field.to_owned());
        match found {
            Some(member) if member.size == size => Ok(member.offset),
            Some(member) => Err(BtfError::Size {
                of,
                field,
                found: member.size,
                expected: size,
            }),
            None => Err(BtfError::NoField { of, field }),
        }
    }
}

/// Position of a number in a structure. The number may be a bit field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NumberPlace {
    /// Offset in bytes from the start of the structure to the number's first byte.
    pub(crate) offset: u64,
    /// Number of bytes that the number occupies at least in part; at most 8.
    pub(crate) bytes: usize,
    /// Number of bits in the first byte that are below the number.
    shift: u64,
    mask: u64,
}

impl NumberPlace {
    /// Extracts the number from `bytes`, which begin with its first byte.
    pub(crate) fn of(&self, bytes: &[u8]) -> u64 {
        let whole = bytes.iter().take(self.bytes);
        let whole = whole.rfold(0, |all, byte| all << 8 | u64::from(*byte));
        whole >> self.shift & self.mask
    }
}

impl Types {
    /// Returns the member `name` of a structure or union. Members of anonymous members count as those of `of`
    /// itself.
    #[must_use]
    pub fn member(&self, of: TypeId, name: &str) -> Option<Field<'_>> {
        let entry = self.composite(of).filter(|_| !name.is_empty())?;
        let mut budget = MOST_MEMBERS;
        self.member_of(&entry, name, true, DEEPEST, &mut budget)
    }

    /// Returns the position of the member that each question asks for. A question is the name of a structure, and a
    /// path into the structure. Takes one pass over the types for all questions together.
    pub(crate) fn members(&self, questions: &[(&str, &str)]) -> Vec<Option<Member>> {
        let mut names: Vec<_> = questions.iter().map(|(of, _)| *of).collect();
        names.dedup();
        let structures = self.structures(&names);
        let answers = questions.iter();
        answers
            .map(|(of, path)| structures.member(of, path))
            .collect()
    }

    /// Finds all structures with these names, in one pass over the types.
    pub(crate) fn structures(&self, names: &[&str]) -> Structures<'_> {
        let is_wanted = |ty: &Entry<'_>| {
            let is_named = ty.kind == kind::STRUCT && ty.name != 0;
            is_named && names.iter().any(|name| self.is_named(ty.name, name))
        };
        let all = self.ids().filter_map(|id| self.entry(id));
        Structures {
            types: self,
            entries: all.filter(is_wanted).collect(),
        }
    }

    /// Returns the position of the member `name`, an unsigned number. Looks in the first structure named `of` that
    /// has such a member.
    pub(crate) fn number(&self, of: &str, name: &str) -> Option<NumberPlace> {
        let place = self.ids().find_map(|id| {
            let entry = self.entry(id)?;
            let is_it = entry.kind == kind::STRUCT && entry.name != 0;
            (is_it && self.is_named(entry.name, of)).then(|| self.member(id, name))?
        })?;
        let width = match place.width {
            Some(width) => width.into(),
            None => self.size(place.ty)?.checked_mul(8)?,
        };
        let shift = place.bit_offset % 8;
        let bits = width.checked_add(shift).filter(|bits| *bits <= 64)?;
        Some(NumberPlace {
            offset: place.bit_offset / 8,
            bytes: usize::try_from(bits.div_ceil(8)).ok()?,
            shift,
            mask: u64::MAX.checked_shr(u32::try_from(64 - width).ok()?)?,
        })
    }

    /// Returns the offset of the field at `path` in the structure `of`. Fails if the field does not have `size`
    /// bytes. Fields of anonymous members count as the structure's own.
    pub(crate) fn field(&self, of: &str, path: &str, size: u64) -> Result<u64, BtfError> {
        let found = self.structures(&[of]).member(of, path);
        Member::exactly(found, of, path, size)
    }

    /// Follows a path such as `mem[4].base` in a structure.
    fn follow(&self, ty: &Entry<'_>, path: &str, budget: &mut u32) -> Option<Member> {
        let mut offset = 0_u64;
        let mut place = None;
        for (depth, part) in path.split('.').enumerate() {
            let (name, index) = match part.split_once('[') {
                Some((name, index)) => (name, Some(index.strip_suffix(']')?.parse::<u32>().ok()?)),
                None => (part, None),
            };
            if depth == LONGEST_PATH || name.is_empty() {
                return None;
            }
            let found = match place {
                None => self.member_of(ty, name, false, DEEPEST, budget)?,
                Some(id) => {
                    let inner = self.composite(id)?;
                    self.member_of(&inner, name, false, DEEPEST, budget)?
                }
            };
            let mut ty = found.ty;
            offset = offset.checked_add(found.bit_offset / 8)?;
            if let Some(index) = index {
                let array = self.resolved(ty).filter(|ty| ty.kind == kind::ARRAY)?;
                let element = TypeId(u32_at(array.rest, 0)?);
                if index >= u32_at(array.rest, 8)? {
                    return None;
                }
                let stride = self.size(element)?;
                offset = offset.checked_add(stride.checked_mul(index.into())?)?;
                ty = element;
            }
            place = Some(ty);
        }
        Some(Member {
            offset,
            size: self.size(place?).unwrap_or(0),
        })
    }

    fn composite(&self, id: TypeId) -> Option<Entry<'_>> {
        let entry = self.resolved(id)?;
        matches!(entry.kind, kind::STRUCT | kind::UNION).then_some(entry)
    }

    /// Returns the member called `wanted`; a bit field only if `bit_fields` is set.
    fn member_of<'a>(
        &'a self,
        ty: &Entry<'a>,
        wanted: &str,
        bit_fields: bool,
        depth: u32,
        budget: &mut u32,
    ) -> Option<Field<'a>> {
        for field in self.members_of(ty) {
            *budget = budget.checked_sub(1)?;
            if field.name.is_empty() && field.width.is_none() {
                let inner = self.composite(field.ty).filter(|_| depth > 0);
                let found =
                    inner.and_then(|ty| self.member_of(&ty, wanted, bit_fields, depth - 1, budget));
                if let Some(found) = found {
                    return Some(Field {
                        bit_offset: field.bit_offset + found.bit_offset,
                        ..found
                    });
                }
            } else if field.name == wanted
                && (bit_fields || field.width.is_none() && field.bit_offset % 8 == 0)
            {
                return Some(field);
            }
        }
        None
    }
}

/// Structures found by name.
pub(crate) struct Structures<'a> {
    types: &'a Types,
    entries: Vec<Entry<'a>>,
}

impl Structures<'_> {
    /// Returns the size in bytes of the structure `of`; of the first one, if several have that name.
    pub(crate) fn size(&self, of: &str) -> Option<u64> {
        let mut named = self.entries.iter();
        let found = named.find(|ty| self.types.is_named(ty.name, of))?;
        Some(found.size_or_type.into())
    }

    /// Returns the position of the member at `path` in the structure `of`.
    pub(crate) fn member(&self, of: &str, path: &str) -> Option<Member> {
        let mut budget = MOST_MEMBERS;
        let mut named = self.entries.iter();
        // If several structures share the name, the first one with such a member counts.
        named.find_map(|ty| {
            let is_it = self.types.is_named(ty.name, of);
            is_it.then(|| self.types.follow(ty, path, &mut budget))?
        })
    }
}
