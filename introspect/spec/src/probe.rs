//! Specification of a probe: its place, its mechanism, and the actions at its hits.

use std::time::Duration;

use crate::actions::{Actions, Hold, Then, at_most, check_changes};
use crate::budget::Budget;
use crate::definition::{Definition, Kind};
use crate::error::SpecError;
use crate::item::Item;
use crate::limits::{CHANGES_MAX, DEADLINE_MAX};
use crate::mechanism::Mechanism;

/// Specification of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeSpec {
    /// Place, kind and name.
    pub definition: Definition,
    /// Whether the probe is registered without being armed.
    pub disabled: bool,
    /// Cheapest mechanism that may be used; if absent, all mechanisms may be used. The probe gets the cheapest
    /// allowed mechanism that keeps the guest's behaviour. Exception: if this is [`Mechanism::Optimized`], a probe
    /// that cannot be optimized is refused.
    pub mechanism: Option<Mechanism>,
    /// For a return probe whose definition gives no number of instances: whether instances are added when all are
    /// in use, so that no call is missed.
    pub maxactive_auto: bool,
    /// Budget of the hits; unlimited when absent.
    pub budget: Option<Budget>,
    /// Whether the function's arguments and result are shown instead of registers. This applies to a probe without
    /// arguments at a function's entry, and to a return probe without arguments. It needs type information.
    pub default_arguments: bool,
    /// Build id of the module in the definition, if the definition is for one build only. The probe is not
    /// planted in other builds.
    pub module_build_id: Option<Vec<u8>>,
    /// Actions at a hit.
    pub actions: Actions,
}

impl From<Definition> for ProbeSpec {
    fn from(definition: Definition) -> Self {
        Self {
            definition,
            disabled: false,
            mechanism: None,
            maxactive_auto: false,
            budget: None,
            default_arguments: false,
            module_build_id: None,
            actions: Actions::default(),
        }
    }
}

impl ProbeSpec {
    /// Returns whether this is a return probe.
    #[must_use]
    pub fn is_return(&self) -> bool {
        matches!(self.definition.kind, Kind::Return { .. })
    }

    /// Checks everything that does not depend on the guest.
    ///
    /// # Errors
    /// Returns the contradiction or the exceeded limit.
    pub fn check(&self) -> Result<(), SpecError> {
        let actions = &self.actions;
        if let Some(budget) = &self.budget {
            budget.check()?;
        }
        if let Kind::Return {
            maxactive: Some(number),
        } = self.definition.kind
            && self.maxactive_auto
        {
            return Err(SpecError::MaxactiveTwice(number));
        }
        let only = |unwanted: bool, what| match (unwanted, self.is_return()) {
            (true, true) => Err(SpecError::NotForReturn { what }),
            _ => Ok(()),
        };
        only(actions.then != Then::Proceed, "change of path")?;
        only(actions.post, "post-handler")?;
        only(actions.faults, "fault handler")?;
        only(actions.hold.is_some(), "stop or decision at a hit")?;
        let needs_return = |wanted: bool, what| match (wanted, self.is_return()) {
            (true, false) => Err(SpecError::ReturnOnly { what }),
            _ => Ok(()),
        };
        needs_return(
            !actions.capture_at_return.is_empty(),
            "a capture at the return",
        )?;
        only(
            actions.capture.iter().any(Item::is_stack_trace),
            "stack of its entry, but one of its return",
        )?;
        needs_return(self.maxactive_auto, "maxactive")?;
        at_most("conditions", actions.when.len(), CHANGES_MAX)?;
        actions.check_capture()?;
        check_changes(&actions.changes)?;
        if let Some(Hold::Ask { deadline, default }) = &actions.hold {
            if actions.then != Then::Proceed {
                return Err(SpecError::PathAndQuestion);
            }
            check_changes(&default.changes)?;
            if *deadline < Duration::from_millis(1) || *deadline > DEADLINE_MAX {
                return Err(SpecError::Deadline {
                    deadline: *deadline,
                });
            }
        }
        Ok(())
    }
}
