//! Shapes: the types of values, resolved as far as printing needs them.
//!
//! A kind that only a newer server knows is shown as bytes.

use hvprobe_spec::shape::{Enumerator, Member, Shape, ShapeKind};

use super::meaningless::Meaningless;
use super::value::{Wire, small};
use crate::v1::{self, TypeKind};

/// The kinds that need no more than their names.
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
            TypeKind::Array => {
                let element = wire.element.map(|element| *element);
                ShapeKind::Array {
                    element: Box::new(of(element, "the type of an array's elements")?),
                    count: wire.count,
                }
            }
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

/// Converts the type that is `what`, which has to be there.
fn of(wire: Option<v1::Type>, what: &'static str) -> Result<Shape, Meaningless> {
    Shape::from_wire(wire.ok_or(Meaningless::Missing(what))?)
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
        let width = |width| small("the width of a bit field", width);
        Ok(Self {
            name: wire.name,
            offset: wire.offset,
            width: wire.width.map(width).transpose()?,
            shape: of(wire.r#type, "the type of a member")?,
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
    fn types_that_lack_a_part_are_refused_and_those_of_unknown_kinds_are_bytes() {
        let of_kind = |kind: i32| v1::Type {
            kind,
            ..Default::default()
        };
        let refused = |wire| Shape::from_wire(wire).unwrap_err().to_string();
        let array = of_kind(TypeKind::Array.into());
        assert_eq!(refused(array), "the type of an array's elements is missing");
        let member = |width| v1::Member {
            width,
            r#type: width.map(|_| v1::Type::default()),
            ..Default::default()
        };
        let structure = |width| v1::Type {
            members: vec![member(width)],
            ..of_kind(TypeKind::Struct.into())
        };
        assert_eq!(refused(structure(None)), "the type of a member is missing");
        assert_eq!(
            refused(structure(Some(256))),
            "the width of a bit field of 256 is too large"
        );
        assert_eq!(
            Shape::from_wire(of_kind(99)).unwrap().kind,
            ShapeKind::Bytes
        );
    }
}
