//! Names of the general registers.

use hvprobe_arch::regs::Gpr;

/// General registers with their long names, in the order of their display.
pub const REGISTERS: [(Gpr, &str); 16] = [
    (Gpr::Rax, "rax"),
    (Gpr::Rbx, "rbx"),
    (Gpr::Rcx, "rcx"),
    (Gpr::Rdx, "rdx"),
    (Gpr::Rsi, "rsi"),
    (Gpr::Rdi, "rdi"),
    (Gpr::Rsp, "rsp"),
    (Gpr::Rbp, "rbp"),
    (Gpr::R8, "r8"),
    (Gpr::R9, "r9"),
    (Gpr::R10, "r10"),
    (Gpr::R11, "r11"),
    (Gpr::R12, "r12"),
    (Gpr::R13, "r13"),
    (Gpr::R14, "r14"),
    (Gpr::R15, "r15"),
];

/// Returns the register's name in the kernel's definitions: without the `r` of 64 bits, as in `ax` for `rax`.
/// Registers with a number keep their `r`, as in `r8`.
pub(crate) fn short_name(register: Gpr) -> &'static str {
    let found = REGISTERS.iter().find(|(known, _)| *known == register);
    let long = found.map_or("", |(_, long)| long);
    match long.strip_prefix('r') {
        Some(short) if !short.starts_with(|c: char| c.is_ascii_digit()) => short,
        _ => long,
    }
}

/// Returns the register with this short name.
pub(crate) fn by_short_name(name: &str) -> Option<Gpr> {
    let mut all = Gpr::ALL.into_iter();
    all.find(|register| short_name(*register) == name)
}
