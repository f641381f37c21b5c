//! Registers.

use hvprobe_arch::regs::Gpr;

use super::enums::WireEnum as _;
use super::meaningless::Meaningless;

/// Converts the number of a register. 0, which stands for no register, is an error.
///
/// # Errors
/// When there is no such register.
pub fn register(number: i32) -> Result<Gpr, Meaningless> {
    Gpr::numbered(number)?.ok_or(Meaningless::Missing("a register"))
}
