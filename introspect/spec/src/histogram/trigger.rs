//! A parsed histogram.

use std::num::NonZeroU64;

use crate::column::Column;
use crate::fetch::Filter;

/// Histogram of hits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Keys; hits that agree in all of them are counted together. At least one.
    pub keys: Vec<Key>,
    /// Values that are added up, besides the number of hits.
    pub values: Vec<Value>,
    /// Sort order of the entries; the first field has precedence.
    pub sort: Vec<Order>,
    /// Maximum number of entries.
    pub size: usize,
    /// Filter for the hits; if absent, all hits are counted.
    pub filter: Option<Filter>,
}

impl Histogram {
    /// Returns whether the kernel's stack is a key. Probes record the stack only on request.
    #[must_use]
    pub fn needs_stacks(&self) -> bool {
        self.keys.iter().any(Key::is_stack_trace)
    }
}

impl Key {
    /// Returns whether the key has the name of the kernel's stack. Does not check whether an argument of the probe
    /// also has this name; if so, the key is that argument.
    #[must_use]
    pub fn is_stack_trace(&self) -> bool {
        matches!(self.field.as_str(), "stacktrace" | "common_stacktrace")
    }
}

/// Field, with the form in which it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term<F> {
    /// Column of the name.
    pub column: Column,
    /// Name of the field.
    pub field: String,
    /// Divisor that is applied first, rounding towards zero.
    pub per: Option<NonZeroU64>,
    /// Form of the field.
    pub form: F,
}

/// Field that distinguishes hits.
pub type Key = Term<KeyForm>;

/// Field that is added up.
pub type Value = Term<ValueForm>;

/// Form of a field that is a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    /// The field itself.
    Plain,
    /// `.hex`: shown in hexadecimal.
    Hex,
    /// `.sym`: an address, shown as the symbol that contains it.
    Symbol,
    /// `.sym-offset`: an address, shown as a symbol with an offset.
    SymbolOffset,
    /// `.execname`: the id of a thread or process, shown with its name.
    ExecName,
    /// `.log2`: the exponent of the least power of two that is not less than the value.
    Log2,
    /// `.bits`: the number of significant bits: n for the numbers from 2^(n-1) to 2^n - 1, and 0 for 0. Negative
    /// numbers are counted together, as -1.
    Bits,
    /// `.buckets=N`: the greatest multiple of N that is not greater than the value.
    Buckets(u64),
    /// `.usecs`: a time in microseconds.
    Usecs,
}

/// Form of a field that is added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueForm {
    /// The sum.
    Sum,
    /// `.hex`: the sum in hexadecimal.
    Hex,
    /// `.avg`: the sum divided by the number of hits at which the field was readable, rounded towards zero.
    Average,
    /// `.min`: the least value.
    Least,
    /// `.max`: the greatest value.
    Greatest,
}

/// Sort criterion of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Field that is compared.
    pub by: By,
    /// Whether the greatest entries come first.
    pub descending: bool,
}

/// Field by which entries are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Number of hits.
    Hits,
    /// Key at this position, from 0.
    Key(usize),
    /// Value at this position, from 0.
    Value(usize),
}
