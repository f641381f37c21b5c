//! Writes types as in C.
//!
//! Invariants: the text is bounded in length and in nesting, even if types form loops. `...` stands for omitted
//! parts.

use gimli::{AttributeValue, UnitOffset, constants as dw};

use super::error::DebugError;
use super::info::{Entry, Reader, Unit};

/// Maximum number of consecutive pointers, arrays and modifiers, in case they form a loop.
pub(super) const MOST_STEPS: usize = 32;
/// Maximum depth of nested parameter lists, in case they form a loop.
const DEEPEST: usize = 3;
/// Maximum number of parameters, and of dimensions of an array.
const MOST_CHILDREN: usize = 32;
/// Approximate maximum length of a declaration, in bytes.
const LONGEST: usize = 1 << 10;
/// Stands for omitted parts.
const LEFT_OUT: &str = "...";

/// Returns the offset of the entry that an attribute refers to; `None` if the entry is not in the same unit.
pub(super) fn reference(value: Option<AttributeValue<Reader<'_>>>) -> Option<UnitOffset> {
    match value {
        Some(AttributeValue::UnitRef(at)) => Some(at),
        _ => None,
    }
}

impl<'f> Unit<'_, 'f> {
    /// Writes the declaration of a variable `name` of type `ty` as in C: `char name[16]`. An unknown type is `?`.
    pub(super) fn declaration(
        &self,
        ty: Option<UnitOffset>,
        name: &str,
    ) -> Result<String, DebugError> {
        match ty {
            Some(ty) => self.declare(Some(ty), name.to_owned(), DEEPEST),
            None => Ok(joined("?", name)),
        }
    }

    fn declare(
        &self,
        mut ty: Option<UnitOffset>,
        mut inner: String,
        depth: usize,
    ) -> Result<String, DebugError> {
        let mut qualifiers = String::new();
        for _ in 0..MOST_STEPS {
            if inner.len() > LONGEST {
                break;
            }
            let Some(at) = ty else {
                return Ok(joined(&joined(&qualifiers, "void"), &inner));
            };
            let entry = self.entry(at)?;
            let to = reference(entry.attr_value(dw::DW_AT_type));
            match entry.tag() {
                dw::DW_TAG_const_type => qualifiers = joined(&qualifiers, "const"),
                dw::DW_TAG_volatile_type => qualifiers = joined(&qualifiers, "volatile"),
                dw::DW_TAG_restrict_type => qualifiers = joined(&qualifiers, "restrict"),
                dw::DW_TAG_atomic_type => qualifiers = joined(&qualifiers, "_Atomic"),
                dw::DW_TAG_pointer_type => {
                    inner = format!("*{}", joined(&qualifiers, &inner));
                    qualifiers.clear();
                    if self.has_suffix(to)? {
                        inner = format!("({inner})");
                    }
                }
                dw::DW_TAG_array_type => {
                    for count in self.dimensions(at)? {
                        let count = count.map(|count| count.to_string()).unwrap_or_default();
                        inner.push_str(&format!("[{count}]"));
                    }
                }
                dw::DW_TAG_subroutine_type => {
                    let parameters = self.parameters(at, depth)?;
                    inner.push_str(&format!("({parameters})"));
                }
                _ => {
                    let name = self.own_name(&entry);
                    return Ok(joined(&joined(&qualifiers, &name), &inner));
                }
            }
            ty = to;
        }
        Ok(joined(LEFT_OUT, &inner))
    }

    /// Returns the name of a type that is not derived from another type, with its keyword (`struct`, `union` or
    /// `enum`) if it has one.
    fn own_name(&self, entry: &Entry<'f>) -> String {
        let name = entry.attr_value(dw::DW_AT_name);
        let name = name.and_then(|name| self.text(name));
        let name = name.filter(|name| !name.is_empty());
        let name = name.map(|name| String::from_utf8_lossy(&name[..name.len().min(LONGEST)]));
        let keyword = match entry.tag() {
            dw::DW_TAG_structure_type => "struct",
            dw::DW_TAG_union_type => "union",
            dw::DW_TAG_enumeration_type => "enum",
            _ => return name.map_or_else(|| "?".to_owned(), |name| name.into_owned()),
        };
        match name {
            Some(name) => format!("{keyword} {name}"),
            None => format!("{keyword} {{{LEFT_OUT}}}"),
        }
    }

    /// Returns whether C writes a part of the type after the name of the variable, so that a pointer to the type
    /// needs parentheses.
    fn has_suffix(&self, ty: Option<UnitOffset>) -> Result<bool, DebugError> {
        let Some(ty) = ty else { return Ok(false) };
        let tag = self.entry(ty)?.tag();
        Ok([dw::DW_TAG_array_type, dw::DW_TAG_subroutine_type].contains(&tag))
    }

    /// Calls `each` for the children of the entry at `at`. Returns the results that are not `None`; stops when
    /// there are `most` of them.
    pub(super) fn children<T>(
        &self,
        at: UnitOffset,
        most: usize,
        mut each: impl FnMut(&Entry<'f>) -> Option<T>,
    ) -> Result<Vec<T>, DebugError> {
        let wrong = |source| self.damaged(".debug_info", source);
        let mut entries = self.own.entries_raw(Some(at)).map_err(wrong)?;
        let mut entry = Entry::null();
        let mut found = Vec::new();
        loop {
            let depth = entries.next_depth();
            let is_entry = entries.read_entry(&mut entry).map_err(wrong)?;
            self.info.budget.spend(entry.attrs().len() + 1)?;
            if depth == 1 && is_entry {
                found.extend(each(&entry));
            }
            if entries.next_depth() <= 0 || entries.is_empty() || found.len() == most {
                return Ok(found);
            }
        }
    }

    /// Returns the length of each dimension of an array; `None` for an unknown length.
    pub(super) fn dimensions(&self, at: UnitOffset) -> Result<Vec<Option<u64>>, DebugError> {
        self.children(at, MOST_CHILDREN, |entry| {
            let number = |name| entry.attr(name).and_then(gimli::Attribute::udata_value);
            let last = number(dw::DW_AT_upper_bound);
            let count = number(dw::DW_AT_count).or(last.and_then(|last| last.checked_add(1)));
            (entry.tag() == dw::DW_TAG_subrange_type).then_some(count)
        })
    }

    fn parameters(&self, at: UnitOffset, depth: usize) -> Result<String, DebugError> {
        let Some(depth) = depth.checked_sub(1) else {
            return Ok(LEFT_OUT.to_owned());
        };
        let types = self.children(at, MOST_CHILDREN, |entry| match entry.tag() {
            dw::DW_TAG_formal_parameter => Some(Some(reference(entry.attr_value(dw::DW_AT_type)))),
            dw::DW_TAG_unspecified_parameters => Some(None),
            _ => None,
        })?;
        let mut parameters: Vec<String> = Vec::new();
        for ty in types {
            if parameters.iter().map(String::len).sum::<usize>() > LONGEST {
                break;
            }
            parameters.push(match ty {
                Some(ty) => self.declare(ty, String::new(), depth)?,
                None => LEFT_OUT.to_owned(),
            });
        }
        Ok(match parameters.is_empty() {
            true => "void".to_owned(),
            false => parameters.join(", "),
        })
    }
}

/// Joins two words with a blank.
fn joined(left: &str, right: &str) -> String {
    match left.is_empty() || right.is_empty() {
        true => format!("{left}{right}"),
        false => format!("{left} {right}"),
    }
}
