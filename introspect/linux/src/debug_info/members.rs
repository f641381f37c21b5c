//! Follows a path from a variable to its members, elements and pointer targets.
//!
//! Invariant: a location is returned only for a member that exists, in a structure that is described. A step that
//! does not fit its type is an error that says so, never a guess.

use gimli::{UnitOffset, constants as dw};
use hvprobe_spec::fetch::Element;
use hvprobe_spec::perf_probe::Step;

use super::error::DebugError;
use super::info::{DebugInfo, Entry, Unit};
use super::location::Location;
use super::shown::Shown;
use super::typename::reference;
use super::variables::Variable;

/// Maximum number of members of one structure.
const MOST_MEMBERS: usize = 1 << 12;
/// Maximum number of levels in which a member is searched for: the structure, and unnamed structures nested in it.
const DEEPEST: usize = 8;
/// Maximum number of similar members that are suggested when the named one does not exist.
const MOST_NEAR: usize = 3;
/// Longest member name to suggest, in bytes.
const LONGEST_NEAR: usize = 128;

/// The value to which a path leads from a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// The location of that value.
    pub location: Location,
    /// How that value is shown.
    pub shown: Shown,
}

/// A member of a structure.
#[derive(Clone, Debug)]
struct Member {
    name: Option<Vec<u8>>,
    ty: Option<UnitOffset>,
    /// Offset in bytes from the start of the structure.
    offset: u64,
    /// First bit, relative to `offset`, and width of a bit field; `None` for other members.
    bits: Option<(u64, u64)>,
}

impl<'f> DebugInfo<'f> {
    /// Follows `path` from `variable`.
    ///
    /// # Errors
    /// If the path leads nowhere, or the debug information is damaged.
    pub fn select(&self, variable: &Variable, path: &[Step]) -> Result<Selected, DebugError> {
        self.budget.begin();
        let unit = self.unit(variable.unit)?;
        let mut ty = variable.ty;
        let mut location = variable.location.clone();
        let mut bits = None;
        let mut way = variable.name.clone();
        for step in path {
            let refused = |why: &str| DebugError::Member {
                at: way.clone(),
                why: why.to_owned(),
                near: Vec::new(),
            };
            if bits.is_some() {
                return Err(refused("is some bits of a number"));
            }
            let entry = unit.bare(ty)?;
            let entry = entry.ok_or_else(|| refused("has a type that is not described"))?;
            let to = reference(entry.attr_value(dw::DW_AT_type));
            let is_pointer = entry.tag() == dw::DW_TAG_pointer_type;
            match step {
                Step::Element(number) => {
                    if !is_pointer && entry.tag() != dw::DW_TAG_array_type {
                        return Err(refused("is neither an array nor a pointer"));
                    }
                    if !is_pointer && unit.dimensions(entry.offset())?.len() > 1 {
                        return Err(refused("is an array of arrays"));
                    }
                    let size = unit.size(to)?;
                    let offset = size.and_then(|size| size.checked_mul(*number));
                    let offset = offset.ok_or_else(|| refused("has elements of unknown size"))?;
                    location = moved(location, is_pointer, offset).map_err(|why| refused(&why))?;
                    ty = to;
                }
                Step::Member(name) | Step::Pointed(name) => {
                    let follows = matches!(step, Step::Pointed(_));
                    let structure = match (is_pointer, follows) {
                        (true, true) => unit.bare(to)?,
                        (false, false) => Some(entry),
                        (true, false) => {
                            return Err(refused("is a pointer: its members are behind `->`"));
                        }
                        (false, true) => {
                            return Err(refused("is no pointer: its members are behind `.`"));
                        }
                    };
                    let structure = structure.filter(is_structure);
                    let structure = structure.ok_or_else(|| refused("has no members"))?;
                    let member = unit.member(&structure, name, || format!("{way}{step}"))?;
                    location =
                        moved(location, is_pointer, member.offset).map_err(|why| refused(&why))?;
                    (ty, bits) = (member.ty, member.bits);
                }
            }
            way.push_str(&step.to_string());
        }
        let shown = match bits {
            None => unit.shown(ty)?,
            Some((first, width)) => {
                let bits = bitfield(first, width);
                Shown::Number(bits.ok_or(DebugError::Member {
                    at: way,
                    why: "has bits in more than 8 bytes".to_owned(),
                    near: Vec::new(),
                })?)
            }
        };
        Ok(Selected { location, shown })
    }
}

