//! What a user asks for: where a probe goes and what happens at its hits.
//!
//! Invariant: everything here has a bounded size, checked when the probe is registered
//! ([`ProbeSpec::check`]), so that carrying it out at a hit allocates nothing and ends soon.

use std::time::Duration;

pub use hvprobe_arch::condition::{Comparison, Condition};
use hvprobe_arch::regs::Gpr;
pub use hvprobe_arch::regs::RegisterSet;
use hvprobe_arch::{Gva, Regs};

use super::Mechanism;
use super::budget::Budget;
use crate::definition::{Definition, Kind};

/// The most bytes one event carries of what was captured: memory, stack words and, for a return
/// probe, its private data.
pub const CAPTURE_MAX: usize = 248;
/// The most items one capture has.
pub const ITEMS_MAX: usize = 32;
/// The most changes, and the most conditions, of one probe.
pub const CHANGES_MAX: usize = 32;
/// The longest a hit may wait for a client.
pub const DEADLINE_MAX: Duration = Duration::from_secs(60);

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
            actions: Actions::default(),
        }
    }
}

/// What happens at a hit, apart from counting it and reporting it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// All must hold, or this hit is left alone and nothing of the following happens. For a return
    /// probe: at entry, or this call is left alone (the entry handler's veto).
    pub when: Vec<Condition>,
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
}

impl Actions {
    /// Whether they happen at a hit with these registers.
    #[inline]
    pub(super) fn apply_to(&self, regs: &Regs) -> bool {
        self.when.is_empty() || self.conditions_hold(regs)
    }

    /// Whether a kprobe does more at a hit than to look.
    #[inline]
    pub(super) fn act(&self) -> bool {
        !self.changes.is_empty() || self.hold.is_some() || self.then != Then::Proceed
    }

    /// Whether memory is read or written, other than the stack, or may be as a client decides.
    pub(super) fn reach_memory(&self) -> bool {
        let mut items = self.capture.iter().chain(&self.capture_at_return);
        let mut changes = self.changes.iter();
        items.any(|item| matches!(item, Item::Memory { .. }))
            || changes.any(|change| matches!(change, Change::Memory { .. }))
            || matches!(self.hold, Some(Hold::Ask { .. }))
    }

    /// Apart from [`Actions::apply_to`], so that most hits need not have all registers at hand.
    #[inline(never)]
    fn conditions_hold(&self, regs: &Regs) -> bool {
        let holds = |condition: &Condition| condition.holds(regs.get(condition.register));
        self.when.iter().all(holds)
    }
}

/// Something read at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// `len` bytes at `base + offset`.
    Memory {
        /// The register that holds the address.
        base: Gpr,
        /// Added to it.
        offset: i64,
        /// How many bytes.
        len: u16,
    },
    /// The 64-bit word this many words above the stack pointer (`$stackN`).
    Stack(u16),
}

impl Item {
    /// How many bytes it makes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Memory { len, .. } => usize::from(*len),
            Self::Stack(_) => 8,
        }
    }

    /// Whether it makes none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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

/// Why a specification makes no sense, apart from where the probe is to go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// More than an event can carry.
    #[error("captures {bytes} bytes; an event carries at most {CAPTURE_MAX}")]
    CaptureTooLong {
        /// How many were asked for.
        bytes: usize,
    },
    /// A list is too long.
    #[error("{count} {what}; at most {max} are possible")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many were given.
        count: usize,
        /// How many may be.
        max: usize,
    },
    /// An item of no bytes.
    #[error("item {index} of the capture is 0 bytes long")]
    EmptyItem {
        /// Its position, from 0.
        index: usize,
    },
    /// Only return probes do that.
    #[error("{what} belongs to return probes: write `r SYMBOL` or `SYMBOL%return`")]
    ReturnOnly {
        /// What was asked for.
        what: &'static str,
    },
    /// Return probes cannot do that.
    #[error("a return probe has no {what}: use a probe at the function's entry")]
    NotForReturn {
        /// What was asked for.
        what: &'static str,
    },
    /// The decision says where the guest goes on.
    #[error("who asks for a decision cannot say where the guest goes on: put it into the default")]
    PathAndQuestion,
    /// A deadline out of range.
    #[error("a deadline of {deadline:?}; between 1 ms and {DEADLINE_MAX:?} are possible")]
    Deadline {
        /// What was asked for.
        deadline: Duration,
    },
    /// Both a number of instances and `auto`.
    #[error("both {0} instances and automatic growth asked for: give one of them")]
    MaxactiveTwice(u32),
    /// A budget without a limit.
    #[error("a budget needs a limit: hits per second, or a share of the time")]
    NoLimit,
    /// No hit at all.
    #[error("a budget of 0 hits per second: register the probe disabled instead")]
    NoRate,
    /// Not a share.
    #[error("a budget of {0} % of the time; 1 to 100 % are possible")]
    Share(u8),
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
        needs_return(self.maxactive_auto, "maxactive")?;
        at_most("conditions", actions.when.len(), CHANGES_MAX)?;
        check_capture(&[&actions.capture, &actions.capture_at_return])?;
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

impl Decision {
    /// Checks what a client decided.
    ///
    /// # Errors
    /// What exceeds a limit.
    pub fn check(&self) -> Result<(), SpecError> {
        check_changes(&self.changes)
    }
}

fn at_most(what: &'static str, count: usize, max: usize) -> Result<(), SpecError> {
    if count > max {
        return Err(SpecError::TooMany { what, count, max });
    }
    Ok(())
}

fn check_capture(captures: &[&[Item]]) -> Result<(), SpecError> {
    let items = || captures.iter().copied().flatten();
    at_most("items to capture", items().count(), ITEMS_MAX)?;
    if let Some(index) = items().position(Item::is_empty) {
        return Err(SpecError::EmptyItem { index });
    }
    let bytes = items().map(Item::len).sum();
    if bytes > CAPTURE_MAX {
        return Err(SpecError::CaptureTooLong { bytes });
    }
    Ok(())
}

fn check_changes(changes: &[Change]) -> Result<(), SpecError> {
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
