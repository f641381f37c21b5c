//! Budgets: how much of the machine a probe's hits may take.

use crate::error::SpecError;

/// What a probe's hits may take. At least one limit is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Hits per second, all virtual CPUs together; 1 or more.
    pub max_rate: Option<u32>,
    /// Per cent of the time of all virtual CPUs that may be spent on its events, 1 to 100. What
    /// counts is what events show as their cost, which does not include the exit itself.
    pub max_share: Option<u8>,
    /// What becomes of hits beyond it.
    pub excess: Excess,
}

/// What becomes of hits beyond a budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Excess {
    /// They are counted, and make no event until the next window begins.
    #[default]
    Sample,
    /// The probe is turned off, until a user enables it again.
    Disable,
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
