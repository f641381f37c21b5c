//! What a user asks for: where a probe goes, how, and what happens at its hits.

use std::time::Duration;

use crate::actions::{Actions, Hold, Then, at_most, check_changes};
use crate::budget::Budget;
use crate::definition::{Definition, Kind};
use crate::error::SpecError;
use crate::item::Item;
use crate::limits::{CHANGES_MAX, DEADLINE_MAX};
use crate::mechanism::Mechanism;

/// What a user asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeSpec {
    /// Where, of which kind, and under which name.
    pub definition: Definition,
    /// Register it without arming it.
    pub disabled: bool,
    /// The mechanism to use at least; the cheapest that keeps the semantics when absent.
    pub mechanism: Option<Mechanism>,
    /// For a return probe without a number of instances in its definition: add instances instead of
    /// missing calls.
    pub maxactive_auto: bool,
    /// What its hits may take; all they want when absent.
    pub budget: Option<Budget>,
    /// Of a definition without arguments at a function's entry, or of a return probe: show those of the
    /// function, and what it returns, in place of the registers, where types tell them.
    pub default_arguments: bool,
    /// The build of the module that the definition names, if it was made for one: it goes nowhere else.
    pub module_build_id: Option<Vec<u8>>,
    /// What happens at a hit.
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
    /// Whether this is a return probe.
    #[must_use]
    pub fn is_return(&self) -> bool {
        matches!(self.definition.kind, Kind::Return { .. })
    }

    /// Checks all that does not depend on the guest.
    ///
    /// # Errors
    /// What makes no sense or exceeds a limit.
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
