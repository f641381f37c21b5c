//! Types as C writes them, and what numbers of them are shown as.
//!
//! What is kept true: a text is bounded in length and in the depth of what is in it, whatever the types say;
//! where something is left out, there is `...`.

use gimli::{AttributeValue, UnitOffset, constants as dw};
use hvprobe_spec::fetch::{Element, Shown as Digits};

use super::error::DebugError;
use super::info::{DebugInfo, Entry, Reader, Unit};

/// Pointers, arrays and modifiers in a row, before it is a loop.
const MOST_STEPS: usize = 32;
/// Parameters of parameters, before it is a loop.
const DEEPEST: usize = 3;
/// Parameters, or dimensions of an array.
const MOST_CHILDREN: usize = 32;
/// Bytes of a declaration, or so.
const LONGEST: usize = 1 << 10;
/// What is left out.
const LEFT_OUT: &str = "...";

/// How a variable's value is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// As a number of this type.
    Number(Element),
    /// As no number: it has several values, or none that is known.
    Whole,
}

/// An entry of the same unit that an attribute names.
pub(super) fn reference(value: Option<AttributeValue<Reader<'_>>>) -> Option<UnitOffset> {
    match value {
        Some(AttributeValue::UnitRef(at)) => Some(at),
        _ => None,
    }
}

impl<'f> DebugInfo<'f> {
    /// A variable `name` of a type, as C declares it: `char name[16]`. A type that is not known is `?`.
    pub(super) fn declaration(
        &self,
        index: usize,
        unit: &Unit<'f>,
        ty: Option<UnitOffset>,
        name: &str,
    ) -> Result<String, DebugError> {
        match ty {
            Some(ty) => self.declare(index, unit, Some(ty), name.to_owned(), DEEPEST),
            None => Ok(joined("?", name)),
        }
    }

