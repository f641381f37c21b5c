//! Registers of an event.

use hvprobe_arch::regs::Gpr;
use hvprobe_proto::v1;
use hvprobe_spec::REGISTERS;

/// Number of registers that are shown when none were chosen: the first arguments.
const ARGUMENTS: usize = 3;

/// A general register with its name, and its value if the event contains it.
type Register = (Gpr, &'static str, Option<u64>);

/// Returns the general registers.
pub(crate) fn general(regs: &v1::Registers) -> [Register; 16] {
    let values = [
        regs.rax, regs.rbx, regs.rcx, regs.rdx, regs.rsi, regs.rdi, regs.rsp, regs.rbp, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ];
    std::array::from_fn(|at| (REGISTERS[at].0, REGISTERS[at].1, values[at]))
}

/// Returns the registers to show: the chosen ones, or else the first arguments.
pub(crate) fn shown(regs: &v1::Registers) -> impl Iterator<Item = (Gpr, &'static str, u64)> {
    let [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, rest @ ..] = general(regs);
    let arguments_first = [rdi, rsi, rdx, rcx, r8, r9, rax, rbx, rsp, rbp];
    let all = arguments_first.into_iter().chain(rest);
    let chosen = all.clone().any(|(_, _, value)| value.is_none());
    let most = if chosen { REGISTERS.len() } else { ARGUMENTS };
    all.take(most)
        .filter_map(|(register, name, value)| Some((register, name, value?)))
}

/// Returns the value of `wanted`, if the event contains it.
pub(crate) fn value(regs: &v1::Registers, wanted: Gpr) -> Option<u64> {
    let mut all = general(regs).into_iter();
    all.find(|(register, ..)| *register == wanted)?.2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_found_by_name() {
        let words: Vec<_> = (1..=16).map(Some).collect();
        let regs = v1::Registers {
            rax: words[0],
            rbx: words[1],
            rcx: words[2],
            rdx: words[3],
            rsi: words[4],
            rdi: words[5],
            rsp: words[6],
            rbp: words[7],
            r8: words[8],
            r9: words[9],
            r10: words[10],
            r11: words[11],
            r12: words[12],
            r13: words[13],
            r14: words[14],
            r15: words[15],
            ..Default::default()
        };
        let all = format!("{regs:?}");
        for (register, name, found) in general(&regs) {
            assert_eq!(format!("{register:?}").to_lowercase(), name);
            assert_eq!(value(&regs, register), found);
            assert!(all.contains(&format!("{name}: {found:?}")), "{name}: {all}");
        }
        let regs = v1::Registers {
            rdi: Some(7),
            rip: 9,
            ..Default::default()
        };
        assert_eq!(value(&regs, Gpr::Rdi), Some(7));
        assert_eq!(value(&regs, Gpr::Rsi), None);
    }
}
