//! Causes of debug exits (`KVM_EXIT_DEBUG`).
//!
//! | exception | cause | what the vCPU does |
//! |---|---|---|
//! | 3 | an int3, ours or the guest's | handles the hit, or reflects it |
//! | any other | nothing that we asked KVM for | ends the machine with a report |

use hvprobe_arch::trap::vector;

/// Cause of a debug exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// An int3, ours or the guest's.
    Int3,
    /// An exit that KVM was not asked for. KVM is asked to watch neither single steps nor debug registers.
    Unasked(Unasked),
}

/// Number of the exception of an exit that KVM was not asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unexpected debug exit, exception {0}")]
pub(super) struct Unasked(u32);

impl Cause {
    /// Returns the cause of an exit with exception number `exception`.
    #[inline]
    pub(super) fn of(exception: u32) -> Self {
        if exception == u32::from(vector::BREAKPOINT) {
            Self::Int3
        } else {
            Self::Unasked(Unasked(exception))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exception_3_is_an_int3_and_all_others_end_the_machine() {
        assert_eq!(Cause::of(3), Cause::Int3);
        for exception in [0, 1, 2, 4, 0x103, u32::MAX] {
            let Cause::Unasked(unasked) = Cause::of(exception) else {
                panic!("{exception} is no int3");
            };
            let expected = format!("unexpected debug exit, exception {exception}");
            assert_eq!(unasked.to_string(), expected);
        }
    }
}
