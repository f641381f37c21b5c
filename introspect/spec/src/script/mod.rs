//! Scripts: actions at hits, in the language of bpftrace.
//!
//! ```text
//! script    = {["config = {" {SETTING "=" VALUE ";"} "}"] clause}
//! clause    = probe {"," probe} ["/" condition "/"] "{" {statement ";"} "}"
//! probe     = "BEGIN" | "END" | "interval:" (("s" | "ms") ":" N | N ("s" | "ms"))
//!           | ("kprobe" | "kretprobe") ":" TARGET
//! condition = part {"||" part}, part = term {"&&" term}
//! term      = "!" term | "(" condition ")" | value [("==" | "!=" | "<" | "<=" | ">" | ">=" | "&") (value | names)]
//! names     = NAME | "(" NAME {"|" (NAME | N)} ")"
//! statement = "@" [NAME] ["[" value {"," value} "]"] "=" gathered
//!           | TIME "=" "nsecs" | "delete(" (TIME | MAP "," "tid") ")"
//!           | "printf(" TEXT {"," value} ")" | "print(" MAP ["," N] ")" | ("clear" | "delete") "(" MAP ")"
//!           | "time(" [TEXT] ")" | "exit()"
//! gathered  = "count()" | ("sum" | "avg" | "min" | "max" | "hist") "(" value ")"
//!           | "lhist(" value "," MIN "," MAX "," STEP ")"
//! value     = N | "-" ERROR | TEXT | "arg" N | "args." PATH | "retval" | "curtask"
//!           | "pid" | "tid" | "comm" | "cpu" | "nsecs" | "elapsed" | "func" | "probe" | "kstack"
//!           | ("str" | "ksym") "(" value ")" | "duration" | "nsecs" "-" TIME | value "/" N
//! ```
//!
//! MAP is `@` with an optional name. TIME is `@NAME[tid]`, which is also a term of conditions (see `times.rs`).
//! Conditions contain no divisions.
//!
//! Invariants: a script is read in one pass, and its length and nesting are bounded. Features of bpftrace that are
//! missing here are refused with an error that names them; all others have the same meaning as in bpftrace.
//! Counting and conditions become [definitions](crate::definition) and [histograms](crate::histogram); only
//! printing is left to the client.

mod compile;
mod cursor;
mod format;
mod print;
mod program;
mod read;
mod read_condition;
mod read_config;
mod read_operand;
mod syntax;
#[cfg(test)]
mod tests;
mod times;

pub use compile::compile;
pub use format::{Conversion, Directive, Format, Piece};
pub use program::{Action, Counted, KeyPart, Map, Planted, Program, Said, Written};
pub use read::{SCRIPT_MAX, in_line, read_script};
pub use syntax::{
    Builtin, Clause, Compared, Condition, Fetched, Gather, MapFunction, Operand, OperandKind,
    Point, PointKind, Script, Statement, StatementKind, With,
};
