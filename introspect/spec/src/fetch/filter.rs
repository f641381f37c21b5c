//! Filters for the hits of a probe.

use crate::column::Column;

/// Filter for hits: the text after `if` in a definition.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Filter {
    /// Comparison: `FIELD OPERATOR VALUE`.
    Test(Test),
    /// Negation: `!FILTER`.
    Not(Box<Self>),
    /// Conjunction: `FILTER && FILTER`.
    And(Box<Self>, Box<Self>),
    /// Disjunction: `FILTER || FILTER`.
    Or(Box<Self>, Box<Self>),
}

/// Comparison of a field with a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Test {
    /// Column of the field's name.
    pub column: Column,
    /// Name of an argument or of a common field (`pid`, `tgid`, `comm`, `cpu`).
    pub field: String,
    /// Form in which the field is compared.
    pub form: Form,
    /// Comparison operator.
    pub operator: Operator,
    /// Column of the value.
    pub value_column: Column,
    /// Value to compare with.
    pub value: Value,
}

/// Form in which a field is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// The field itself.
    #[default]
    Plain,
    /// `.function`: the function that contains the address in the field.
    Function,
    /// `.ustring`: the text that the field points to.
    Text,
}

impl Form {
    /// Forms with a suffix, and their suffixes.
    pub(super) const WRITTEN: [(Self, &str); 2] =
        [(Self::Function, ".function"), (Self::Text, ".ustring")];
}

/// Operator between a field and a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
    /// `<`; for numbers only, like the four that follow.
    Less,
    /// `<=`
    LessOrEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterOrEqual,
    /// `&`: true if the field has any of the value's bits set.
    AnyBit,
    /// `~`: true if a text matches a pattern with `*`, `?` and `[...]`.
    Glob,
}

/// Value that a field is compared with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// Number.
    Number {
        /// The number in two's complement.
        value: u64,
        /// The number as written.
        text: String,
    },
    /// Unquoted words: names of values of the field's type, separated by `|`; or `-` and the name of an error; or,
    /// in the form [`Form::Function`], a symbol. The meaning of the names depends on the field.
    Name(String),
    /// Text.
    Text(String),
    /// Set of CPUs, such as `CPUS{0,2-4}`: each range with its first and last CPU.
    Cpus(Vec<(u32, u32)>),
}
