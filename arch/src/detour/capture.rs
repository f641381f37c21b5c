//! What an instance keeps of a call at its entry, and the limits of captures.

use crate::regs::RegisterSet;

/// Maximum number of stack words of one capture.
pub const STACK_WORDS_MAX: usize = 31;

/// CPU number of a call that the host entered. Its time at entry is not a counter value but the host's own time,
/// in nanoseconds: where the guest's counter stands still while its vCPU is not in the guest, the counter's
/// value at an exit is not known.
pub const BY_HOST: u32 = u32::MAX;
/// What an instance keeps of a call at its entry, besides time and flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryCapture {
    /// Registers.
    pub registers: RegisterSet,
    /// Words above the stack pointer, by their number (`$stackN`).
    pub stack: Vec<u16>,
    /// Displacement, relative to the base of GS and sign-extended, of the pointer to the current task. Without
    /// it, the instance's task is zero.
    pub current: Option<u32>,
    /// Displacement, relative to the base of GS and sign-extended, of the CPU's number (i32).
    pub cpu: Option<u32>,
}