impl<'f> Unit<'_, 'f> {
    /// Finds the member `name` of a structure, or of an unnamed structure inside it. If there is none, the error
    /// has the path that `way` returns.
    fn member(
        &self,
        structure: &Entry<'f>,
        name: &str,
        way: impl FnOnce() -> String,
    ) -> Result<Member, DebugError> {
        let mut names = Vec::new();
        let mut level = vec![(structure.offset(), 0_u64)];
        for _ in 0..DEEPEST {
            let mut next = Vec::new();
            for (at, outer) in level {
                for member in self.members(at)? {
                    let offset = outer.saturating_add(member.offset);
                    match &member.name {
                        Some(own) if own == name.as_bytes() => {
                            return Ok(Member { offset, ..member });
                        }
                        // A name this long is not what was meant.
                        Some(own) if own.len() > LONGEST_NEAR => {}
                        Some(own) => names.push(String::from_utf8_lossy(own).into_owned()),
                        None => {
                            let inner = self.bare(member.ty)?;
                            next.extend(inner.filter(is_structure).map(|it| (it.offset(), offset)));
                        }
                    }
                }
            }
            level = next;
        }
        let is_declared = structure.attr(dw::DW_AT_declaration).is_some();
        names.sort_by_cached_key(|near| strsim::damerau_levenshtein(near, name));
        names.truncate(MOST_NEAR);
        Err(DebugError::Member {
            at: way(),
            why: match is_declared {
                true => "is not known: the structure is not described where this was compiled",
                false => "does not exist",
            }
            .to_owned(),
            near: names,
        })
    }

    fn members(&self, at: UnitOffset) -> Result<Vec<Member>, DebugError> {
        self.children(at, MOST_MEMBERS, |entry| {
            if entry.tag() != dw::DW_TAG_member {
                return None;
            }
            let number = |name| entry.attr(name).and_then(gimli::Attribute::udata_value);
            let name = entry.attr_value(dw::DW_AT_name);
            let offset = number(dw::DW_AT_data_member_location).unwrap_or(0);
            let width = number(dw::DW_AT_bit_size);
            let first = number(dw::DW_AT_data_bit_offset).or_else(|| {
                // DWARF 3 counts from the highest bit of the storage unit, a number of `bytes` bytes.
                let bytes = number(dw::DW_AT_byte_size)?;
                let from_top = number(dw::DW_AT_bit_offset)?.checked_add(width?)?;
                let low = bytes.checked_mul(8)?.checked_sub(from_top)?;
                offset.checked_mul(8)?.checked_add(low)
            });
            let bits = width.map(|width| (first.unwrap_or(0), width));
            Some(Member {
                name: name.and_then(|name| Some(self.text(name)?.to_vec())),
                ty: reference(entry.attr_value(dw::DW_AT_type)),
                offset: match bits {
                    Some((first, _)) => first / 8,
                    None => offset,
                },
                bits: bits.map(|(first, width)| (first % 8, width)),
            })
        })
    }
}

fn is_structure(entry: &Entry<'_>) -> bool {
    [dw::DW_TAG_structure_type, dw::DW_TAG_union_type].contains(&entry.tag())
}

/// Returns the location `offset` bytes after the start of the value at `location`. If that value is a pointer
/// (`is_pointer`), returns the location `offset` bytes after the address to which it points.
fn moved(location: Location, is_pointer: bool, offset: u64) -> Result<Location, String> {
    let offset = i32::try_from(offset).map_err(|_| "is too long")?;
    let offset = i64::from(offset);
    let why = match (location, is_pointer) {
        (Location::Fetch(mut fetch), true) => {
            fetch.offsets.push(offset);
            return Ok(Location::Fetch(fetch));
        }
        (Location::Fetch(fetch), false) if fetch.offsets.is_empty() => {
            "is in a register as a whole, whose parts are not read"
        }
        (location @ (Location::Fetch(_) | Location::Static(_)), false) => {
            return Ok(location.plus(offset));
        }
        (Location::Static(_), true) => "is a pointer in memory of its own, which is not followed",
        (Location::Constant(_), _) => "is a constant",
        (Location::Nowhere(why), _) => return Err(format!("is {why}")),
    };
    Err(why.to_owned())
}

/// Returns the type of the fetch argument for a bit field of `width` bits that begins at bit `first`. `None` if its
/// bits are not in the first 8 bytes.
fn bitfield(first: u64, width: u64) -> Option<Element> {
    let end = first.checked_add(width)?;
    let container = [8_u8, 16, 32, 64].into_iter();
    Some(Element::Bitfield {
        width: u8::try_from(width).ok().filter(|width| *width > 0)?,
        offset: u8::try_from(first).ok()?,
        container: container.into_iter().find(|bits| end <= u64::from(*bits))?,
    })
}
