//! Errors of reading types.

/// Why type information (BTF) cannot be used, or does not give the offset of a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// The image has no BTF.
    #[error("the kernel has no BTF: it was built without CONFIG_DEBUG_INFO_BTF")]
    Missing,
    /// The bytes violate the format.
    #[error("malformed BTF at offset {0:#x}")]
    Malformed(usize),
    /// The kernel has no symbol for the pointer to the current task.
    #[error("no symbol `current_task` or `pcpu_hot` leads to the current task")]
    NoCurrentTask,
    /// There is no such field, or it is a bit field.
    #[error("no field `{field}` in `struct {of}`")]
    NoField {
        /// The structure.
        of: String,
        /// The field.
        field: String,
    },
    /// The field does not have the size that the code can read.
    #[error("field `{field}` of `struct {of}` has {found} bytes, not {expected}")]
    Size {
        /// The structure.
        of: String,
        /// The field.
        field: String,
        /// The size in BTF.
        found: u64,
        /// The size that the code can read.
        expected: u64,
    },
}

/// Why a function's parameters are not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrototypeError {
    /// The types contain no such function.
    #[error("the kernel's types do not contain a function `{0}`")]
    Unknown(String),
    /// Functions of that name differ in their parameters or in what they return.
    #[error("the kernel has functions `{0}` with different parameters")]
    Ambiguous(String),
    /// The types describe the function in a way that makes no sense.
    #[error("malformed BTF of the function `{0}`")]
    Malformed(String),
}
