//! Histograms: what is counted by which keys.
//!
//! The language is that of the kernel's `hist` triggers (Documentation/trace/histogram.rst):
//!
//! ```text
//! histogram = ["hist:"] clause {":" clause} [blanks "if" blanks FILTER]
//! clause    = "keys=" key {"," key} | "vals=" value {"," value} | "sort=" order {"," order} | "size=" N
//! key       = FIELD ["/" N] ["." ("hex" | "sym" | "sym-offset" | "execname" | "log2" | "buckets=" N | "usecs")]
//! value     = FIELD ["/" N] ["." ("hex" | "avg" | "min" | "max")] | "hitcount"
//! order     = (FIELD | "hitcount") ["." ("ascending" | "descending")]
//! ```
//!
//! FIELD is the name of an argument of the probe, or of something that every event has. `avg`, `min`,
//! `max` and dividing are ours. What is kept true: nothing here knows a probe; which fields there are is looked up by
//! others, who say at a field's column what is wrong with it. What is printed reads as what was printed.

mod print;
mod read;
#[cfg(test)]
mod tests;
mod trigger;

pub use read::{KEYS_MAX, SIZE_MAX, VALUES_MAX, read_histogram};
pub use trigger::{By, Histogram, Key, KeyForm, Order, Term, Value, ValueForm};
