//! A histogram whose fields have been found: what of an event makes its keys, and what is added up.
//!
//! Invariant: as with a [`Predicate`], all that depends on types was decided before: of an event there are
//! numbers and bytes only.

use std::num::NonZeroU64;

use crate::histogram::KeyForm;
use crate::predicate::{Field, Predicate};
use crate::shape::Shape;

/// What of the events of one probe is counted, by what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aggregate {
    /// What tells entries apart.
    pub keys: Vec<Part>,
    /// What is added up; numbers only.
    pub values: Vec<Measured>,
    /// Which events count; all when absent.
    pub filter: Option<Predicate>,
}

/// A key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it is made of.
    pub of: Measured,
    /// How; other than [`KeyForm::Plain`] of numbers only.
    pub form: KeyForm,
    /// The type of what it is made of.
    pub shape: Shape,
}

/// A value of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Measured {
    /// One that can be compared, too.
    Field(Field),
    /// When it was: nanoseconds of `CLOCK_MONOTONIC`.
    Time,
    /// How long the call took: nanoseconds. Of events of return probes.
    Duration,
    /// A number divided, towards zero.
    Divided {
        /// Which.
        of: Box<Measured>,
        /// By what.
        by: NonZeroU64,
    },
    /// The kernel's stack: the captured item at this position, from 0. A key only.
    StackTrace(usize),
}

impl Measured {
    /// Whether it is a number in two's complement.
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
