//! Why types cannot be told.

/// Why BTF does not tell where a field is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// The image has none.
    #[error("the kernel has no BTF: it was built without CONFIG_DEBUG_INFO_BTF")]
    Missing,
    /// The bytes are not what the format says.
    #[error("malformed BTF at offset {0:#x}")]
    Malformed(usize),
    /// No variable that could point to the current task.
    #[error("no symbol `current_task` or `pcpu_hot` leads to the current task")]
    NoCurrentTask,
    /// No such field, or it is a bit field.
    #[error("no field `{field}` in `struct {of}`")]
    NoField {
        /// The structure.
        of: String,
        /// The field.
        field: String,
    },
    /// The field has another size than the code knows how to read.
    #[error("field `{field}` of `struct {of}` has {found} bytes, not {expected}")]
    Size {
        /// The structure.
        of: String,
        /// The field.
        field: String,
        /// The size in BTF.
        found: u64,
        /// The size known.
        expected: u64,
    },
}
