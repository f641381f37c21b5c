//! Types, found by id and by name.
//!
//! Invariants: parsing records only where each type begins. It builds nothing else, because only a handful of a
//! hundred thousand types is needed at every start (a general BTF crate takes eighty times as long to build its
//! maps). Names are indexed at the first look-up by name. Ids and offsets in the data are checked, and loops in it
//! are followed for a bounded number of steps. A module's types share the kernel's types, and continue their ids
//! and strings.

use std::fmt;
use std::sync::{Arc, OnceLock};

use memchr::memchr;

use super::error::BtfError;
use super::format::{self, Entry, kind};
use super::names::Names;
use crate::bytes::u32_at;

/// Maximum number of consecutive modifiers and typedefs, and of nested anonymous members, in case they form a loop.
pub(super) const DEEPEST: u32 = 16;
/// Length in bytes of the longest name (`KSYM_NAME_LEN`).
const LONGEST_NAME: usize = 512;
/// Names of integer types: in the compiler's output, and in C.
const INTEGERS: [(&str, &str); 7] = [
    ("long int", "long"),
    ("long unsigned int", "unsigned long"),
    ("short int", "short"),
    ("short unsigned int", "unsigned short"),
    ("long long int", "long long"),
    ("long long unsigned int", "unsigned long long"),
    ("__int128 unsigned", "unsigned __int128"),
];

/// The number of a type; meaningful only together with its [`Types`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TypeId(pub(super) u32);

impl TypeId {
    /// `void`.
    pub const VOID: Self = Self(0);
}

/// Type information of a kernel, or of one of its modules.
pub struct Types {
    types: Box<[u8]>,
    strings: Box<[u8]>,
    /// For each id from [`Self::first`] on, the offset in `types` at which the type begins.
    starts: Vec<u32>,
    /// Whether signed enumerations are marked as signed.
    pub(super) signs: bool,
    /// The types of the kernel, if these are a module's types.
    pub(super) base: Option<Arc<Types>>,
    /// The first id that is not one of the kernel's.
    first: u32,
    /// Offset of the first string that is not one of the kernel's.
    strings_from: u32,
    names: OnceLock<Names>,
}

impl fmt::Debug for Types {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Types")
            .field("types", &self.starts.len())
            .finish_non_exhaustive()
    }
}

impl Types {
    /// Parses the types in a `.BTF` section of a kernel.
    ///
    /// # Errors
    /// If the bytes violate the format.
    pub fn parse(data: &[u8]) -> Result<Self, BtfError> {
        Self::read(data, None)
    }

    /// Parses the types in a `.BTF` section of a module. They continue those of the module's kernel, `base`.
    ///
    /// # Errors
    /// If the bytes violate the format.
    pub fn split(base: Arc<Self>, data: &[u8]) -> Result<Self, BtfError> {
        Self::read(data, Some(base))
    }

    fn read(data: &[u8], base: Option<Arc<Self>>) -> Result<Self, BtfError> {
        let sections = format::sections(data)?;
        let (starts, signs) = format::starts(sections.types)?;
        let too_much = || BtfError::Malformed(0);
        let (mut first, mut strings_from) = (1, 0);
        if let Some(base) = &base {
            first = base.end().ok_or_else(too_much)?;
            let strings = u32::try_from(base.strings.len()).ok();
            strings_from = strings
                .and_then(|len| base.strings_from.checked_add(len))
                .ok_or_else(too_much)?;
        }
        Ok(Self {
            types: sections.types.into(),
            strings: sections.strings.into(),
            starts,
            signs: signs || base.as_ref().is_some_and(|base| base.signs),
            base,
            first,
            strings_from,
            names: OnceLock::new(),
        })
    }

    /// Returns the id after the last type.
    fn end(&self) -> Option<u32> {
        let own = u32::try_from(self.starts.len()).ok()?;
        self.first.checked_add(own)
    }

    /// Returns the ids of all types. For a module, those of its kernel come first.
    pub fn ids(&self) -> impl Iterator<Item = TypeId> {
        (1..self.end().unwrap_or(u32::MAX)).map(TypeId)
    }

