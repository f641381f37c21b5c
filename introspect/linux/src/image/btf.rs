//! Fields of kernel structures, from the image's BTF (Documentation/bpf/btf.rst), as in 5.10, 6.1, 6.12 and
//! 7.2.
//!
//! What is kept true: one pass notes where each type begins and nothing else is built, because a
//! handful of structures out of a hundred thousand types is wanted at every start (a general BTF
//! crate takes eighty times as long to build its maps); any number of questions is answered in one
//! more pass; ids, offsets and loops in the data are bounded.

use std::fmt;

use super::bytes::u32_at;

/// The magic number as little-endian kernels write it.
const MAGIC: u16 = 0xeb9f;
/// Modifiers and typedefs in a row, or anonymous members in each other, before it is a loop.
const DEEPEST: u32 = 16;
/// Members looked at for one question before it is no kernel's structure.
const MOST_MEMBERS: u32 = 1 << 16;
/// Parts of a path before it is no path into a structure.
const LONGEST_PATH: usize = 8;

/// Why BTF does not tell where a field is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// The image has none.
    #[error("the kernel has no BTF: it was built without CONFIG_DEBUG_INFO_BTF")]
    Missing,
    /// The bytes are not what the format says.
    #[error("malformed BTF at offset {0:#x}")]
    Malformed(usize),
    /// No variable that could point to the current task.
    #[error("no symbol `current_task` or `pcpu_hot` leads to the current task")]
    NoCurrentTask,
    /// No such field, or it is a bit field.
    #[error("no field `{field}` in `struct {of}`")]
    NoField {
        /// The structure.
        of: String,
        /// The field.
        field: String,
    },
    /// The field has another size than the code knows how to read.
    #[error("field `{field}` of `struct {of}` has {found} bytes, not {expected}")]
    Size {
        /// The structure.
        of: String,
        /// The field.
        field: String,
        /// The size in BTF.
        found: u64,
        /// The size known.
        expected: u64,
    },
}

/// `BTF_KIND_*`, as far as they matter here.
mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const PTR: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const RESTRICT: u32 = 11;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
}

/// Where a member of a structure lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Bytes from the start of the structure.
    pub offset: u64,
    /// How many bytes it has, all elements of an array together; 0 when BTF does not tell.
    pub size: u64,
}

/// Type information, by itself.
pub(super) struct Btf {
    types: Box<[u8]>,
    strings: Box<[u8]>,
    /// Where the type of each id, from 1 on, begins in `types`.
    starts: Vec<u32>,
}

impl fmt::Debug for Btf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Btf")
            .field("types", &self.starts.len())
            .finish_non_exhaustive()
    }
}

/// One type's entry.
struct Type<'a> {
    name: u32,
    kind: u32,
    /// In a structure: the top byte of member offsets is the size of a bit field.
    bitfields: bool,
    /// Its size, or the id of the type it refers to.
    size_or_type: u32,
    /// What follows the fixed part: members, array bounds.
    rest: &'a [u8],
}

/// A place in a structure and the type of what is there.
#[derive(Clone, Copy)]
struct Place {
    /// Bytes from the start of the structure.
    offset: u64,
    ty: u32,
}

impl Btf {
    /// Notes the types in a `.BTF` section.
    pub(super) fn parse(data: &[u8]) -> Result<Self, BtfError> {
        if !data.starts_with(&MAGIC.to_le_bytes()) {
            return Err(BtfError::Malformed(0));
        }
        let part = |field: usize| {
            let start = u32_at(data, 4)?.checked_add(u32_at(data, field)?)?;
            let start = usize::try_from(start).ok()?;
            let len = usize::try_from(u32_at(data, field + 4)?).ok()?;
            data.get(start..start.checked_add(len)?)
        };
        let types = part(8).ok_or(BtfError::Malformed(8))?;
        let strings = part(16).ok_or(BtfError::Malformed(16))?;
        let mut starts = Vec::new();
        let mut at = 0;
        while at < types.len() {
            let ty = type_at(types, at).ok_or(BtfError::Malformed(at))?;
            starts.push(u32::try_from(at).map_err(|_| BtfError::Malformed(at))?);
            at += FIXED + ty.rest.len();
        }
        Ok(Self {
            types: types.into(),
            strings: strings.into(),
            starts,
        })
    }

