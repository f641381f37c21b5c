//! Bits of page table entries (SDM vol. 3, tables 4-15 to 4-20).

/// The entry is in use.
pub const PRESENT: u64 = 1 << 0;
/// Writing is allowed.
pub const WRITABLE: u64 = 1 << 1;
/// User mode may access.
pub const USER: u64 = 1 << 2;
/// Set by the processor once the entry was used.
pub const ACCESSED: u64 = 1 << 5;
/// Set by the processor once the page was written (leaves only).
pub const DIRTY: u64 = 1 << 6;
/// At levels 2 and 3: the entry maps a page of 2 MiB or 1 GiB instead of pointing to a table.
pub const HUGE: u64 = 1 << 7;
/// The translation survives CR3 writes (leaves only).
pub const GLOBAL: u64 = 1 << 8;
/// Fetching instructions is forbidden.
pub const NO_EXECUTE: u64 = 1 << 63;
/// Bits 12 to 51: the physical address.
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
