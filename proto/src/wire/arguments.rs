//! The arguments of a probe, and their types, on the wire.

use crate::v1::{self, TypeKind, argument};
use hvprobe_spec::shape::{Enumerator, Member, Shape, ShapeKind};
use hvprobe_spec::{Argument, Source};

use super::enums::WireEnum as _;

/// Converts the description of an argument.
#[must_use]
pub fn to_wire(argument: &Argument) -> v1::Argument {
    v1::Argument {
        name: argument.name.clone(),
        source: Some(source(&argument.source)),
        bits: argument.bits.map(|bits| v1::Bits {
            offset: bits.offset.into(),
            width: bits.width.into(),
        }),
        r#type: Some(shape(&argument.shape)),
    }
}

fn source(source: &Source) -> argument::Source {
    match source {
        Source::Registers { registers, entry } => {
            let registers = registers.iter().map(|register| register.number());
            argument::Source::Registers(v1::ArgumentRegisters {
                registers: registers.collect(),
                entry: *entry,
            })
        }
        // There are far fewer than this can count.
        Source::Item(index) => argument::Source::Item(u32::try_from(*index).unwrap_or(u32::MAX)),
        Source::Constant(bytes) => argument::Source::Constant(bytes.clone()),
        Source::Common(common) => argument::Source::Field(common.number()),
    }
}

/// Converts a type.
#[must_use]
pub fn shape(of: &Shape) -> v1::Type {
    let mut wire = v1::Type {
        name: of.name.clone(),
        size: of.size,
        ..v1::Type::default()
    };
    let kind = match &of.kind {
        ShapeKind::Unsigned => TypeKind::Unsigned,
        ShapeKind::Signed => TypeKind::Signed,
        ShapeKind::Hex => TypeKind::Hex,
        ShapeKind::Char => TypeKind::Char,
        ShapeKind::Bool => TypeKind::Bool,
        ShapeKind::Pointer => TypeKind::Pointer,
        ShapeKind::Symbol => TypeKind::Symbol,
        ShapeKind::Enum { signed, values } => {
            wire.signed = *signed;
            wire.enumerators = values.iter().map(enumerator).collect();
            TypeKind::Enum
        }
        ShapeKind::Array { element, count } => {
            wire.element = Some(Box::new(shape(element)));
            wire.count = *count;
            TypeKind::Array
        }
        ShapeKind::Struct { union, members } => {
            wire.members = members.iter().map(member).collect();
            if *union {
                TypeKind::Union
            } else {
                TypeKind::Struct
            }
        }
        ShapeKind::String => TypeKind::String,
        ShapeKind::Bytes => TypeKind::Unspecified,
    };
    wire.kind = kind.into();
    wire
}

fn enumerator(of: &Enumerator) -> v1::Enumerator {
    v1::Enumerator {
        name: of.name.clone(),
        value: of.value,
        mask: of.mask,
    }
}

fn member(of: &Member) -> v1::Member {
    v1::Member {
        name: of.name.clone(),
        offset: of.offset,
        width: of.width.map(u32::from),
        r#type: Some(shape(&of.shape)),
    }
}
