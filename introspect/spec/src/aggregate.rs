//! A histogram with resolved fields: the parts of an event that make its keys, and the values that are added
//! up.
//!
//! Invariant: as with a [`Predicate`], everything that depends on types is already resolved. Only numbers and
//! bytes of an event are left.

use std::num::NonZeroU64;

use crate::histogram::KeyForm;
use crate::predicate::{Field, Predicate};
use crate::shape::Shape;

/// Histogram of the events of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aggregate {
    /// Keys that distinguish entries.
    pub keys: Vec<Part>,
    /// Values that are added up; numbers only.
    pub values: Vec<Measured>,
    /// Filter for the events to count; if absent, all are counted.
    pub filter: Option<Predicate>,
}

/// Part of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Value of the event.
    pub of: Measured,
    /// Form of the value; forms other than [`KeyForm::Plain`] apply to numbers only.
    pub form: KeyForm,
    /// Type of the value.
    pub shape: Shape,
}

/// Value of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Measured {
    /// Field of the kind that filters compare.
    Field(Field),
    /// Time of the event: nanoseconds of `CLOCK_MONOTONIC`.
    Time,
    /// Duration of the call in nanoseconds. Only in events of return probes.
    Duration,
    /// A number divided by a constant, rounded towards zero.
    Divided {
        /// Dividend.
        of: Box<Measured>,
        /// Divisor.
        by: NonZeroU64,
    },
    /// Kernel stack: the captured item at this position, from 0. Only as a key.
    StackTrace(usize),
}

impl Measured {
    /// Returns whether the value is a number in two's complement.
    #[must_use]
    pub fn is_signed(&self) -> bool {
        match self {
            Self::Field(Field::Number { signed, .. }) => *signed,
            Self::Field(Field::Pid | Field::Tgid) => true,
            Self::Divided { of, .. } => of.is_signed(),
            Self::Field(Field::Text(_) | Field::Cpu)
            | Self::Time
            | Self::Duration
            | Self::StackTrace(_) => false,
        }
    }
}
