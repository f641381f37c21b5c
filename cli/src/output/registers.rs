//! Registers of an event.

use hvprobe_proto::v1::{self, Register};

/// How many registers are shown of a probe that shows all: the first arguments.
const ARGUMENTS: usize = 3;

/// The general registers with their names, in the order of the first arguments and then of the
/// interface.
pub(crate) fn general(regs: &v1::Registers) -> [(&'static str, Option<u64>); 16] {
    [
        ("rdi", regs.rdi),
        ("rsi", regs.rsi),
        ("rdx", regs.rdx),
        ("rcx", regs.rcx),
        ("r8", regs.r8),
        ("r9", regs.r9),
        ("rax", regs.rax),
        ("rbx", regs.rbx),
        ("rsp", regs.rsp),
        ("rbp", regs.rbp),
        ("r10", regs.r10),
        ("r11", regs.r11),
        ("r12", regs.r12),
        ("r13", regs.r13),
        ("r14", regs.r14),
        ("r15", regs.r15),
    ]
}

/// The registers worth a line: those that were chosen, or else the first arguments.
pub(crate) fn shown(regs: &v1::Registers) -> impl Iterator<Item = (&'static str, u64)> {
    let all = general(regs);
    let chosen = all.iter().any(|(_, value)| value.is_none());
    let most = if chosen { all.len() } else { ARGUMENTS };
    all.into_iter()
        .take(most)
        .filter_map(|(name, value)| Some((name, value?)))
}

/// The register with that number, if the event has it.
pub(crate) fn value(regs: &v1::Registers, number: i32) -> Option<u64> {
    let name = name(number)?;
    let all = general(regs);
    let (_, value) = all.into_iter().find(|(each, _)| *each == name)?;
    value
}

/// The name of the register with that number.
pub(crate) fn name(number: i32) -> Option<&'static str> {
    Some(match Register::try_from(number).ok()? {
        Register::Unspecified => return None,
        Register::Rax => "rax",
        Register::Rbx => "rbx",
        Register::Rcx => "rcx",
        Register::Rdx => "rdx",
        Register::Rsi => "rsi",
        Register::Rdi => "rdi",
        Register::Rsp => "rsp",
        Register::Rbp => "rbp",
        Register::R8 => "r8",
        Register::R9 => "r9",
        Register::R10 => "r10",
        Register::R11 => "r11",
        Register::R12 => "r12",
        Register::R13 => "r13",
        Register::R14 => "r14",
        Register::R15 => "r15",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_found_by_number() {
        let regs = v1::Registers {
            rdi: Some(7),
            rip: 9,
            ..Default::default()
        };
        assert_eq!(value(&regs, Register::Rdi.into()), Some(7));
        assert_eq!(value(&regs, Register::Rsi.into()), None);
        for number in [0, -1, 17, i32::MAX] {
            assert_eq!(value(&regs, number), None, "{number}");
        }
        let names: Vec<_> = (1..=16).filter_map(name).collect();
        let mut expected = general(&regs).map(|(name, _)| name);
        expected.sort_unstable();
        let mut known = names.clone();
        known.sort_unstable();
        assert_eq!(known, expected);
    }
}
