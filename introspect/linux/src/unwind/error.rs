//! Errors of reading unwind tables.

/// Why a kernel's stacks cannot be unwound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OrcError {
    /// The image has no tables, or not at the expected places.
    #[error("the kernel has no unwind tables (CONFIG_UNWINDER_ORC)")]
    Missing,
    /// The two tables do not belong together, as their lengths differ.
    #[error("the kernel's unwind tables have {addresses} addresses and {rules} rules")]
    Lengths {
        /// Number of addresses.
        addresses: usize,
        /// Number of rules.
        rules: usize,
    },
    /// The addresses are not sorted, or are not in the same 4 GiB as the text.
    #[error("the kernel's unwind tables are not sorted")]
    Unsorted,
    /// The format of the entries is unknown.
    #[error("the kernel's unwind tables are of no known format")]
    Format,
    /// There are more entries, or more different ones, than any kernel has, or the text crosses a 4 GiB boundary.
    #[error("the kernel's unwind tables have too many entries, or too many different ones")]
    TooMany,
}