    /// Strips typedefs and modifiers from a type. `None` if the type does not exist, or has too many of either.
    #[must_use]
    pub fn resolve(&self, mut id: TypeId) -> Option<TypeId> {
        for _ in 0..=DEEPEST {
            if id == TypeId::VOID {
                return Some(id);
            }
            let entry = self.entry(id)?;
            match entry.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = TypeId(entry.size_or_type);
                }
                _ => return Some(id),
            }
        }
        None
    }

    /// Returns the entry of a type, after stripping its typedefs and modifiers.
    pub(super) fn resolved(&self, id: TypeId) -> Option<Entry<'_>> {
        self.entry(self.resolve(id)?)
    }

    /// Returns the type to which a pointer points; `None` if `id` is not a pointer.
    #[must_use]
    pub fn pointee(&self, id: TypeId) -> Option<TypeId> {
        let entry = self.resolved(id)?;
        (entry.kind == kind::PTR).then_some(TypeId(entry.size_or_type))
    }

    /// Returns the size in bytes of a value of a type; for an array, that of all elements together.
    #[must_use]
    pub fn size(&self, id: TypeId) -> Option<u64> {
        let mut id = id;
        let mut count = 1_u64;
        for _ in 0..=DEEPEST {
            let entry = self.resolved(id)?;
            let size = match entry.kind {
                kind::INT
                | kind::FLOAT
                | kind::STRUCT
                | kind::UNION
                | kind::ENUM
                | kind::ENUM64 => u64::from(entry.size_or_type),
                kind::PTR => 8,
                kind::ARRAY => {
                    count = count.checked_mul(u64::from(u32_at(entry.rest, 8)?))?;
                    id = TypeId(u32_at(entry.rest, 0)?);
                    continue;
                }
                _ => return None,
            };
            return size.checked_mul(count);
        }
        None
    }

    /// Returns the own name of a type as C writes it, without `struct` and the like; empty if the type has no name.
    #[must_use]
    pub fn own_name(&self, id: TypeId) -> &str {
        let Some(entry) = self.entry(id) else {
            return "";
        };
        let name = self.string(entry.name);
        let mut written = INTEGERS.iter();
        match written.find(|(known, _)| entry.kind == kind::INT && *known == name) {
            Some((_, written)) => written,
            None => name,
        }
    }

    /// Returns the types for which `name` stands: `struct NAME`, `union NAME`, `enum NAME`, a typedef or an
    /// integer. Several types may share a name. Forward declarations count only if there is no other type of that
    /// name.
    #[must_use]
    pub fn find(&self, name: &str) -> Vec<TypeId> {
        let words: Vec<_> = name.split_ascii_whitespace().collect();
        let (kinds, forward, name): (&[u32], _, _) = match words[..] {
            ["struct", name] => (&[kind::STRUCT], Some(false), name.to_owned()),
            ["union", name] => (&[kind::UNION], Some(true), name.to_owned()),
            ["enum", name] => (&[kind::ENUM, kind::ENUM64], None, name.to_owned()),
            _ => (
                &[kind::TYPEDEF, kind::INT, kind::FLOAT],
                None,
                words.join(" "),
            ),
        };
        let compilers = INTEGERS.iter().find(|(_, written)| *written == name);
        let compilers = compilers.map(|(compilers, _)| *compilers);
        let named = |wanted: &dyn Fn(&Entry<'_>) -> bool| -> Vec<TypeId> {
            [Some(name.as_str()), compilers]
                .into_iter()
                .flatten()
                .flat_map(|name| self.named(name))
                .filter(|id| self.entry(*id).is_some_and(|entry| wanted(&entry)))
                .collect()
        };
        let found = named(&|entry| kinds.contains(&entry.kind));
        if !found.is_empty() {
            return found;
        }
        named(&|entry| entry.kind == kind::FWD && Some(entry.flag) == forward)
    }

    /// Returns all types and functions called exactly `name`. For a module, those of its kernel come first.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = TypeId> + 'a {
        let base = self.base.as_deref();
        let of_base = base.into_iter().flat_map(move |base| base.own_named(name));
        of_base.chain(self.own_named(name))
    }

    /// Returns the types and functions called exactly `name`, without those of `base`.
    pub(super) fn own_named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = TypeId> + use<'a> {
        let names = self.names.get_or_init(|| {
            let own = (self.first..).zip(&self.starts).filter_map(|(id, _)| {
                let entry = self.entry(TypeId(id))?;
                let wanted = !matches!(
                    entry.kind,
                    kind::VAR | kind::DATASEC | kind::DECL_TAG | kind::TYPE_TAG
                );
                let name = if wanted { self.string(entry.name) } else { "" };
                (!name.is_empty()).then_some((name, id))
            });
            Names::new(own)
        });
        names.candidates(name).map(TypeId).filter(move |id| {
            self.entry(*id)
                .is_some_and(|entry| self.string(entry.name) == name)
        })
    }

    pub(super) fn entry(&self, id: TypeId) -> Option<Entry<'_>> {
        let Some(index) = id.0.checked_sub(self.first) else {
            return self.base.as_ref()?.entry(id);
        };
        let start = self.starts.get(usize::try_from(index).ok()?)?;
        format::entry_at(&self.types, usize::try_from(*start).ok()?)
    }

    /// Returns whether the string at offset `name` is `wanted`.
    pub(super) fn is_named(&self, name: u32, wanted: &str) -> bool {
        self.bytes(name)
            .and_then(|bytes| bytes.strip_prefix(wanted.as_bytes()))
            .is_some_and(|rest| rest.first() == Some(&0))
    }

    /// Returns the string at offset `at`; empty if there is none, or if it cannot be a name.
    pub(super) fn string(&self, at: u32) -> &str {
        let Some(bytes) = self.bytes(at) else {
            return "";
        };
        let bytes = bytes.get(..LONGEST_NAME).unwrap_or(bytes);
        let name = memchr(0, bytes).and_then(|end| bytes.get(..end));
        name.and_then(|name| str::from_utf8(name).ok())
            .unwrap_or_default()
    }

    /// Returns the bytes from offset `at` to the end of the strings.
    fn bytes(&self, at: u32) -> Option<&[u8]> {
        match at.checked_sub(self.strings_from) {
            Some(at) => self.strings.get(usize::try_from(at).ok()?..),
            None => self.base.as_ref()?.bytes(at),
        }
    }
}
