//! What a histogram says.

use std::num::NonZeroU64;

use crate::column::Column;
use crate::fetch::Filter;

/// What is counted, by what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Hits that agree in all of these are counted together; at least one.
    pub keys: Vec<Key>,
    /// What is added up beside the hits themselves.
    pub values: Vec<Value>,
    /// In what order entries are told; the first says most.
    pub sort: Vec<Order>,
    /// How many entries there are at most.
    pub size: usize,
    /// Which hits count; all when absent.
    pub filter: Option<Filter>,
}

impl Histogram {
    /// Whether hits are told apart by the kernel's stack, which probes do not record unasked.
    #[must_use]
    pub fn needs_stacks(&self) -> bool {
        self.keys.iter().any(Key::is_stack_trace)
    }
}

impl Key {
    /// Whether it is the kernel's stack, unless an argument is called so.
    #[must_use]
    pub fn is_stack_trace(&self) -> bool {
        matches!(self.field.as_str(), "stacktrace" | "common_stacktrace")
    }
}

/// A field, and what it is taken for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term<F> {
    /// Where its name begins.
    pub column: Column,
    /// Its name.
    pub field: String,
    /// What it is divided by first, towards zero.
    pub per: Option<NonZeroU64>,
    /// What is made, or told, of it.
    pub form: F,
}

/// A field by which hits are told apart.
pub type Key = Term<KeyForm>;

/// A field that is added up.
pub type Value = Term<ValueForm>;

/// What is made of a field that is a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    /// Itself.
    Plain,
    /// `.hex`: shown in hexadecimal.
    Hex,
    /// `.sym`: an address, shown as the symbol it lies in.
    Symbol,
    /// `.sym-offset`: the same with the offset.
    SymbolOffset,
    /// `.execname`: of a thread or process, shown with its name.
    ExecName,
    /// `.log2`: the exponent of the least power of two that is not less.
    Log2,
    /// `.bits`: how many bits it has: n of the numbers from 2^(n-1) on that are less than 2^n, 0 of 0. Those
    /// below 0 are counted together, as -1.
    Bits,
    /// `.buckets=N`: the greatest multiple of N that is not greater.
    Buckets(u64),
    /// `.usecs`: a time in microseconds.
    Usecs,
}

/// What is told of a field that is added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueForm {
    /// The sum.
    Sum,
    /// `.hex`: the sum in hexadecimal.
    Hex,
    /// `.avg`: the sum by the number of hits that it could be read at, towards zero.
    Average,
    /// `.min`: the least.
    Least,
    /// `.max`: the greatest.
    Greatest,
}

/// What entries are in order of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// What is compared.
    pub by: By,
    /// Whether the greatest come first.
    pub descending: bool,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// How many hits.
    Hits,
    /// The key at this position, from 0.
    Key(usize),
    /// The value at this position, from 0.
    Value(usize),
}
