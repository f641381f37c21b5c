//! Fetch arguments and filters: the part of a definition that says which values are read at a hit, and which
//! hits count.
//!
//! The language is that of the kernel's `kprobe_events` (Documentation/trace/kprobetrace.rst). The error messages
//! and their columns are also those of the kernel.
//!
//! ```text
//! argument = [NAME "="] EXPR [":" TYPE] | "$arg*"
//! EXPR     = "%" REGISTER | "@" ADDRESS | "@" SYMBOL [("+" | "-") OFFSET]
//!          | "$stack" | "$stack" N | "$arg" N | "$comm" | "\" NUMBER | "\"" TEXT "\""
//!          | "$retval" PATH | "$current" PATH | VARIABLE PATH
//!          | ("+" | "-") ["u"] OFFSET "(" EXPR ")" | ("this_cpu_read" | "this_cpu_ptr") "(" EXPR ")"
//!          | "(" STRUCT ["," MEMBER] ")" EXPR PATH
//! PATH     = {("->" | ".") MEMBER}
//! TYPE     = ELEMENT ["[" N "]"] | "u" | "s" | "x" | "d" | "%pd" | "%pD"
//! ELEMENT  = ("u" | "s" | "x") ("8" | "16" | "32" | "64") | "b" WIDTH "@" OFFSET "/" SIZE
//!          | "char" | "string" | "ustring" | "symbol" | "symstr"
//! filter   = condition {"||" condition}, condition = term {"&&" term}
//! term     = "!" term | "(" filter ")" | NAME [FORM] ("==" | "!=" | "<" | "<=" | ">" | ">=" | "&" | "~") VALUE
//! FORM     = ".function" | ".ustring"
//! ```
//!
//! Invariants: nothing here depends on a kernel. Other modules look up symbols, types and arguments, and check
//! whether an expression is valid with them; they use the columns for their errors. A printed form parses to
//! the value that was printed.

mod argument;
mod expression;
mod filter;
mod number;
mod place;
mod print;
mod read;
mod read_filter;
mod read_type;
mod registers;
#[cfg(test)]
mod tests;
mod types;
pub mod words;

pub use argument::{Access, Expr, ExprKind, FetchArg, Register};
pub use filter::{Filter, Form, Operator, Test, Value};
pub(crate) use place::Place;
pub(crate) use read::read_arguments;
pub use read::{ARGUMENTS_MAX, EXPRESSION_MAX, NAME_MAX};
pub use read_filter::{OPERAND_MAX, TERMS_MAX, read_filter, read_number};
pub(crate) use read_filter::{OPERATORS, read_at as read_filter_at};
pub use types::{ARRAY_MAX, Element, Shown, TypeName};
