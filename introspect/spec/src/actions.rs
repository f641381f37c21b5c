//! Actions at a hit, besides counting it.
//!
//! Invariant: all lists and byte strings here have a bounded size, which is checked when the probe is registered
//! ([`ProbeSpec::check`](crate::ProbeSpec::check)). So the actions of a hit allocate nothing and take a bounded
//! number of steps.

use std::time::Duration;

pub use hvprobe_arch::condition::{Comparison, Condition};
use hvprobe_arch::regs::Gpr;
pub use hvprobe_arch::regs::RegisterSet;
use hvprobe_arch::{Gva, Regs};

use crate::error::SpecError;
use crate::item::Item;
use crate::limits::{CAPTURE_MAX, CHANGES_MAX, FRAMES_MAX, ITEMS_MAX, POINTERS_MAX};
use crate::predicate::Predicate;

/// Actions at a hit, besides counting and reporting it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// Conditions that must all hold. If one does not, the hit is ignored, and none of the following happens. For a
    /// return probe they are checked at the entry; if one does not hold, the call is ignored (the entry handler's
    /// veto).
    pub when: Vec<Condition>,
    /// Filter for the hits that satisfy `when`. A hit that it rejects is ignored in the same way. For a return
    /// probe it is checked at the return.
    pub filter: Option<Predicate>,
    /// Registers that events contain.
    pub registers: RegisterSet,
    /// Items that are read at the probepoint. For a return probe they are read at entry, kept with the call as
    /// its private data, and reported at the return.
    pub capture: Vec<Item>,
    /// Items that a return probe reads at the return.
    pub capture_at_return: Vec<Item>,
    /// Changes that the pre-handler makes. For a return probe they are made at the return.
    pub changes: Vec<Change>,
    /// Where the guest continues after the pre-handler.
    pub then: Then,
    /// Whether a post-handler reports the state after the displaced instruction.
    pub post: bool,
    /// Whether faults of the displaced instruction are reported as events.
    pub faults: bool,
    /// What the guest waits for at the hit; `None` if it does not wait.
    pub hold: Option<Hold>,
    /// Whether a virtual CPU waits for room if there is none for the hit's event. Otherwise, the event is lost.
    pub wait_for_room: bool,
}

impl Actions {
    /// Returns whether a hit with these registers satisfies the conditions ([`Actions::when`]). The filter is not
    /// checked here.
    #[inline]
    #[must_use]
    pub fn apply_to(&self, regs: &Regs) -> bool {
        self.when.is_empty() || self.conditions_hold(regs)
    }

    /// Returns whether a kprobe does more at a hit than observe.
    #[inline]
    #[must_use]
    pub fn act(&self) -> bool {
        !self.changes.is_empty() || self.hold.is_some() || self.then != Then::Proceed
    }

    /// Returns whether the actions may access memory of the process: directly, or by a client's decision.
    #[must_use]
    pub fn reach_process(&self) -> bool {
        let mut items = self.capture.iter().chain(&self.capture_at_return);
        let mut changes = self.changes.iter();
        items.any(Item::reaches_process)
            || changes.any(|change| matches!(change, Change::Memory { .. }))
            || matches!(self.hold, Some(Hold::Ask { .. }))
    }

    /// Returns whether the kernel's stack is recorded.
    #[must_use]
    pub fn record_stacks(&self) -> bool {
        let mut items = self.capture.iter().chain(&self.capture_at_return);
        items.any(Item::is_stack_trace)
    }

    /// Checks the captured items.
    ///
    /// # Errors
    /// Returns the exceeded limit, or the item that has no bytes.
    pub fn check_capture(&self) -> Result<(), SpecError> {
        check_capture(&[&self.capture, &self.capture_at_return])
    }

    /// Returns whether all conditions hold. Not inlined into [`Actions::apply_to`], so that a hit of a probe
    /// without conditions need not have all registers at hand.
    #[inline(never)]
    fn conditions_hold(&self, regs: &Regs) -> bool {
        let holds = |condition: &Condition| condition.holds(regs.get(condition.register));
        self.when.iter().all(holds)
    }
}

/// Change at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Sets a register.
    Register {
        /// Register.
        register: Gpr,
        /// New value.
        value: u64,
    },
    /// Writes guest memory: at `base + offset`, or at the address `offset` if there is no base.
    Memory {
        /// Register with the address.
        base: Option<Gpr>,
        /// Offset that is added to the address.
        offset: i64,
        /// Bytes to write; at most [`CAPTURE_MAX`].
        bytes: Box<[u8]>,
    },
}

/// Where the guest continues after a pre-handler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Then {
    /// At the displaced instruction.
    #[default]
    Proceed,
    /// In the caller, as if the function had returned this value at once (error injection). Only at a
    /// function's entry.
    Return(u64),
    /// At this address; the displaced instruction does not take effect and post-handlers do not run ("changing
    /// execution path").
    Jump(Gva),
}

/// Decision about a hit: that of a client, or the default if no client answers before the deadline.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Changes to make.
    pub changes: Vec<Change>,
    /// Where the guest continues.
    pub then: Then,
}

/// What the guest waits for at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// The whole machine is paused until a client resumes it.
    Stop,
    /// This virtual CPU waits for a client's decision.
    Ask {
        /// Maximum wait.
        deadline: Duration,
        /// Decision if no client answers in time.
        default: Decision,
    },
}

impl Decision {
    /// Checks a client's decision.
    ///
    /// # Errors
    /// Returns the exceeded limit.
    pub fn check(&self) -> Result<(), SpecError> {
        check_changes(&self.changes)
    }
}

pub(crate) fn at_most(what: &'static str, count: usize, max: usize) -> Result<(), SpecError> {
    if count > max {
        return Err(SpecError::TooMany { what, count, max });
    }
    Ok(())
}

fn check_capture(captures: &[&[Item]]) -> Result<(), SpecError> {
    let items = || captures.iter().copied().flatten();
    at_most("items to capture", items().count(), ITEMS_MAX)?;
    for item in items() {
        match item {
            Item::Fetched(fetched) => {
                at_most("pointers to follow", fetched.pointers.len(), POINTERS_MAX)?;
            }
            Item::StackTrace(frames) => {
                at_most("addresses of a stack", (*frames).into(), FRAMES_MAX)?;
            }
            Item::Memory { .. } | Item::Stack(_) => {}
        }
    }
    if let Some(index) = items().position(Item::is_empty) {
        return Err(SpecError::EmptyItem { index });
    }
    let bytes = items().map(Item::len).sum();
    if bytes > CAPTURE_MAX {
        return Err(SpecError::CaptureTooLong { bytes });
    }
    Ok(())
}

pub(crate) fn check_changes(changes: &[Change]) -> Result<(), SpecError> {
    at_most("changes", changes.len(), CHANGES_MAX)?;
    for change in changes {
        match change {
            Change::Register { .. } => {}
            Change::Memory { bytes, .. } => {
                at_most("bytes to write at one place", bytes.len(), CAPTURE_MAX)?;
            }
        }
    }
    Ok(())
}
