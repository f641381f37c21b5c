//! Converts types into shapes, which determine how values are printed.
//!
//! Invariant: a shape has no more levels, members and named values than its limits allow. What exceeds them is
//! shown as bytes or, in the case of named values, as a number. Anonymous members are replaced by their own
//! members.

use hvprobe_spec::shape::{Enumerator, Member, Shape, ShapeKind};

use super::kinds::{Enumerators, Field, Int, Kind, Members, Value};
use super::table::{DEEPEST, TypeId, Types};

/// Maximum number of members examined per shape; no structure of a kernel has more.
const MOST_STEPS: u32 = 1 << 16;

/// How much of a type a shape describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum depth of structures and arrays nested in each other.
    pub depth: u32,
    /// Maximum number of members in the whole shape. A structure with more members than are left is shown as bytes.
    pub members: usize,
    /// Maximum number of named values in the whole shape. An enumeration with more values than are left is shown as
    /// a number.
    pub values: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            depth: 8,
            members: 512,
            values: 4096,
        }
    }
}

impl Types {
    /// Returns the shape of values of a type. `None` if the type has no values, like `void` and functions, or
    /// if their size is unknown.
    #[must_use]
    pub fn shape(&self, id: TypeId, limits: Limits) -> Option<Shape> {
        let mut builder = Builder {
            types: self,
            left: limits,
            steps: MOST_STEPS,
        };
        builder.shape(id, limits.depth)
    }
}

struct Builder<'a> {
    types: &'a Types,
    left: Limits,
    /// Number of members, including anonymous ones, that may still be examined.
    steps: u32,
}

impl<'a> Builder<'a> {
    fn shape(&mut self, id: TypeId, depth: u32) -> Option<Shape> {
        let size = u32::try_from(self.types.size(id)?).ok()?;
        let kind = match self.types.kind(self.types.resolve(id)?)? {
            Kind::Int(Int { bool: true, .. }) => ShapeKind::Bool,
            Kind::Int(Int { char: true, .. }) => ShapeKind::Char,
            Kind::Int(Int { signed: true, .. }) => ShapeKind::Signed,
            Kind::Int(_) => ShapeKind::Unsigned,
            Kind::Pointer(_) => ShapeKind::Pointer,
            Kind::Enum { signed, values } => self.values(signed, values),
            Kind::Array { element, count } => self.array(element, count, depth),
            Kind::Struct { union, members } => self.members(union, members, depth),
            _ => ShapeKind::Bytes,
        };
        Some(Shape {
            name: self.types.name(id),
            size,
            kind,
        })
    }

    fn values(&mut self, signed: bool, values: Enumerators<'a>) -> ShapeKind {
        let number = if signed {
            ShapeKind::Signed
        } else {
            ShapeKind::Unsigned
        };
        let values: Vec<_> = values.take(self.left.values + 1).collect();
        let Some(left) = self.left.values.checked_sub(values.len()) else {
            return number;
        };
        self.left.values = left;
        let own = |it: Value<'_>| Enumerator {
            mask: None,
            name: it.name.to_owned(),
            value: it.value,
        };
        ShapeKind::Enum {
            signed,
            values: values.into_iter().map(own).collect(),
        }
    }

    fn array(&mut self, element: TypeId, count: u32, depth: u32) -> ShapeKind {
        let depth = depth.checked_sub(1);
        match depth.and_then(|depth| self.shape(element, depth)) {
            Some(element) => ShapeKind::Array {
                element: Box::new(element),
                count,
            },
            None => ShapeKind::Bytes,
        }
    }

    fn members(&mut self, union: bool, members: Members<'a>, depth: u32) -> ShapeKind {
        let Some(depth) = depth.checked_sub(1) else {
            return ShapeKind::Bytes;
        };
        // Counts all members of a structure before the type of any of them is converted.
        let mut fields = Vec::new();
        if self.fields(members, 0, DEEPEST, &mut fields).is_none() {
            return ShapeKind::Bytes;
        }
        self.left.members -= fields.len();
        let mut found = Vec::with_capacity(fields.len());
        for field in fields {
            let Ok(offset) = u32::try_from(field.bit_offset) else {
                return ShapeKind::Bytes;
            };
            // A member without a size cannot be shown.
            if let Some(shape) = self.shape(field.ty, depth) {
                found.push(Member {
                    name: field.name.to_owned(),
                    offset,
                    width: field.width,
                    shape,
                });
            }
        }
        ShapeKind::Struct {
            union,
            members: found,
        }
    }

    /// Collects the members that have a name. Anonymous members are replaced by their own members. `None` if there
    /// are more than the limits allow.
    fn fields(
        &mut self,
        members: Members<'a>,
        base: u64,
        depth: u32,
        found: &mut Vec<Field<'a>>,
    ) -> Option<()> {
        for mut field in members {
            self.steps = self.steps.checked_sub(1)?;
            field.bit_offset = field.bit_offset.checked_add(base)?;
            if !field.name.is_empty() {
                found.push(field);
            } else if let Some(inner) = self.anonymous(&field) {
                self.fields(inner, field.bit_offset, depth.checked_sub(1)?, found)?;
            }
            if found.len() > self.left.members {
                return None;
            }
        }
        Some(())
    }

    fn anonymous(&self, field: &Field<'_>) -> Option<Members<'a>> {
        match self.types.kind(self.types.resolve(field.ty)?)? {
            Kind::Struct { members, .. } => Some(members),
            _ => None,
        }
    }
}
