//! Histograms: counts and sums of hits by keys.
//!
//! The language is that of the kernel's `hist` triggers (Documentation/trace/histogram.rst):
//!
//! ```text
//! histogram = ["hist:"] clause {":" clause} [blanks "if" blanks FILTER]
//! clause    = "keys=" key {"," key} | "vals=" value {"," value} | "sort=" order {"," order} | "size=" N
//! key       = FIELD ["/" N] ["." form]
//! form      = "hex" | "sym" | "sym-offset" | "execname" | "log2" | "bits" | "buckets=" N | "usecs"
//! value     = FIELD ["/" N] ["." ("hex" | "avg" | "min" | "max")] | "hitcount"
//! order     = (FIELD | "hitcount") ["." ("ascending" | "descending")]
//! ```
//!
//! FIELD is the name of an argument of the probe, or of a field that every event has. `bits`, `avg`, `min`, `max`
//! and division are extensions of ours. Invariants: nothing here depends on a probe. Other modules look up the
//! fields and report errors at their columns. A printed form parses to the value that was printed.

mod print;
mod read;
#[cfg(test)]
mod tests;
mod trigger;

pub use read::{KEYS_MAX, SIZE_MAX, VALUES_MAX, read_histogram};
pub use trigger::{By, Histogram, Key, KeyForm, Order, Term, Value, ValueForm};
