//! What is kept of a call at its entry, and limits of what is kept.

use crate::regs::RegisterSet;

/// The most stack words of one capture.
pub const STACK_WORDS_MAX: usize = 31;

/// In place of a CPU's number: the host entered the call, and the time at entry is not a counter's but
/// the host's own, in nanoseconds. What the guest's counter was at an exit is not known where it stands
/// still while its virtual CPU is not in the guest.
pub const BY_HOST: u32 = u32::MAX;
/// What is kept of a call at its entry, beside time and flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryCapture {
    /// Registers.
    pub registers: RegisterSet,
    /// Words above the stack pointer, by their number (`$stackN`).
    pub stack: Vec<u16>,
    /// Displacement, relative to the base of GS and sign-extended, of the pointer to the current
    /// task; the instance's task is zero without it.
    pub current: Option<u32>,
    /// Displacement, relative to the base of GS and sign-extended, of the CPU's number (i32).
    pub cpu: Option<u32>,
}
