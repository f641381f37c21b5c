//! What a client can do about a refusal.

use hvprobe_linux::image::Forbidden;

use crate::refusal::Refused;
use crate::unoptimized::Unoptimized;

/// What a client can do about a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Nothing: this guest will never take such a probe there.
    Never,
    /// Ask again when this condition holds.
    NotNow(&'static str),
    /// Ask for something else: the request names something that does not exist, or makes no sense.
    WrongRequest,
}

impl Refused {
    /// Returns what a client can do about the refusal.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Symbol(_)
            | Self::ModuleSymbol(_)
            | Self::OtherBuild { .. }
            | Self::NoMatch { .. }
            | Self::TooManyMatches { .. }
            | Self::Pattern { .. }
            | Self::Instances(_)
            | Self::OffsetOutside { .. }
            | Self::Padding { .. }
            | Self::NotText { .. }
            | Self::NoSymbol { .. }
            | Self::Boundary(_)
            | Self::Mechanism { .. }
            | Self::Argument(_)
            | Self::Arguments(_)
            | Self::NotEntry { .. } => Remedy::WrongRequest,
            Self::LinkedLow { .. }
            | Self::InitText { .. }
            | Self::Instruction { .. }
            | Self::Unmapped { .. }
            | Self::Replaced
            | Self::NoWindow { .. }
            | Self::NeverReturns { .. }
            | Self::NoTasks(_)
            | Self::NoStacks(_)
            | Self::ModulesHidden { .. }
            | Self::NoModuleTypes { .. }
            | Self::Relocate { .. } => Remedy::Never,
            Self::Forbidden { why, .. } => forbidden(why),
            Self::Unoptimized { source, .. } => source.remedy(),
            Self::ForeignBreakpoint { .. } => Remedy::NotNow("the guest has taken its int3 away"),
            Self::FtraceInUse { .. } => {
                Remedy::NotNow("the guest's ftrace does not trace the function any more")
            }
            Self::TextChanged { .. } => Remedy::NotNow("the guest does not change its text there"),
            Self::Rewritten { .. } => Remedy::NotNow("the probes there are unregistered"),
            Self::Kprobe { .. } | Self::UnderKprobe { .. } => {
                Remedy::NotNow("the guest has unregistered its own kprobe")
            }
            Self::TooManyProbes { .. } => Remedy::NotNow("others are unregistered"),
            Self::Slot { .. } => Remedy::NotNow("probes that are stepped are unregistered"),
            Self::ModuleNotLoaded { .. } | Self::ModuleNeeded { .. } => {
                Remedy::NotNow("the module is loaded")
            }
        }
    }
}

fn forbidden(why: &Forbidden) -> Remedy {
    match why {
        Forbidden::Loading => Remedy::NotNow("the module is loaded"),
        Forbidden::LockPrefix => Remedy::NotNow("the guest has brought up a second processor"),
        _ => Remedy::Never,
    }
}

impl Unoptimized {
    /// Returns what a client that wants a jump can do.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Off => Remedy::NotNow("optimization is turned on"),
            Self::Internal
            | Self::Instructions(_)
            | Self::Forbidden { .. }
            | Self::Fixup { .. }
            | Self::Landing { .. }
            | Self::Unscannable
            | Self::HiddenKprobes
            | Self::NoPerCpu
            | Self::Build(_) => Remedy::Never,
            Self::Synchronous { .. } => Remedy::WrongRequest,
            Self::Neighbour { .. } => Remedy::NotNow("the other probe is unregistered"),
            Self::Interrupted => Remedy::NotNow("no task stands there any more"),
            Self::Kprobe { .. } | Self::KprobesChange => {
                Remedy::NotNow("the guest has unregistered its own kprobe")
            }
            Self::Hidden { .. } => Remedy::NotNow(
                "the guest has taken its own patch out; register the probe anew then",
            ),
            Self::NoRoom | Self::Memory(_) => Remedy::NotNow("other probes are unregistered"),
        }
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::Gva;

    use super::*;

    #[test]
    fn a_remedy_follows_from_what_is_in_the_way() {
        let at = Gva(0x1000);
        let why = Forbidden::NoInstr;
        assert_eq!(Refused::Forbidden { at, why }.remedy(), Remedy::Never);
        let why = Forbidden::Loading;
        let later = Remedy::NotNow("the module is loaded");
        assert_eq!(Refused::Forbidden { at, why }.remedy(), later);
        assert_eq!(Refused::NotText { at }.remedy(), Remedy::WrongRequest);
        let source = Unoptimized::Off;
        assert!(matches!(
            Refused::Unoptimized { at, source }.remedy(),
            Remedy::NotNow(_)
        ));
    }
}
