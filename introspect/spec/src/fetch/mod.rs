//! Fetch arguments and filters: what a definition says is to be read at a hit, and which hits count.
//!
//! The language is that of the kernel's `kprobe_events` (Documentation/trace/kprobetrace.rst), and so are
//! the words of its errors. What is kept true: nothing here knows a kernel. Which symbols, types and
//! arguments there are, and whether an expression makes sense with them, is looked up by others; the
//! columns are there for what they have to say.

mod argument;
mod filter;
mod types;

pub use argument::{Access, Expr, ExprKind, FetchArg, Register};
pub use filter::{Filter, Operator, Test, Value};
pub use types::{ARRAY_MAX, Element, Shown, TypeName};
