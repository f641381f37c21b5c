//! What a function takes.

use hvprobe_linux::types::{Place, TypeId};

/// A parameter, and where it is at the function's entry.
#[derive(Clone, Debug)]
pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) ty: TypeId,
    pub(super) place: Place,
}
