//! The three ways in which an int3 of ours reaches user space.

use std::fmt;

/// How a planted int3 is caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CatchMode {
    /// `KVM_EXIT_DEBUG` with exception 3.
    DebugExit,
    /// `KVM_EXIT_INTERNAL_ERROR`: KVM emulates kernel code and leaves int3 to us.
    EmulationExit,
    /// KVM lets int3 through to the guest, where it is intercepted at the guest's own #BP entry.
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
