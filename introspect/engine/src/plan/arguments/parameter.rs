//! Parameters of functions.

use hvprobe_linux::types::{Place, TypeId};

/// A parameter, with its location at the function's entry.
#[derive(Clone, Debug)]
pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) ty: TypeId,
    pub(super) place: Place,
}