    /// Where the members asked for lie, each as a structure and a path into it; one pass over the
    /// types, whatever the number of questions.
    pub(super) fn members(&self, questions: &[(&str, &str)]) -> Vec<Option<Member>> {
        let mut answers = vec![None; questions.len()];
        let mut budgets = vec![MOST_MEMBERS; questions.len()];
        // Several structures may share a name: the first that has the member counts.
        for ty in (1..)
            .zip(&self.starts)
            .filter_map(|(id, _)| self.get(id))
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

    /// The offset of a field of exactly `size` bytes; fields of anonymous members count as the
    /// structure's own.
    pub(super) fn field(&self, of: &str, path: &str, size: u64) -> Result<u64, BtfError> {
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
    fn follow(&self, ty: &Type<'_>, path: &str, budget: &mut u32) -> Option<Member> {
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
            let mut found = match place {
                None => self.member(ty, name, DEEPEST, budget)?,
                Some(id) => {
                    let inner = self
                        .resolve(id, DEEPEST)
                        .filter(|ty| matches!(ty.kind, kind::STRUCT | kind::UNION))?;
                    self.member(&inner, name, DEEPEST, budget)?
                }
            };
            if let Some(index) = index {
                let array = self
                    .resolve(found.ty, DEEPEST)
                    .filter(|ty| ty.kind == kind::ARRAY)?;
                let element = u32_at(array.rest, 0)?;
                if index >= u32_at(array.rest, 8)? {
                    return None;
                }
                let stride = self.size(element, DEEPEST)?;
                found.offset = found
                    .offset
                    .checked_add(stride.checked_mul(index.into())?)?;
                found.ty = element;
            }
            offset = offset.checked_add(found.offset)?;
            place = Some(found.ty);
        }
        Some(Member {
            offset,
            size: self.size(place?, DEEPEST).unwrap_or(0),
        })
    }

    fn get(&self, id: u32) -> Option<Type<'_>> {
        let index = usize::try_from(id.checked_sub(1)?).ok()?;
        type_at(&self.types, usize::try_from(*self.starts.get(index)?).ok()?)
    }

    fn is_named(&self, name: u32, wanted: &str) -> bool {
        usize::try_from(name)
            .ok()
            .and_then(|at| self.strings.get(at..)?.strip_prefix(wanted.as_bytes()))
            .is_some_and(|rest| rest.first() == Some(&0))
    }

    fn member(&self, ty: &Type<'_>, wanted: &str, depth: u32, budget: &mut u32) -> Option<Place> {
        for raw in ty.rest.chunks_exact(MEMBER) {
            *budget = budget.checked_sub(1)?;
            let name = u32_at(raw, 0)?;
            let id = u32_at(raw, 4)?;
            let bits = match u32_at(raw, 8)? {
                bits if !ty.bitfields => bits,
                bits if bits >> 24 == 0 => bits,
                // A bit field is not a field that can be read as bytes.
                _ => continue,
            };
            let offset = u64::from(bits / 8);
            if name == 0 {
                let inner = self
                    .resolve(id, DEEPEST)
                    .filter(|ty| depth > 0 && matches!(ty.kind, kind::STRUCT | kind::UNION));
                let found = inner.and_then(|ty| self.member(&ty, wanted, depth - 1, budget));
                if let Some(found) = found {
                    return Some(Place {
                        offset: offset + found.offset,
                        ..found
                    });
                }
            } else if bits % 8 == 0 && self.is_named(name, wanted) {
                return Some(Place { offset, ty: id });
            }
        }
        None
    }

    /// The type itself behind typedefs and modifiers.
    fn resolve(&self, id: u32, depth: u32) -> Option<Type<'_>> {
        let mut ty = self.get(id)?;
        for _ in 0..depth {
            match ty.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    ty = self.get(ty.size_or_type)?;
                }
                _ => return Some(ty),
            }
        }
        None
    }

    fn size(&self, id: u32, depth: u32) -> Option<u64> {
        let ty = self.resolve(id, depth)?;
        match ty.kind {
            kind::INT | kind::STRUCT | kind::UNION | kind::ENUM | kind::ENUM64 => {
                Some(u64::from(ty.size_or_type))
            }
            kind::PTR => Some(8),
            kind::ARRAY => {
                let element = self.size(u32_at(ty.rest, 0)?, depth.checked_sub(1)?)?;
                element.checked_mul(u64::from(u32_at(ty.rest, 8)?))
            }
            _ => None,
        }
    }
}

/// Bytes of a type's fixed part (`struct btf_type`).
const FIXED: usize = 12;
/// Bytes of a member of a structure (`struct btf_member`).
const MEMBER: usize = 12;

fn type_at(types: &[u8], at: usize) -> Option<Type<'_>> {
    /// The last kind the format defines: whatever comes later has a length unknown here.
    const LAST: u32 = kind::ENUM64;

    let info = u32_at(types, at.checked_add(4)?)?;
    let vlen = usize::try_from(info & 0xffff).ok()?;
    let kind = info >> 24 & 0x1f;
    let extra = match kind {
        kind::INT | kind::VAR | kind::DECL_TAG => 4,
        kind::ARRAY => 12,
        kind::STRUCT | kind::UNION => MEMBER * vlen,
        kind::DATASEC | kind::ENUM64 => 12 * vlen,
        kind::ENUM | kind::FUNC_PROTO => 8 * vlen,
        1..=LAST => 0,
        _ => return None,
    };
    let rest = at.checked_add(FIXED)?;
    Some(Type {
        name: u32_at(types, at)?,
        kind,
        bitfields: info >> 31 == 1,
        size_or_type: u32_at(types, at + 8)?,
        rest: types.get(rest..rest.checked_add(extra)?)?,
    })
}
