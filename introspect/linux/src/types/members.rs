//! Fields of structures, by their names.
//!
//! What is kept true: any number of questions about structures by name is answered in one pass over
//! the types; work for one question is bounded.

use super::error::BtfError;
use super::format::{Entry, kind};
use super::kinds::Field;
use super::table::{DEEPEST, TypeId, Types};
use crate::bytes::u32_at;

/// Members looked at for one question before it is no kernel's structure.
const MOST_MEMBERS: u32 = 1 << 16;
/// Parts of a path before it is no path into a structure.
const LONGEST_PATH: usize = 8;

/// Where a member of a structure lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Bytes from the start of the structure.
    pub offset: u64,
    /// How many bytes it has, all elements of an array together; 0 when BTF does not tell.
    pub size: u64,
}

/// Where a member of a structure lies, a bit field too, and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberPlace {
    /// Bits from the start of the structure.
    pub bit_offset: u64,
    /// How many bits it has, if it is a bit field.
    pub width: Option<u8>,
    /// Its type.
    pub ty: TypeId,
}

/// A number that is a member of a structure, a bit field or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NumberPlace {
    /// Its first byte, from the start of the structure.
    pub(crate) offset: u64,
    /// How many bytes have some of it, 8 at most.
    pub(crate) bytes: usize,
    /// Bits of the first byte that are not its.
    shift: u64,
    mask: u64,
}

impl NumberPlace {
    /// Its value, of the bytes it lies in.
    pub(crate) fn of(&self, bytes: &[u8]) -> u64 {
        let whole = bytes.iter().take(self.bytes);
        let whole = whole.rfold(0, |all, byte| all << 8 | u64::from(*byte));
        whole >> self.shift & self.mask
    }
}

impl Types {
    /// The member `name` of a structure or union. Those of anonymous members count as its own.
    #[must_use]
    pub fn member(&self, of: TypeId, name: &str) -> Option<MemberPlace> {
        let entry = self.composite(of).filter(|_| !name.is_empty())?;
        let mut budget = MOST_MEMBERS;
        self.member_of(&entry, name, true, DEEPEST, &mut budget)
    }

    /// Where the members asked for lie, each as a structure and a path into it; one pass over the
    /// types, whatever the number of questions.
    pub(crate) fn members(&self, questions: &[(&str, &str)]) -> Vec<Option<Member>> {
        let mut answers = vec![None; questions.len()];
        let mut budgets = vec![MOST_MEMBERS; questions.len()];
        // Several structures may share a name: the first that has the member counts.
        for ty in self
            .ids()
            .filter_map(|id| self.entry(id))
            .filter(|ty| ty.kind == kind::STRUCT && ty.name != 0)
        {
            let open = answers.iter_mut().zip(&mut budgets).zip(questions);
            for ((answer, budget), (of, path)) in open {
                if answer.is_none() && self.is_named(ty.name, of) {
                    *answer = self.follow(&ty, path, budget);
                }
            }
        }
        answers
    }

    /// Where the unsigned number `name` of the structure `of` is.
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

    /// The offset of a field of exactly `size` bytes; fields of anonymous members count as the
    /// structure's own.
    pub(crate) fn field(&self, of: &str, path: &str, size: u64) -> Result<u64, BtfError> {
        let no_field = || BtfError::NoField {
            of: of.to_owned(),
            field: path.to_owned(),
        };
        let member = self.members(&[(of, path)]);
        let member = member.first().copied().flatten().ok_or_else(no_field)?;
        if member.size == size {
            return Ok(member.offset);
        }
        Err(BtfError::Size {
            of: of.to_owned(),
            field: path.to_owned(),
            found: member.size,
            expected: size,
        })
    }

    /// Follows a path such as `mem[4].base` into a structure.
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

    /// A member of that name; a bit field only if these are wanted.
    fn member_of(
        &self,
        ty: &Entry<'_>,
        wanted: &str,
        bit_fields: bool,
        depth: u32,
        budget: &mut u32,
    ) -> Option<MemberPlace> {
        for field in self.members_of(ty) {
            *budget = budget.checked_sub(1)?;
            let Field {
                name,
                bit_offset,
                width,
                ty,
            } = field;
            if name.is_empty() && width.is_none() {
                let inner = self.composite(ty).filter(|_| depth > 0);
                let found =
                    inner.and_then(|ty| self.member_of(&ty, wanted, bit_fields, depth - 1, budget));
                if let Some(found) = found {
                    return Some(MemberPlace {
                        bit_offset: bit_offset + found.bit_offset,
                        ..found
                    });
                }
            } else if name == wanted && (bit_fields || width.is_none() && bit_offset % 8 == 0) {
                return Some(MemberPlace {
                    bit_offset,
                    width,
                    ty,
                });
            }
        }
        None
    }
}
