//! Lookup of types, and the shapes in which values are shown.

use hvprobe_linux::types::{Field, Kind, Limits, TypeId, Types};
use hvprobe_spec::ParseError;
use hvprobe_spec::fetch::{Element, Shown, words};
use hvprobe_spec::shape::{Shape, ShapeKind};

use super::refused::refused;

/// Limits of the shape of an argument, so that the argument fits a line.
const LIMITS: Limits = Limits {
    depth: 4,
    members: 128,
    values: 256,
};

/// Returns the structure or union `name`.
pub(super) fn structure(types: &Types, column: usize, name: &str) -> Result<TypeId, ParseError> {
    let found = types.named(name).find(|id| is_structure(types, *id));
    found.ok_or_else(|| refused(column, format!("the kernel has no structure `{name}`")))
}

/// Returns whether `ty` is a structure or union, or an alias of one.
pub(super) fn is_structure(types: &Types, ty: TypeId) -> bool {
    let kind = types.resolve(ty).and_then(|ty| types.kind(ty));
    matches!(kind, Some(Kind::Struct { .. }))
}

/// Returns the offset of `path`, member names separated by `.`, in the structure `of`.
pub(super) fn offset(
    types: &Types,
    column: usize,
    of: TypeId,
    path: &str,
) -> Result<u64, ParseError> {
    let mut offset = 0_u64;
    let mut of = of;
    for name in path.split('.') {
        let member = types.member(of, name).filter(|it| it.width.is_none());
        let member = member.ok_or_else(|| refused(column, words::NO_BTF_FIELD))?;
        offset = offset.wrapping_add(member.bit_offset / 8);
        of = member.ty;
    }
    Ok(offset)
}

/// Returns the byte offset of a member in its structure and, for a bit field, the range of its bits there.
pub(super) fn within(types: &Types, member: &Field<'_>) -> (u64, Option<(u64, u8)>) {
    let Some(width) = member.width else {
        return (member.bit_offset / 8, None);
    };
    let size = types.size(member.ty).filter(|size| *size > 0).unwrap_or(1) * 8;
    // Use the unit that the compiler reads, unless the bit field crosses its boundary.
    let aligned = member.bit_offset / size * size;
    let first = member.bit_offset - aligned;
    if first + u64::from(width) <= size {
        (aligned / 8, Some((first, width)))
    } else {
        (member.bit_offset / 8, Some((member.bit_offset % 8, width)))
    }
}

/// Returns the shape of values of a type of the kernel.
pub(super) fn shape(types: &Types, ty: TypeId) -> Option<Shape> {
    types.shape(ty, LIMITS)
}

/// Returns a shape with the type name `name`.
pub(super) fn named(name: &str, size: u32, kind: ShapeKind) -> Shape {
    let name = name.to_owned();
    Shape { name, size, kind }
}

/// Returns the shape of a value without a known type.
pub(super) fn word() -> Shape {
    named("x64", 8, ShapeKind::Hex)
}

/// Returns the shape of a text.
pub(super) fn text() -> Shape {
    named("string", 0, ShapeKind::String)
}

/// Returns the shape of a value with a type from the definition.
pub(super) fn element(element: Element, name: String) -> Shape {
    let bytes = |bits: u8| u32::from(bits) / 8;
    let (size, kind) = match element {
        Element::Integer { shown, bits } => {
            let kind = match shown {
                Shown::Unsigned => ShapeKind::Unsigned,
                Shown::Signed => ShapeKind::Signed,
                Shown::Hex => ShapeKind::Hex,
            };
            (bytes(bits), kind)
        }
        // The size is that of a value without a known type.
        Element::Own { .. } => (8, ShapeKind::Signed),
        Element::Char => (1, ShapeKind::Char),
        Element::Bitfield { container, .. } => (bytes(container), ShapeKind::Unsigned),
        Element::Symbol | Element::SymbolString => (8, ShapeKind::Symbol),
        Element::String | Element::UserString | Element::DentryName | Element::FileName => {
            return text();
        }
    };
    Shape { name, size, kind }
}

/// Returns the number of bits of `ty`, and whether it is signed, if it is an integer in C.
pub(super) fn integer(types: &Types, ty: TypeId) -> Option<(u8, bool)> {
    let Shape { size, kind, .. } = shape(types, ty)?;
    let is_signed = match kind {
        ShapeKind::Signed | ShapeKind::Char => true,
        ShapeKind::Unsigned | ShapeKind::Hex | ShapeKind::Bool => false,
        ShapeKind::Enum { signed, .. } => signed,
        _ => return None,
    };
    let bits = u8::try_from(size.checked_mul(8)?).ok()?;
    matches!(bits, 8 | 16 | 32 | 64).then_some((bits, is_signed))
}

/// Returns where the characters are if `ty` is a pointer to characters, or an array of them; a text can be read
/// from either.
pub(super) fn characters(types: &Types, ty: TypeId) -> Option<Characters> {
    // The same test as the kernel's (`btf_type_is_char_ptr` in kernel/trace/trace_probe.c).
    let is_char = |id| {
        let kind = types.resolve(id).and_then(|id| types.kind(id));
        matches!(kind, Some(Kind::Int(_))) && types.size(id) == Some(1)
    };
    match types.kind(types.resolve(ty)?)? {
        Kind::Pointer(to) if is_char(to) => Some(Characters::Behind),
        Kind::Array { element, .. } if is_char(element) => Some(Characters::Here),
        _ => None,
    }
}

/// Maximum number of qualifiers (`volatile`, `restrict` and tags) to look through. No type has as many.
const QUALIFIERS: usize = 8;

/// Returns whether `ty` is a pointer to a constant type.
pub(super) fn is_constant_behind(types: &Types, ty: TypeId) -> bool {
    let mut to = types.pointee(ty);
    for _ in 0..QUALIFIERS {
        match to.and_then(|to| types.kind(to)) {
            Some(Kind::Const(_)) => return true,
            Some(Kind::Volatile(next) | Kind::Restrict(next) | Kind::Tag(next)) => to = Some(next),
            _ => return false,
        }
    }
    false
}

/// Returns whether `ty` is a type that C uses to count bytes: an unsigned integer of 64 bits like `size_t`, under
/// any name.
pub(super) fn is_size(types: &Types, ty: TypeId) -> bool {
    let whole = types.resolve(ty);
    let kind = whole.and_then(|ty| types.kind(ty));
    matches!(kind, Some(Kind::Int(int)) if !int.signed) && types.size(ty) == Some(8)
}

/// Location of the characters of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Characters {
    /// In the value itself.
    Here,
    /// At the address that the value holds.
    Behind,
}
