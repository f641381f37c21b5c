//! Budgets of probes.

use hvprobe_spec::{Budget, Excess};

use super::enums::WireEnum as _;
use super::meaningless::Meaningless;
use super::value::{Wire, small};
use crate::v1;

impl Wire for Budget {
    type Message = v1::Budget;

    fn to_wire(&self) -> v1::Budget {
        v1::Budget {
            max_rate: self.max_rate.unwrap_or_default(),
            max_cpu_percent: self.max_share.unwrap_or_default().into(),
            excess: self.excess.number(),
        }
    }

    fn from_wire(wire: v1::Budget) -> Result<Self, Meaningless> {
        let share = small("a share of the time", wire.max_cpu_percent)?;
        Ok(Self {
            max_rate: (wire.max_rate > 0).then_some(wire.max_rate),
            max_share: (share > 0).then_some(share),
            excess: Excess::numbered(wire.excess)?.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_go_out_as_they_came_in() {
        for (max_rate, max_cpu_percent, excess) in [
            (100, 0, v1::Excess::Sample),
            (0, 5, v1::Excess::Disable),
            (u32::MAX, 100, v1::Excess::Sample),
        ] {
            let wire = v1::Budget {
                max_rate,
                max_cpu_percent,
                excess: excess.into(),
            };
            assert_eq!(Budget::from_wire(wire).unwrap().to_wire(), wire);
        }
        let unspecified = Budget::from_wire(v1::Budget::default()).unwrap();
        assert_eq!(unspecified, Budget::default());
    }

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        let share = v1::Budget {
            max_cpu_percent: 256,
            ..Default::default()
        };
        let policy = v1::Budget {
            excess: 9,
            ..Default::default()
        };
        assert!(Budget::from_wire(share).is_err() && Budget::from_wire(policy).is_err());
    }
}
