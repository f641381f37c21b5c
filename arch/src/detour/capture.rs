//! What an instance keeps about the entry of a call, and the limits of captures.

use crate::regs::RegisterSet;

/// Maximum number of stack words of one capture.
pub const STACK_WORDS_MAX: usize = 31;

/// CPU number that marks a call whose entry the host served. The time at entry of such a call is the host's own
/// time in nanoseconds, not a value of the guest's time stamp counter. That counter may stand still while its vCPU
/// is not in the guest, and then the host does not know its value at an exit.
pub const BY_HOST: u32 = u32::MAX;
/// Values that are saved in a call's instance at the entry of the call, besides time and flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryCapture {
    /// Registers.
    pub registers: RegisterSet,
    /// Numbers of the stack words, counted from the stack pointer up (the N of `$stackN`).
    pub stack: Vec<u16>,
    /// Where the pointer to the current task is: an offset from the base of GS, sign-extended. If `None`, the
    /// instance's task is zero.
    pub current: Option<u32>,
    /// Where the CPU's number (i32) is: an offset from the base of GS, sign-extended. If `None`, it is not
    /// captured.
    pub cpu: Option<u32>,
}
