//! What happens at a hit, besides counting it.
//!
//! Invariant: everything here has a bounded size, checked when the probe is registered
//! ([`ProbeSpec::check`](crate::ProbeSpec::check)), so that carrying it out at a hit allocates nothing
//! and ends soon.

use std::time::Duration;

pub use hvprobe_arch::condition::{Comparison, Condition};
use hvprobe_arch::regs::Gpr;
pub use hvprobe_arch::regs::RegisterSet;
use hvprobe_arch::{Gva, Regs};

use crate::error::SpecError;
use crate::item::Item;
use crate::limits::{CAPTURE_MAX, CHANGES_MAX, FRAMES_MAX, ITEMS_MAX, POINTERS_MAX};
use crate::predicate::Predicate;

/// What happens at a hit, apart from counting it and reporting it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// All must hold, or this hit is left alone and nothing of the following happens. For a return
    /// probe: at entry, or this call is left alone (the entry handler's veto).
    pub when: Vec<Condition>,
    /// Of the hits that these leave, those that it lets pass, or this hit is left alone just so. For a return
    /// probe: at the return.
    pub filter: Option<Predicate>,
    /// Which registers events show.
    pub registers: RegisterSet,
    /// What is read at the probepoint. For a return probe: at entry, kept with the call as its
    /// private data, and shown at the return.
    pub capture: Vec<Item>,
    /// Return probes: what is read at the return.
    pub capture_at_return: Vec<Item>,
    /// What is changed by the pre-handler. For a return probe: at the return.
    pub changes: Vec<Change>,
    /// Where the guest goes on after the pre-handler.
    pub then: Then,
    /// Whether a post-handler reports the state after the displaced instruction.
    pub post: bool,
    /// Whether faults of the displaced instruction are reported as events.
    pub faults: bool,
    /// Whether the guest waits at the hit, and for whom.
    pub hold: Option<Hold>,
    /// Whether a hit for which there is no room has its virtual CPU wait for some, rather than be lost.
    pub wait_for_room: bool,
}

impl Actions {
    /// Whether they happen at a hit with these registers.
    #[inline]
    #[must_use]
    pub fn apply_to(&self, regs: &Regs) -> bool {
        self.when.is_empty() || self.conditions_hold(regs)
    }

    /// Whether a kprobe does more at a hit than to look.
    #[inline]
    #[must_use]
    pub fn act(&self) -> bool {
        !self.changes.is_empty() || self.hold.is_some() || self.then != Then::Proceed
    }

    /// Whether memory is read or written that may be the process's, or may be as a client decides.
    #[must_use]
    pub fn reach_process(&self) -> bool {
        let mut items = self.capture.iter().chain(&self.capture_at_return);
        let mut changes = self.changes.iter();
        items.any(Item::reaches_process)
            || changes.any(|change| matches!(change, Change::Memory { .. }))
            || matches!(self.hold, Some(Hold::Ask { .. }))
    }

    /// Whether the kernel's stack is recorded.
    #[must_use]
    pub fn record_stacks(&self) -> bool {
        let mut items = self.capture.iter().chain(&self.capture_at_return);
        items.any(Item::is_stack_trace)
    }

    /// Checks what is captured.
    ///
    /// # Errors
    /// What exceeds a limit.
    pub fn check_capture(&self) -> Result<(), SpecError> {
        check_capture(&[&self.capture, &self.capture_at_return])
    }

    /// Apart from [`Actions::apply_to`], so that most hits need not have all registers at hand.
    #[inline(never)]
    fn conditions_hold(&self, regs: &Regs) -> bool {
        let holds = |condition: &Condition| condition.holds(regs.get(condition.register));
        self.when.iter().all(holds)
    }
}

/// Something changed at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A register is set.
    Register {
        /// Which.
        register: Gpr,
        /// To what.
        value: u64,
    },
    /// Guest memory is written: at `base + offset`, or at the address `offset` without a base.
    Memory {
        /// The register that holds the address.
        base: Option<Gpr>,
        /// Added to it.
        offset: i64,
        /// What is written; at most [`CAPTURE_MAX`] bytes.
        bytes: Box<[u8]>,
    },
}

/// Where the guest goes on after a pre-handler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Then {
    /// With the displaced instruction.
    #[default]
    Proceed,
    /// In the caller, as if the function had returned this at once (error injection). Only at a
    /// function's entry.
    Return(u64),
    /// Here; the displaced instruction does not take effect and post-handlers do not run ("changing
    /// execution path").
    Jump(Gva),
}

/// What a client, or a deadline, decided at a hit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// What is changed.
    pub changes: Vec<Change>,
    /// Where the guest goes on.
    pub then: Then,
}

/// For whom the guest waits at a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// The whole machine is paused until a client resumes it.
    Stop,
    /// This virtual CPU waits for a client's decision.
    Ask {
        /// How long.
        deadline: Duration,
        /// What is done when no client answers in time.
        default: Decision,
    },
}

impl Decision {
    /// Checks what a client decided.
    ///
    /// # Errors
    /// What exceeds a limit.
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
