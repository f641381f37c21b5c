//! Names of the registers.

use super::argument::Register;
use super::words;
use crate::registers::{by_short_name, short_name};

/// The kernel's names for the special registers in `pt_regs` (arch/x86/kernel/ptrace.c).
const SPECIAL: [(Register, &str); 5] = [
    (Register::OrigAx, "orig_ax"),
    (Register::Ip, "ip"),
    (Register::Cs, "cs"),
    (Register::Flags, "flags"),
    (Register::Ss, "ss"),
];

/// Returns the register called `name`, without the `%`.
pub(super) fn by_name(name: &str) -> Option<Register> {
    let special = SPECIAL.iter().find(|(_, known)| *known == name);
    let special = special.map(|(register, _)| *register);
    special.or_else(|| by_short_name(name).map(Register::General))
}

/// Returns the message about an unknown register.
pub(super) fn unknown(name: &str) -> String {
    let short = name.strip_prefix(['r', 'e']);
    match short.filter(|short| by_name(short).is_some()) {
        Some(short) => format!("{}; write `%{short}`", words::BAD_REG_NAME),
        None => words::BAD_REG_NAME.to_owned(),
    }
}

impl Register {
    /// Returns the name, without the `%`.
    #[must_use]
    pub fn name(self) -> &'static str {
        if let Self::General(register) = self {
            return short_name(register);
        }
        let found = SPECIAL.iter().find(|(known, _)| *known == self);
        found.map_or("", |(_, name)| name)
    }
}
