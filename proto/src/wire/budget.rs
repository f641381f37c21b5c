//! Budgets of probes: conversion between the wire and the engine.

use crate::v1;
use hvprobe_spec::{Budget, Excess};

use super::enums::WireEnum as _;
use super::meaningless::Meaningless;

/// Converts a requested budget. The engine checks its limits.
///
/// # Errors
/// When a field means nothing to the engine.
pub fn budget(wire: v1::Budget) -> Result<Budget, Meaningless> {
    let max_share = match u8::try_from(wire.max_cpu_percent) {
        Ok(0) => None,
        Ok(percent) => Some(percent),
        Err(_) => {
            return Err(Meaningless::TooLarge {
                what: "a share of the time",
                number: wire.max_cpu_percent,
            });
        }
    };
    Ok(Budget {
        max_rate: (wire.max_rate > 0).then_some(wire.max_rate),
        max_share,
        excess: Excess::numbered(wire.excess)?.unwrap_or_default(),
    })
}

/// Converts a budget to the wire.
#[must_use]
pub fn to_wire(budget: &Budget) -> v1::Budget {
    v1::Budget {
        max_rate: budget.max_rate.unwrap_or_default(),
        max_cpu_percent: budget.max_share.unwrap_or_default().into(),
        excess: budget.excess.number(),
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
            assert_eq!(to_wire(&budget(wire).unwrap()), wire);
        }
        let unspecified = budget(v1::Budget::default()).unwrap();
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
        assert!(budget(share).is_err() && budget(policy).is_err());
    }
}
