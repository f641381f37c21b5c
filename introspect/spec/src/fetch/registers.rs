//! Names of the registers.

use hvprobe_arch::regs::Gpr;

use super::argument::Register;
use super::words;

/// The kernel's names for the registers in `pt_regs` (arch/x86/kernel/ptrace.c).
const NAMES: [(Register, &str); 21] = [
    (Register::General(Gpr::R15), "r15"),
    (Register::General(Gpr::R14), "r14"),
    (Register::General(Gpr::R13), "r13"),
    (Register::General(Gpr::R12), "r12"),
    (Register::General(Gpr::R11), "r11"),
    (Register::General(Gpr::R10), "r10"),
    (Register::General(Gpr::R9), "r9"),
    (Register::General(Gpr::R8), "r8"),
    (Register::General(Gpr::Rbx), "bx"),
    (Register::General(Gpr::Rcx), "cx"),
    (Register::General(Gpr::Rdx), "dx"),
    (Register::General(Gpr::Rsi), "si"),
    (Register::General(Gpr::Rdi), "di"),
    (Register::General(Gpr::Rbp), "bp"),
    (Register::General(Gpr::Rax), "ax"),
    (Register::OrigAx, "orig_ax"),
    (Register::Ip, "ip"),
    (Register::Cs, "cs"),
    (Register::Flags, "flags"),
    (Register::General(Gpr::Rsp), "sp"),
    (Register::Ss, "ss"),
];

/// Returns the register called `name`, without the `%`.
pub(super) fn by_name(name: &str) -> Option<Register> {
    let (register, _) = NAMES.iter().find(|(_, known)| *known == name)?;
    Some(*register)
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
        let found = NAMES.iter().find(|(known, _)| *known == self);
        found.map_or("", |(_, name)| name)
    }
}
