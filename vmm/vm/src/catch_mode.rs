//! The three ways in which a planted int3 reaches user space.

use std::fmt;

/// How the host catches a planted int3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CatchMode {
    /// `KVM_EXIT_DEBUG` with exception 3.
    DebugExit,
    /// `KVM_EXIT_INTERNAL_ERROR`: KVM emulates kernel code and does not emulate int3.
    EmulationExit,
    /// KVM delivers the int3 to the guest. The guest's own #BP entry is patched to exit.
    IdtGate,
}

impl fmt::Display for CatchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DebugExit => "debug-exit",
            Self::EmulationExit => "emulation-exit",
            Self::IdtGate => "idt-gate",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catch_modes_have_the_names_users_see() {
        let names = [
            CatchMode::DebugExit,
            CatchMode::EmulationExit,
            CatchMode::IdtGate,
        ]
        .map(|mode| mode.to_string());
        assert_eq!(names, ["debug-exit", "emulation-exit", "idt-gate"]);
        assert_eq!(format!("{:>9}", CatchMode::IdtGate), " idt-gate");
    }
}
