//! Why stacks cannot be followed.

/// Why a kernel's stacks cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OrcError {
    /// The image has no tables, or not where they are looked for.
    #[error("the kernel has no unwind tables (CONFIG_UNWINDER_ORC)")]
    Missing,
    /// Two tables that do not belong together.
    #[error("the kernel's unwind tables have {addresses} addresses and {rules} rules")]
    Lengths {
        /// How many addresses there are.
        addresses: usize,
        /// How many rules.
        rules: usize,
    },
    /// The addresses do not ascend.
    #[error("the kernel's unwind tables are not sorted")]
    Unsorted,
    /// What the entries mean is not known.
    #[error("the kernel's unwind tables are of no known format")]
    Format,
    /// More than any kernel has.
    #[error("the kernel's unwind tables have too many entries, or too many different ones")]
    TooMany,
}
