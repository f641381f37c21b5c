//! Fetch arguments and filters: what a definition says is to be read at a hit, and which hits count.
//!
//! The language is that of the kernel's `kprobe_events` (Documentation/trace/kprobetrace.rst), and so are
//! the words of its errors and the columns they are at:
//!
//! ```text
//! argument = [NAME "="] EXPR [":" TYPE] | "$arg*"
//! EXPR     = "%" REGISTER | "@" ADDRESS | "@" SYMBOL [("+" | "-") OFFSET]
//!          | "$stack" | "$stack" N | "$arg" N | "$comm" | "\" NUMBER | "\"" TEXT "\""
//!          | "$retval" PATH | "$current" PATH | VARIABLE PATH
//!          | ("+" | "-") ["u"] OFFSET "(" EXPR ")" | ("this_cpu_read" | "this_cpu_ptr") "(" EXPR ")"
//!          | "(" STRUCT ["," MEMBER] ")" EXPR PATH
//! PATH     = {("->" | ".") MEMBER}
//! TYPE     = ELEMENT ["[" N "]"] | "%pd" | "%pD"
//! ELEMENT  = ("u" | "s" | "x") ("8" | "16" | "32" | "64") | "b" WIDTH "@" OFFSET "/" SIZE
//!          | "char" | "string" | "ustring" | "symbol" | "symstr"
//! filter   = condition {"||" condition}, condition = term {"&&" term}
//! term     = "!" term | "(" filter ")" | NAME ("==" | "!=" | "<" | "<=" | ">" | ">=" | "&" | "~") VALUE
//! ```
//!
//! What is kept true: nothing here knows a kernel. Which symbols, types and arguments there are, and
//! whether an expression makes sense with them, is looked up by others; the columns are there for what
//! they have to say. What is printed reads as what was printed.

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
