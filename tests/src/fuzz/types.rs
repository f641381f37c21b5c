//! Queries of a kernel's types.

use std::sync::Arc;

use hvprobe_linux::image::KernelImage;
use hvprobe_linux::types::{Kind, Limits, TypeId, Types};
use hvprobe_spec::shape::{Shape, ShapeKind};

/// Maximum number of types that are queried, to limit the time.
const MOST: usize = 64;

/// Checks at most [`MOST`] types of `table`, first as types of the kernel `image`, which contains the table, and
/// then as types of a module, which are added to the kernel's types.
pub(super) fn check(image: &KernelImage, table: &[u8]) {
    let Ok(types) = image.types() else {
        return;
    };
    for id in types.ids().take(MOST).chain([TypeId::VOID]) {
        check_type(types, id);
    }
    let module = Types::split(Arc::clone(types), table).expect("it was read before");
    let own = types.ids().count();
    for id in module.ids().skip(own).take(MOST) {
        check_type(&module, id);
    }
}

fn check_type(types: &Types, id: TypeId) {
    /// Maximum length of a name. A name is cut at about one kilobyte, but the parts that have been begun are
    /// completed.
    const LONGEST_NAME: usize = 1 << 14;
    /// Maximum length of a declaration. It exceeds the length at which a declaration is cut for the same reason.
    const LONGEST: usize = 1 << 20;

    assert!(types.name(id).len() <= LONGEST_NAME, "names are bounded");
    let declaration = types.declaration(id);
    assert!(declaration.len() <= LONGEST, "declarations are bounded");
    let name = types.own_name(id);
    for keyword in ["", "struct ", "union ", "enum "] {
        let found = types.find(&format!("{keyword}{name}"));
        assert!(found.iter().all(|id| types.kind(*id).is_some()));
    }
    match types.function(name) {
        Ok(prototype) => {
            let places = types.places(&prototype);
            assert_eq!(places.len(), prototype.parameters.len());
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let _ = (types.pointee(id), types.prototype(id));
    let limits = Limits::default();
    if let Some(shape) = types.shape(id, limits) {
        assert_eq!(Some(u64::from(shape.size)), types.size(id));
        let (members, values) = counted(&shape);
        assert!(members <= limits.members && values <= limits.values);
    }
    let resolved = types.resolve(id).and_then(|id| types.kind(id));
    match resolved {
        Some(Kind::Struct { members, .. }) => {
            for member in members.take(MOST) {
                let _ = types.member(id, member.name);
            }
            assert_eq!(types.member(id, ""), None);
        }
        _ => assert_eq!(types.member(id, name), None),
    }
}

/// Returns the numbers of members and of named values in a shape.
fn counted(shape: &Shape) -> (usize, usize) {
    match &shape.kind {
        ShapeKind::Struct { members, .. } => members
            .iter()
            .map(|member| counted(&member.shape))
            .fold((members.len(), 0), |all, more| {
                (all.0 + more.0, all.1 + more.1)
            }),
        ShapeKind::Array { element, .. } => counted(element),
        ShapeKind::Enum { values, .. } => (0, values.len()),
        _ => (0, 0),
    }
}