    fn declare(
        &self,
        index: usize,
        unit: &Unit<'f>,
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
            let entry = self.entry(index, unit, at)?;
            let to = reference(entry.attr_value(dw::DW_AT_type));
            let qualifier = match entry.tag() {
                dw::DW_TAG_const_type => Some("const"),
                dw::DW_TAG_volatile_type => Some("volatile"),
                dw::DW_TAG_restrict_type => Some("restrict"),
                dw::DW_TAG_atomic_type => Some("_Atomic"),
                _ => None,
            };
            match entry.tag() {
                dw::DW_TAG_pointer_type => {
                    inner = format!("*{}", joined(&qualifiers, &inner));
                    qualifiers.clear();
                    if self.has_suffix(index, unit, to)? {
                        inner = format!("({inner})");
                    }
                }
                dw::DW_TAG_array_type => {
                    for count in self.dimensions(index, unit, at)? {
                        let count = count.map(|count| count.to_string()).unwrap_or_default();
                        inner.push_str(&format!("[{count}]"));
                    }
                }
                dw::DW_TAG_subroutine_type => {
                    let parameters = self.parameters(index, unit, at, depth)?;
                    inner.push_str(&format!("({parameters})"));
                }
                _ if qualifier.is_some() => {
                    qualifiers = joined(&qualifiers, qualifier.unwrap_or_default());
                }
                _ => {
                    let name = self.own_name(unit, &entry);
                    return Ok(joined(&joined(&qualifiers, &name), &inner));
                }
            }
            ty = to;
        }
        Ok(joined(LEFT_OUT, &inner))
    }

    /// The name of a type that is made of no other, with its keyword.
    fn own_name(&self, unit: &Unit<'f>, entry: &Entry<'f>) -> String {
        let name = entry.attr_value(dw::DW_AT_name);
        let name = name.and_then(|name| self.text(unit, name));
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

    /// Whether what a pointer points to is written around it.
    fn has_suffix(
        &self,
        index: usize,
        unit: &Unit<'f>,
        ty: Option<UnitOffset>,
    ) -> Result<bool, DebugError> {
        let Some(ty) = ty else { return Ok(false) };
        let tag = self.entry(index, unit, ty)?.tag();
        Ok([dw::DW_TAG_array_type, dw::DW_TAG_subroutine_type].contains(&tag))
    }

    /// The entries right below the one at `at`, each with what `each` makes of it.
    fn children<T>(
        &self,
        index: usize,
        unit: &Unit<'f>,
        at: UnitOffset,
        mut each: impl FnMut(&Entry<'f>) -> Option<T>,
    ) -> Result<Vec<T>, DebugError> {
        let wrong = |source| self.damaged(index, ".debug_info", source);
        let mut entries = unit.entries_raw(Some(at)).map_err(wrong)?;
        let mut entry = Entry::null();
        let mut found = Vec::new();
        loop {
            let depth = entries.next_depth();
            let is_entry = entries.read_entry(&mut entry).map_err(wrong)?;
            self.budget.spend(entry.attrs().len() + 1)?;
            if depth == 1 && is_entry {
                found.extend(each(&entry));
            }
            if entries.next_depth() <= 0 || entries.is_empty() || found.len() == MOST_CHILDREN {
                return Ok(found);
            }
        }
    }

    fn dimensions(
        &self,
        index: usize,
        unit: &Unit<'f>,
        at: UnitOffset,
    ) -> Result<Vec<Option<u64>>, DebugError> {
        self.children(index, unit, at, |entry| {
            let number = |name| entry.attr(name).and_then(gimli::Attribute::udata_value);
            let last = number(dw::DW_AT_upper_bound);
            let count = number(dw::DW_AT_count).or(last.and_then(|last| last.checked_add(1)));
            (entry.tag() == dw::DW_TAG_subrange_type).then_some(count)
        })
    }

    fn parameters(
        &self,
        index: usize,
        unit: &Unit<'f>,
        at: UnitOffset,
        depth: usize,
    ) -> Result<String, DebugError> {
        let Some(depth) = depth.checked_sub(1) else {
            return Ok(LEFT_OUT.to_owned());
        };
        let types = self.children(index, unit, at, |entry| match entry.tag() {
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
                Some(ty) => self.declare(index, unit, ty, String::new(), depth)?,
                None => LEFT_OUT.to_owned(),
            });
        }
        Ok(match parameters.is_empty() {
            true => "void".to_owned(),
            false => parameters.join(", "),
        })
    }

    /// What a value of that type is shown as.
    pub(super) fn shown(
        &self,
        index: usize,
        unit: &Unit<'f>,
        mut ty: Option<UnitOffset>,
    ) -> Result<Shown, DebugError> {
        for _ in 0..MOST_STEPS {
            let Some(at) = ty else { break };
            let entry = self.entry(index, unit, at)?;
            let size = entry.attr(dw::DW_AT_byte_size);
            let size = size.and_then(gimli::Attribute::udata_value);
            let encoding = match entry.attr_value(dw::DW_AT_encoding) {
                Some(AttributeValue::Encoding(encoding)) => Some(encoding),
                _ => None,
            };
            let digits = match (entry.tag(), encoding) {
                (dw::DW_TAG_pointer_type, _) => {
                    return Ok(number(Digits::Hex, 8));
                }
                (
                    dw::DW_TAG_const_type
                    | dw::DW_TAG_volatile_type
                    | dw::DW_TAG_restrict_type
                    | dw::DW_TAG_atomic_type
                    | dw::DW_TAG_typedef,
                    _,
                ) => {
                    ty = reference(entry.attr_value(dw::DW_AT_type));
                    continue;
                }
                (_, Some(dw::DW_ATE_signed | dw::DW_ATE_signed_char)) => Digits::Signed,
                (_, Some(dw::DW_ATE_unsigned | dw::DW_ATE_unsigned_char | dw::DW_ATE_boolean))
                | (dw::DW_TAG_enumeration_type, None) => Digits::Unsigned,
                _ => break,
            };
            return Ok(size.map_or(Shown::Whole, |size| number(digits, size)));
        }
        Ok(Shown::Whole)
    }
}

/// A number of so many bytes.
fn number(shown: Digits, bytes: u64) -> Shown {
    let bits = match bytes {
        1 => 8,
        2 => 16,
        4 => 32,
        8 => 64,
        _ => return Shown::Whole,
    };
    Shown::Number(Element::Integer { shown, bits })
}

/// Words with a blank between them.
fn joined(left: &str, right: &str) -> String {
    match left.is_empty() || right.is_empty() {
        true => format!("{left}{right}"),
        false => format!("{left} {right}"),
    }
}
