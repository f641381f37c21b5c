//! Registers, and sets of them.

use hvprobe_arch::regs::Gpr;
use crate::v1;
use hvprobe_spec::RegisterSet;

use super::enums::WireEnum;
use super::meaningless::Meaningless;
use crate::v1;

/// Converts the number of a register in a message.
///
/// # Errors
/// When there is no such register.
pub fn register(number: i32) -> Result<Gpr, Meaningless> {
    Gpr::numbered(number)?.ok_or(Meaningless::Missing("a register"))
}

/// Converts the registers that are shown for a message; `None` for all of them.
#[must_use]
pub fn set_to_wire(registers: RegisterSet) -> Option<v1::RegisterSet> {
    let all = Gpr::VALUES.iter().copied();
    let shown = all.filter(|register| registers.contains(*register));
    (registers != RegisterSet::default()).then(|| v1::RegisterSet {
        registers: shown.map(Gpr::number).collect(),
    })
}
