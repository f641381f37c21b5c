//! The encoding of BTF (Documentation/bpf/btf.rst), as in 5.10, 6.1, 6.12 and 7.2.
//!
//! Invariant: an [`Entry`] has all the bytes that its kind and its number of parts require, so that the code which
//! reads the parts need not check again.

use super::error::BtfError;
use crate::bytes::u32_at;

/// The magic number as little-endian kernels write it.
const MAGIC: u16 = 0xeb9f;
/// Length in bytes of the fixed part of a type (`struct btf_type`).
const FIXED: usize = 12;
/// Length in bytes of a member of a structure (`struct btf_member`).
pub(super) const MEMBER: usize = 12;
/// Length in bytes of a value of an enumeration (`struct btf_enum`).
pub(super) const ENUMERATOR: usize = 8;
/// Length in bytes of a value of a 64-bit enumeration (`struct btf_enum64`).
pub(super) const ENUMERATOR_64: usize = 12;
/// Length in bytes of a parameter (`struct btf_param`).
pub(super) const PARAMETER: usize = 8;

/// The `BTF_KIND_*` constants used here.
pub(super) mod kind {
    pub(crate) const INT: u32 = 1;
    pub(crate) const PTR: u32 = 2;
    pub(crate) const ARRAY: u32 = 3;
    pub(crate) const STRUCT: u32 = 4;
    pub(crate) const UNION: u32 = 5;
    pub(crate) const ENUM: u32 = 6;
    pub(crate) const FWD: u32 = 7;
    pub(crate) const TYPEDEF: u32 = 8;
    pub(crate) const VOLATILE: u32 = 9;
    pub(crate) const CONST: u32 = 10;
    pub(crate) const RESTRICT: u32 = 11;
    pub(crate) const FUNC: u32 = 12;
    pub(crate) const FUNC_PROTO: u32 = 13;
    pub(crate) const VAR: u32 = 14;
    pub(crate) const DATASEC: u32 = 15;
    pub(crate) const FLOAT: u32 = 16;
    pub(crate) const DECL_TAG: u32 = 17;
    pub(crate) const TYPE_TAG: u32 = 18;
    pub(crate) const ENUM64: u32 = 19;
}

/// The entry of a type.
pub(super) struct Entry<'a> {
    /// Offset of the type's name among the strings; 0 if it has none.
    pub(super) name: u32,
    /// One of [`kind`].
    pub(super) kind: u32,
    /// A flag whose meaning depends on the kind. Structure: the top byte of a member's offset is the width of a bit
    /// field. Enumeration: the values are signed. Forward declaration: the type is a union.
    pub(super) flag: bool,
    /// The size of the type, or the id of the type to which it refers.
    pub(super) size_or_type: u32,
    /// The bytes after the fixed part, such as members or the bounds of an array.
    pub(super) rest: &'a [u8],
}

/// The two sections of BTF.
pub(super) struct Sections<'a> {
    pub(super) types: &'a [u8],
    pub(super) strings: &'a [u8],
}

/// Returns the sections that the header describes.
pub(super) fn sections(data: &[u8]) -> Result<Sections<'_>, BtfError> {
    if !data.starts_with(&MAGIC.to_le_bytes()) {
        return Err(BtfError::Malformed(0));
    }
    let part = |field: usize| {
        let start = u32_at(data, 4)?.checked_add(u32_at(data, field)?)?;
        let start = usize::try_from(start).ok()?;
        let len = usize::try_from(u32_at(data, field + 4)?).ok()?;
        data.get(start..start.checked_add(len)?)
    };
    Ok(Sections {
        types: part(8).ok_or(BtfError::Malformed(8))?,
        strings: part(16).ok_or(BtfError::Malformed(16))?,
    })
}

/// Returns the offset of each entry, and whether enumerations are marked as signed, as they are since 6.0.
pub(super) fn starts(types: &[u8]) -> Result<(Vec<u32>, bool), BtfError> {
    let mut starts = Vec::new();
    let mut signs = false;
    let mut at = 0;
    while at < types.len() {
        let entry = entry_at(types, at).ok_or(BtfError::Malformed(at))?;
        starts.push(u32::try_from(at).map_err(|_| BtfError::Malformed(at))?);
        signs |= entry.kind == kind::ENUM64 || entry.kind == kind::ENUM && entry.flag;
        at += FIXED + entry.rest.len();
    }
    Ok((starts, signs))
}

/// Returns the entry at offset `at`; `None` if it is not complete or of an unknown kind.
pub(super) fn entry_at(types: &[u8], at: usize) -> Option<Entry<'_>> {
    /// The last known kind. The length of entries of any later kind is unknown.
    const LAST: u32 = kind::ENUM64;

    let info = u32_at(types, at.checked_add(4)?)?;
    let vlen = usize::try_from(info & 0xffff).ok()?;
    let kind = info >> 24 & 0x1f;
    let extra = match kind {
        kind::INT | kind::VAR | kind::DECL_TAG => 4,
        kind::ARRAY => 12,
        kind::STRUCT | kind::UNION => MEMBER * vlen,
        kind::ENUM64 => ENUMERATOR_64 * vlen,
        kind::DATASEC => 12 * vlen,
        kind::ENUM => ENUMERATOR * vlen,
        kind::FUNC_PROTO => PARAMETER * vlen,
        1..=LAST => 0,
        _ => return None,
    };
    let rest = at.checked_add(FIXED)?;
    Some(Entry {
        name: u32_at(types, at)?,
        kind,
        flag: info >> 31 == 1,
        size_or_type: u32_at(types, at + 8)?,
        rest: types.get(rest..rest.checked_add(extra)?)?,
    })
}
