//! Filters: which hits of a probe count.

use crate::column::Column;

/// Which hits count: what follows `if` in a definition.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Filter {
    /// `FIELD OPERATOR VALUE`.
    Test(Test),
    /// `!FILTER`: those that do not.
    Not(Box<Self>),
    /// `FILTER && FILTER`: those for which both hold.
    And(Box<Self>, Box<Self>),
    /// `FILTER || FILTER`: those for which one holds at least.
    Or(Box<Self>, Box<Self>),
}

/// One comparison.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Test {
    /// Where the field's name begins.
    pub column: Column,
    /// The name of an argument or of a common field (`pid`, `tgid`, `comm`, `cpu`).
    pub field: String,
    /// What of the field is compared.
    pub form: Form,
    /// How to compare.
    pub operator: Operator,
    /// Where the value begins.
    pub value_column: Column,
    /// What to compare with.
    pub value: Value,
}

/// What of a field is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// Itself.
    #[default]
    Plain,
    /// `.function`: the function that it is an address in.
    Function,
    /// `.ustring`: the text that it points to.
    Text,
}

impl Form {
    /// Those that are written, as they are.
    pub(super) const WRITTEN: [(Self, &str); 2] =
        [(Self::Function, ".function"), (Self::Text, ".ustring")];
}

/// How a field and a value are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
    /// `<`; of numbers, as the four that follow.
    Less,
    /// `<=`
    LessOrEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterOrEqual,
    /// `&`: whether any of these bits is set.
    AnyBit,
    /// `~`: whether a text matches a pattern with `*`, `?` and `[...]`.
    Glob,
}

/// What a field is compared with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// A number.
    Number {
        /// The number, in two's complement.
        value: u64,
        /// As it was written.
        text: String,
    },
    /// Names of values of the field's type, with `|` between them, or `-` and the name of an error: what it
    /// stands for depends on the field.
    Name(String),
    /// A text.
    Text(String),
    /// `CPUS{0,2-4}`: any of these CPUs, each range with its first and its last one.
    Cpus(Vec<(u32, u32)>),
}
