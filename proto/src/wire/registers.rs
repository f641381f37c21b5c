//! Registers on the wire, and errors of conversions from the wire.

use hvprobe_arch::regs::Gpr;
use crate::v1;
use hvprobe_spec::RegisterSet;

/// Every general register with its name on the wire.
pub(super) const REGISTERS: [(Gpr, v1::Register); 16] = [
    (Gpr::Rax, v1::Register::Rax),
    (Gpr::Rbx, v1::Register::Rbx),
    (Gpr::Rcx, v1::Register::Rcx),
    (Gpr::Rdx, v1::Register::Rdx),
    (Gpr::Rsi, v1::Register::Rsi),
    (Gpr::Rdi, v1::Register::Rdi),
    (Gpr::Rsp, v1::Register::Rsp),
    (Gpr::Rbp, v1::Register::Rbp),
    (Gpr::R8, v1::Register::R8),
    (Gpr::R9, v1::Register::R9),
    (Gpr::R10, v1::Register::R10),
    (Gpr::R11, v1::Register::R11),
    (Gpr::R12, v1::Register::R12),
    (Gpr::R13, v1::Register::R13),
    (Gpr::R14, v1::Register::R14),
    (Gpr::R15, v1::Register::R15),
];

/// Why a message means nothing to the engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Meaningless {
    /// A required field is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// An enumeration has no such value.
    #[error("{number} is no {what}")]
    Unknown {
        /// Name of the enumeration.
        what: &'static str,
        /// The value.
        number: i32,
    },
    /// A number is too large for the engine.
    #[error("{what} of {number} is too large")]
    TooLarge {
        /// What the number counts.
        what: &'static str,
        /// The number.
        number: u32,
    },
}

/// Converts `ours` to the wire by a table of both; the default if it is not in the table.
pub fn on_wire<T: PartialEq, W: Copy + Default>(table: &[(T, W)], ours: &T) -> W {
    let row = table.iter().find(|(it, _)| it == ours);
    row.map(|(_, wire)| *wire).unwrap_or_default()
}

/// Converts `wire` from the wire by such a table.
pub(super) fn from_wire<T: Copy, W: PartialEq>(table: &[(T, W)], wire: &W) -> Option<T> {
    let row = table.iter().find(|(_, it)| it == wire);
    row.map(|(ours, _)| *ours)
}

/// Converts a register; `None` for REGISTER_UNSPECIFIED.
pub(super) fn base(number: i32) -> Result<Option<Gpr>, Meaningless> {
    match v1::Register::try_from(number) {
        Ok(wire) => Ok(from_wire(&REGISTERS, &wire)),
        Err(_) => Err(Meaningless::Unknown {
            what: "register",
            number,
        }),
    }
}

/// Converts the number of a register on the wire.
///
/// # Errors
/// When there is no such register.
pub fn register(number: i32) -> Result<Gpr, Meaningless> {
    base(number)?.ok_or(Meaningless::Missing("a register"))
}

/// Converts the registers that are shown to the wire; `None` for all of them.
#[must_use]
pub fn set_to_wire(registers: RegisterSet) -> Option<v1::RegisterSet> {
    (registers != RegisterSet::default()).then(|| v1::RegisterSet {
        registers: REGISTERS
            .iter()
            .filter(|(gpr, _)| registers.contains(*gpr))
            .map(|(_, wire)| (*wire).into())
            .collect(),
    })
}

/// Returns the name of `gpr` on the wire.
#[must_use]
pub fn named(gpr: Gpr) -> v1::Register {
    on_wire(&REGISTERS, &gpr)
}
