//! Registers of an event.

use hvprobe_proto::v1;

/// Number of registers that are shown when none were chosen: the first arguments.
const ARGUMENTS: usize = 3;

/// Names of the general registers, in the order of their numbers, which start at 1.
const NAMES: [&str; 16] = [
    "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rsp", "rbp", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];

/// Returns the general registers with their names, in the order of their numbers.
pub(crate) fn general(regs: &v1::Registers) -> [(&'static str, Option<u64>); 16] {
    let values = [
        regs.rax, regs.rbx, regs.rcx, regs.rdx, regs.rsi, regs.rdi, regs.rsp, regs.rbp, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ];
    std::array::from_fn(|at| (NAMES[at], values[at]))
}

/// Returns the registers to show: the chosen ones, or else the first arguments.
pub(crate) fn shown(regs: &v1::Registers) -> impl Iterator<Item = (&'static str, u64)> {
    let [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, rest @ ..] = general(regs);
    let arguments_first = [rdi, rsi, rdx, rcx, r8, r9, rax, rbx, rsp, rbp];
    let all = arguments_first.into_iter().chain(rest);
    let chosen = all.clone().any(|(_, value)| value.is_none());
    let most = if chosen { NAMES.len() } else { ARGUMENTS };
    all.take(most)
        .filter_map(|(name, value)| Some((name, value?)))
}

/// Returns the register with that number, if the event contains it.
pub(crate) fn value(regs: &v1::Registers, number: i32) -> Option<u64> {
    general(regs).get(position(number)?)?.1
}

/// Returns the name of the register with that number.
pub(crate) fn name(number: i32) -> Option<&'static str> {
    NAMES.get(position(number)?).copied()
}

fn position(number: i32) -> Option<usize> {
    usize::try_from(number).ok()?.checked_sub(1)
}

#[cfg(test)]
mod tests {
    use hvprobe_proto::v1::Register;

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
