//! Types that arguments are looked up in and shown as.

use hvprobe_linux::types::{Field, Kind, Limits, TypeId, Types};
use hvprobe_spec::ParseError;
use hvprobe_spec::fetch::{Element, Shown, words};
use hvprobe_spec::shape::{Shape, ShapeKind};

use super::refused::refused;

/// How much of its type an argument tells: what a line can show.
const LIMITS: Limits = Limits {
    depth: 4,
    members: 128,
    values: 256,
};

/// The structure or union `name`.
pub(super) fn structure(types: &Types, column: usize, name: &str) -> Result<TypeId, ParseError> {
    let found = types.named(name).find(|id| is_structure(types, *id));
    found.ok_or_else(|| refused(column, format!("the kernel has no structure `{name}`")))
}

/// Whether `ty` is a structure or union, by whatever name.
pub(super) fn is_structure(types: &Types, ty: TypeId) -> bool {
    let kind = types.resolve(ty).and_then(|ty| types.kind(ty));
    matches!(kind, Some(Kind::Struct { .. }))
}

/// The offset of `path`, members with `.` between them, in the structure `of`.
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

/// Where in its structure the bytes of a member begin and, of a bit field, which of their bits it has.
pub(super) fn within(types: &Types, member: &Field<'_>) -> (u64, Option<(u64, u8)>) {
    let Some(width) = member.width else {
        return (member.bit_offset / 8, None);
    };
    let size = types.size(member.ty).filter(|size| *size > 0).unwrap_or(1) * 8;
    // As the compiler reads it, unless it lies across that.
    let aligned = member.bit_offset / size * size;
    let first = member.bit_offset - aligned;
    if first + u64::from(width) <= size {
        (aligned / 8, Some((first, width)))
    } else {
        (member.bit_offset / 8, Some((member.bit_offset % 8, width)))
    }
}

/// What values of a type of the kernel's are shown as.
pub(super) fn shape(types: &Types, ty: TypeId) -> Option<Shape> {
    types.shape(ty, LIMITS)
}

/// The shape of a type that is called `name`.
pub(super) fn named(name: &str, size: u32, kind: ShapeKind) -> Shape {
    let name = name.to_owned();
    Shape { name, size, kind }
}

/// What is not said to be anything.
pub(super) fn word() -> Shape {
    named("x64", 8, ShapeKind::Hex)
}

/// A text.
pub(super) fn text() -> Shape {
    named("string", 0, ShapeKind::String)
}

/// What a value of a type that a definition names is shown as.
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
        // As one of no type that is known.
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

/// How many bits `ty` has and whether one is a sign, if it is an integer of C.
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

/// Whether `ty` is a pointer to characters, or an array of them: what a text can be read of.
pub(super) fn characters(types: &Types, ty: TypeId) -> Option<Characters> {
    // As the kernel tells (`btf_type_is_char_ptr` in kernel/trace/trace_probe.c).
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

/// More than a type has of them: `volatile`, `restrict` and tags.
const QUALIFIERS: usize = 8;

/// Whether `ty` is a pointer to something that is constant.
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

/// Whether `ty` is what C counts bytes in: 64 bits without a sign, as `size_t`, by whatever name.
pub(super) fn is_size(types: &Types, ty: TypeId) -> bool {
    let whole = types.resolve(ty);
    let kind = whole.and_then(|ty| types.kind(ty));
    matches!(kind, Some(Kind::Int(int)) if !int.signed) && types.size(ty) == Some(8)
}

/// Where the characters of a text are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Characters {
    /// Where the value is.
    Here,
    /// Where it points to.
    Behind,
}
