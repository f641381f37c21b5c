//! Budgets: limits for the load that a probe's hits put on the machine.

use crate::error::SpecError;

/// Limits for the hits of a probe. At least one limit is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Maximum number of hits per second of all virtual CPUs together; 1 or more.
    pub max_rate: Option<u32>,
    /// Maximum share of the time of all virtual CPUs that may be spent on the probe's events, in per cent, 1 to
    /// 100. The time is the sum of the costs shown in events, which do not include the exits themselves.
    pub max_share: Option<u8>,
    /// What happens to hits beyond the limits.
    pub excess: Excess,
}

/// What happens to hits beyond a budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Excess {
    /// The hits are counted, but make no events until the next window of about a second begins.
    #[default]
    Sample,
    /// The probe is disabled until a user enables it again.
    Disable,
}

impl Excess {
    /// Returns the name by which the policy is requested and shown.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sample => "sample",
            Self::Disable => "disable",
        }
    }
}

impl Budget {
    pub(crate) fn check(&self) -> Result<(), SpecError> {
        match (self.max_rate, self.max_share) {
            (None, None) => Err(SpecError::NoLimit),
            (Some(0), _) => Err(SpecError::NoRate),
            (_, Some(percent)) if !(1..=100).contains(&percent) => Err(SpecError::Share(percent)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_mean_nothing_are_refused() {
        let check = |max_rate, max_share| {
            let excess = Excess::Sample;
            let budget = Budget {
                max_rate,
                max_share,
                excess,
            };
            budget.check()
        };
        assert_eq!(check(None, None), Err(SpecError::NoLimit));
        assert_eq!(check(Some(0), None), Err(SpecError::NoRate));
        assert_eq!(check(Some(1), Some(0)), Err(SpecError::Share(0)));
        assert_eq!(check(None, Some(101)), Err(SpecError::Share(101)));
        assert_eq!(check(Some(1), Some(100)), Ok(()));
    }
}
