//! One partition, as its table describes it.

/// One partition, as its table describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Number of the partition, from 1, as in the names of Linux's devices.
    pub(crate) number: u32,
    /// First byte.
    pub(crate) start: u64,
    /// Number of bytes.
    pub(crate) len: u64,
    /// Type, in words if it is a known one.
    pub(crate) kind: String,
    /// Name in the table, if there is one.
    pub(crate) label: Option<String>,
    /// What `PARTUUID=` calls the partition, if it has such a name.
    pub(crate) partuuid: Option<String>,
}
