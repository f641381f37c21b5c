//! Parser of the types of fetch arguments.

use super::number::{leading, unsigned};
use super::types::{ARRAY_MAX, Element, Shown, TypeName};
use super::words;
use crate::column::Column;
use crate::parse_error::{ParseError, error};

/// Splits the text of a type into its name and its number of elements. `text` begins at `column`, directly after
/// the `:` of the argument.
///
/// The numbers of a bit field are not checked yet: the kernel checks them after it has parsed the expression.
pub(super) fn read_type<'a>(column: usize, text: &'a str) -> Result<Read<'a>, ParseError> {
    let (name, count) = match text.split_once('[') {
        None => (text, None),
        Some((name, rest)) => (name, Some(count(column + name.len() + 1, rest)?)),
    };
    Ok(Read {
        column,
        name,
        count,
    })
}

/// Parts of a type's text, before the lookup.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read<'a> {
    pub(super) column: usize,
    pub(super) name: &'a str,
    pub(super) count: Option<u8>,
}

/// Parses the number of elements of an array: `N]`.
fn count(column: usize, text: &str) -> Result<u8, ParseError> {
    let Some((number, rest)) = text.split_once(']') else {
        return error(column + text.len(), words::ARRAY_NO_CLOSE);
    };
    if !rest.is_empty() {
        return error(column + number.len() + 1, words::BAD_ARRAY_SUFFIX);
    }
    match unsigned(number).and_then(|count| u32::try_from(count).ok()) {
        None | Some(0) => error(column, words::BAD_ARRAY_NUM),
        Some(count) => match u8::try_from(count) {
            Ok(count) if count <= ARRAY_MAX => Ok(count),
            _ => error(
                column,
                format!("{}; at most {ARRAY_MAX} elements", words::ARRAY_TOO_BIG),
            ),
        },
    }
}

impl Read<'_> {
    /// Looks up the type. The numbers of a bit field are left to [`bit_field`](Self::bit_field).
    pub(super) fn look_up(&self) -> Result<Found, ParseError> {
        let found = match self.name {
            "u" | "s" | "x" | "d" if self.count.is_none() => Element::Own {
                shown: shown(self.name),
            },
            "char" => Element::Char,
            "string" => Element::String,
            "ustring" => Element::UserString,
            "symbol" => Element::Symbol,
            "symstr" => Element::SymbolString,
            // The kernel replaces these before it examines anything else, but only at the end of an argument, so no
            // number of elements can follow.
            "%pd" if self.count.is_none() => Element::DentryName,
            "%pD" if self.count.is_none() => Element::FileName,
            name => match (name.strip_prefix('b'), integer(name)) {
                (Some(bits), _) => match bits.split_once('/').map(|(_, size)| unsigned(size)) {
                    Some(Some(container @ (8 | 16 | 32 | 64))) => {
                        return Ok(Found::Bits { container });
                    }
                    _ => return self.unknown(),
                },
                (None, Some(integer)) => integer,
                (None, None) => return self.unknown(),
            },
        };
        Ok(Found::Element(found))
    }

    fn unknown<T>(&self) -> Result<T, ParseError> {
        let help = match self.name {
            "" => "; leave out the `:` or name a type",
            "bool" | "int" | "unsigned" | "long" | "short" | "void" | "size_t" | "pid_t" => {
                "; types are u8 to u64, s8 to s64, x8 to x64, u, s, x, d, char, string, ustring, symbol, symstr, \
                 bWIDTH@OFFSET/SIZE, %pd and %pD"
            }
            _ => "",
        };
        error(self.column, format!("{}{help}", words::BAD_TYPE))
    }

    /// Parses a bit field, `bWIDTH@OFFSET/SIZE`, with a size of `container` bits.
    pub(super) fn bit_field(&self, container: u64) -> Result<Element, ParseError> {
        let numbers = || {
            let (width, rest) = leading(self.name.strip_prefix('b')?)?;
            let (offset, rest) = leading(rest.strip_prefix('@')?)?;
            (width > 0 && rest.starts_with('/') && width.checked_add(offset)? <= container)
                .then_some((width, offset))
        };
        let small = |number: u64| u8::try_from(number).ok();
        numbers()
            .and_then(|(width, offset)| {
                Some(Element::Bitfield {
                    width: small(width)?,
                    offset: small(offset)?,
                    container: small(container)?,
                })
            })
            .map_or_else(
                || {
                    error(
                        self.column,
                        format!(
                            "{}; write bWIDTH@OFFSET/SIZE, within SIZE bits",
                            words::BAD_BITFIELD
                        ),
                    )
                },
                Ok,
            )
    }

    /// Returns the type `element`, or an array of it.
    pub(super) fn named(&self, element: Element) -> TypeName {
        TypeName {
            column: Column(self.column),
            element,
            count: self.count,
        }
    }
}

/// Result of looking up a type's name.
#[derive(Clone, Copy, Debug)]
pub(super) enum Found {
    Element(Element),
    Bits { container: u64 },
}

fn integer(name: &str) -> Option<Element> {
    let (shown, bits) = name.split_at_checked(1)?;
    let shown = self::shown(shown)?;
    let bits = match bits {
        "8" => 8,
        "16" => 16,
        "32" => 32,
        "64" => 64,
        _ => return None,
    };
    Some(Element::Integer { shown, bits })
}

fn shown(letter: &str) -> Option<Shown> {
    match letter {
        "u" => Some(Shown::Unsigned),
        "s" => Some(Shown::Signed),
        "x" => Some(Shown::Hex),
        _ => None,
    }
}
