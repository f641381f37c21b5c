//! Shapes: the types of values, resolved as far as printing needs them.
//!
//! Invariant: every message can be converted to a shape. A part of it that means nothing is [`ShapeKind::Unknown`],
//! so that the rest can be shown. A kind that only a newer server knows is shown as bytes.

use hvprobe_spec::shape::{Enumerator, Member, Shape, ShapeKind};

use super::meaningless::Meaningless;
use super::value::Wire;
use crate::v1::{self, TypeKind};

/// The kinds that have no data, each with its kind in messages.
static PLAIN: [(ShapeKind, TypeKind); 9] = [
    (ShapeKind::Unsigned, TypeKind::Unsigned),
    (ShapeKind::Signed, TypeKind::Signed),
    (ShapeKind::Hex, TypeKind::Hex),
    (ShapeKind::Char, TypeKind::Char),
    (ShapeKind::Bool, TypeKind::Bool),
    (ShapeKind::Pointer, TypeKind::Pointer),
    (ShapeKind::Symbol, TypeKind::Symbol),
    (ShapeKind::String, TypeKind::String),
    (ShapeKind::Bytes, TypeKind::Unspecified),
];

impl Wire for Shape {
    type Message = v1::Type;

    fn to_wire(&self) -> v1::Type {
        let mut wire = v1::Type {
            name: self.name.clone(),
            size: self.size,
            ..v1::Type::default()
        };
        let kind = match &self.kind {
            ShapeKind::Enum { signed, values } => {
                wire.signed = *signed;
                wire.enumerators = values.to_wire();
                TypeKind::Enum
            }
            ShapeKind::Array { element, count } => {
                wire.element = Some(Box::new(element.to_wire()));
                wire.count = *count;
                TypeKind::Array
            }
            ShapeKind::Struct { union, members } => {
                wire.members = members.to_wire();
                match union {
                    true => TypeKind::Union,
                    false => TypeKind::Struct,
                }
            }
            // An array without a type of its elements is read as an unknown shape.
            ShapeKind::Unknown => TypeKind::Array,
            plain => {
                let found = PLAIN.iter().find(|(ours, _)| ours == plain);
                found.map_or(TypeKind::Unspecified, |(_, theirs)| *theirs)
            }
        };
        wire.kind = kind.into();
        wire
    }

    fn from_wire(wire: v1::Type) -> Result<Self, Meaningless> {
        let kind = match wire.kind() {
            TypeKind::Enum => ShapeKind::Enum {
                signed: wire.signed,
                values: Wire::from_wire(wire.enumerators)?,
            },
            TypeKind::Array => match wire.element {
                Some(element) => ShapeKind::Array {
                    element: Box::new(Self::from_wire(*element)?),
                    count: wire.count,
                },
                None => ShapeKind::Unknown,
            },
            kind @ (TypeKind::Struct | TypeKind::Union) => ShapeKind::Struct {
                union: kind == TypeKind::Union,
                members: Wire::from_wire(wire.members)?,
            },
            plain => {
                let found = PLAIN.iter().find(|(_, theirs)| *theirs == plain);
                found.map_or(ShapeKind::Bytes, |(ours, _)| ours.clone())
            }
        };
        Ok(Self {
            name: wire.name,
            size: wire.size,
            kind,
        })
    }
}

fn unknown() -> Shape {
    Shape {
        name: String::new(),
        size: 0,
        kind: ShapeKind::Unknown,
    }
}

impl Wire for Enumerator {
    type Message = v1::Enumerator;

    fn to_wire(&self) -> v1::Enumerator {
        v1::Enumerator {
            name: self.name.clone(),
            value: self.value,
            mask: self.mask,
        }
    }

    fn from_wire(wire: v1::Enumerator) -> Result<Self, Meaningless> {
        Ok(Self {
            name: wire.name,
            value: wire.value,
            mask: wire.mask,
        })
    }
}

impl Wire for Member {
    type Message = v1::Member;

    fn to_wire(&self) -> v1::Member {
        v1::Member {
            name: self.name.clone(),
            offset: self.offset,
            width: self.width.map(u32::from),
            r#type: Some(self.shape.to_wire()),
        }
    }

    fn from_wire(wire: v1::Member) -> Result<Self, Meaningless> {
        let width = wire.width.map(u8::try_from).transpose();
        let (width, shape) = match (width, wire.r#type) {
            (Ok(width), Some(ty)) => (width, Shape::from_wire(ty)?),
            _ => (None, unknown()),
        };
        Ok(Self {
            name: wire.name,
            offset: wire.offset,
            width,
            shape,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    use super::*;

    fn any_plain() -> impl Strategy<Value = ShapeKind> {
        let enumerator = (".{0,4}", any::<i64>(), any::<Option<u64>>());
        let enumerator =
            enumerator.prop_map(|(name, value, mask)| Enumerator { name, value, mask });
        prop_oneof![
            (0..PLAIN.len()).prop_map(|row| PLAIN[row].0.clone()),
            Just(ShapeKind::Unknown),
            (any::<bool>(), vec(enumerator, 0..3))
                .prop_map(|(signed, values)| ShapeKind::Enum { signed, values }),
        ]
    }

    fn of_kind(kind: impl Strategy<Value = ShapeKind>) -> impl Strategy<Value = Shape> {
        (".{0,4}", any::<u32>(), kind).prop_map(|(name, size, kind)| Shape { name, size, kind })
    }

    pub(in super::super) fn any_shape() -> impl Strategy<Value = Shape> {
        of_kind(any_plain()).prop_recursive(3, 12, 3, |inner| {
            let array = (inner.clone(), any::<u32>()).prop_map(|(element, count)| {
                let element = Box::new(element);
                ShapeKind::Array { element, count }
            });
            let member = (".{0,4}", any::<u32>(), option::of(any::<u8>()), inner);
            let member = member.prop_map(|(name, offset, width, shape)| Member {
                name,
                offset,
                width,
                shape,
            });
            let structure = (any::<bool>(), vec(member, 0..3))
                .prop_map(|(union, members)| ShapeKind::Struct { union, members });
            of_kind(prop_oneof![array, structure])
        })
    }

    proptest! {
        #[test]
        fn shapes_come_back_as_they_went_out(out in any_shape()) {
            prop_assert_eq!(Shape::from_wire(out.to_wire()), Ok(out));
        }
    }

    #[test]
    fn parts_that_mean_nothing_are_unknown_and_unknown_kinds_are_bytes() {
        let of_kind = |kind: i32| v1::Type {
            kind,
            ..Default::default()
        };
        let kind = |wire| Shape::from_wire(wire).unwrap().kind;
        assert_eq!(kind(of_kind(TypeKind::Array.into())), ShapeKind::Unknown);
        assert_eq!(kind(of_kind(99)), ShapeKind::Bytes);
        let member = |width, r#type| v1::Member {
            name: "m".to_owned(),
            offset: 8,
            width,
            r#type,
        };
        let bytes = Shape::from_wire(v1::Type::default()).unwrap();
        let structure = v1::Type {
            members: vec![
                member(None, None),
                member(Some(256), Some(v1::Type::default())),
                member(Some(255), Some(v1::Type::default())),
            ],
            ..of_kind(TypeKind::Struct.into())
        };
        let converted = |width, shape| Member {
            name: "m".to_owned(),
            offset: 8,
            width,
            shape,
        };
        assert_eq!(
            kind(structure),
            ShapeKind::Struct {
                union: false,
                members: vec![
                    converted(None, unknown()),
                    converted(None, unknown()),
                    converted(Some(255), bytes),
                ],
            }
        );
    }
}
