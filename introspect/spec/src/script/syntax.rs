//! Syntax tree of scripts, with positions.

use std::num::NonZeroU64;

use crate::column::Column;
use crate::fetch::Operator;
use crate::script::format::Format;

/// Parsed script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// Clauses in their order.
    pub clauses: Vec<Clause>,
}

/// Clause: `PROBE, PROBE /CONDITION/ { STATEMENTS }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clause {
    /// Events at which the clause runs; at least one.
    pub points: Vec<Point>,
    /// Condition on the hits; if absent, the clause runs at all hits.
    pub condition: Option<Condition>,
    /// Statements of the clause.
    pub statements: Vec<Statement>,
}

/// Event at which a clause runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// Column of the event.
    pub column: Column,
    /// Kind of the event.
    pub kind: PointKind,
}

/// Kind of an event at which a clause runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PointKind {
    /// `BEGIN`: before everything else.
    Begin,
    /// `END`: after everything else.
    End,
    /// `interval:s:5`, `interval:ms:100`: periodically, with this period in milliseconds.
    Interval(u64),
    /// `kprobe:vfs_read`, `kretprobe:vfs_read`: at the hits of a probe.
    Function {
        /// Whether the probe is at the function's returns.
        returns: bool,
        /// Column of the target.
        column: Column,
        /// Target in the syntax of definitions.
        target: String,
    },
}

/// Condition on the hits at which a clause runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Comparison: `OPERAND OPERATOR VALUE`.
    Test {
        /// Left-hand side.
        operand: Operand,
        /// Comparison operator.
        operator: Operator,
        /// Right-hand side: a number, a text or names.
        value: Compared,
    },
    /// `@NAME[tid]`: true for calls whose start time is in the map.
    Kept {
        /// Column of the condition.
        column: Column,
        /// Name of the map, without the `@`.
        map: String,
    },
    /// Negation: `!`.
    Not(Box<Self>),
    /// Conjunction: `&&`.
    And(Box<Self>, Box<Self>),
    /// Disjunction: `||`.
    Or(Box<Self>, Box<Self>),
}

/// Right-hand side of a comparison, with its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compared {
    /// Column of the number, text or names.
    pub column: Column,
    /// The number, text or names.
    pub with: With,
}

/// What a value is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum With {
    /// A number.
    Number(i64),
    /// `"text"`, with its escapes resolved.
    Text(String),
    /// `HRTIMER_MODE_ABS`, or `(O_RDWR|O_CREAT)` without its parentheses: names of values of the operand's type.
    Names(String),
}

/// Statement of a clause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Column of the statement.
    pub column: Column,
    /// Kind of the statement.
    pub kind: StatementKind,
}

/// Kind of a statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatementKind {
    /// `@NAME[KEYS] = count()`, or another aggregation.
    Gather {
        /// Name of the map, without the `@`.
        map: String,
        /// Keys that distinguish the entries.
        keys: Vec<Operand>,
        /// Aggregation of the hits with the same keys.
        what: Gather,
    },
    /// `@NAME[tid] = nsecs`: stores the start time of a call.
    Keep {
        /// Name of the map, without the `@`.
        map: String,
    },
    /// `delete(@NAME[tid])`, `delete(@NAME, tid)`: deletes the start time of a call.
    Forget {
        /// Name of the map.
        map: String,
    },
    /// `printf("FORMAT", VALUES)`.
    Printf {
        /// Format of the output.
        format: Format,
        /// Values of the format's directives.
        values: Vec<Operand>,
    },
    /// `print(@NAME)`, `print(@NAME, 5)`.
    Print {
        /// Name of the map.
        map: String,
        /// Number of greatest entries to print; all when absent.
        top: Option<u64>,
    },
    /// `clear(@NAME)`, or `delete(@NAME)`.
    Clear {
        /// Name of the map.
        map: String,
    },
    /// `time("%H:%M:%S\n")`.
    Time(String),
    /// `exit()`.
    Exit,
}

/// Aggregation of the hits that are counted together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gather {
    /// Function of the aggregation.
    pub aggregate: MapFunction,
    /// Value that is aggregated; `None` to count hits.
    pub of: Option<Operand>,
}

/// Result that is printed for an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapFunction {
    /// `count()`: number of hits.
    Hits,
    /// `sum(x)`: sum of `x`; `x` is the first value of the histogram.
    Sum,
    /// `avg(x)`: average of `x`; `x` is the first value of the histogram.
    Average,
    /// `min(x)`: least `x`; `x` is the first value of the histogram.
    Least,
    /// `max(x)`: greatest `x`; `x` is the first value of the histogram.
    Greatest,
    /// `hist(x)`: number of hits with `x` between two powers of two; `x` is the last key of the histogram.
    Powers,
    /// `lhist(x, MIN, MAX, STEP)`: number of hits with `x` in each step; `x` is the last key of the histogram.
    Steps {
        /// Start of the steps.
        min: u64,
        /// End of the steps.
        max: u64,
        /// Width of a step.
        step: u64,
    },
}

/// Value with its position.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Column of the value.
    pub column: Column,
    /// Kind of the value.
    pub kind: OperandKind,
}

/// Kind of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum OperandKind {
    /// Number.
    Number(i64),
    /// `"text"`, with its escapes resolved.
    Text(String),
    /// Value that every hit has.
    Builtin(Builtin),
    /// `nsecs - @NAME[tid]`: time since the start of the call. The map has the start time.
    Since(String),
    /// Fetched value.
    Fetched(Fetched),
    /// `str(x)`: text at an address.
    Str(Fetched),
    /// `ksym(x)`: symbol at an address.
    Ksym(Fetched),
    /// `x / N`: number divided, rounded towards zero.
    Divided {
        /// Dividend.
        of: Box<OperandKind>,
        /// Divisor.
        by: NonZeroU64,
    },
}

/// Fetched value of a script.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Fetched {
    /// `arg0`: argument of the function, counted from 0.
    Argument(u16),
    /// `args.NAME`, optionally followed by members.
    Named(String),
    /// `retval`: result of the function.
    Return,
    /// `curtask`: address of the current `task_struct`.
    CurrentTask,
}

/// Value that every hit has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Builtin {
    /// `pid`: id of the process.
    Pid,
    /// `tid`: id of the thread.
    Tid,
    /// `comm`: name of the task.
    Comm,
    /// `cpu`: number of the virtual CPU.
    Cpu,
    /// `nsecs`: time of the hit.
    Nsecs,
    /// `elapsed`: time since the start of the script.
    Elapsed,
    /// `func`: name of the function.
    Func,
    /// `probe`: probe in the syntax of scripts.
    Probe,
    /// `kstack`: kernel stack.
    Kstack,
    /// `duration`: duration of the call in nanoseconds.
    Duration,
}

/// Names of the built-in values.
pub(super) const BUILTINS: [(Builtin, &str); 10] = [
    (Builtin::Pid, "pid"),
    (Builtin::Tid, "tid"),
    (Builtin::Comm, "comm"),
    (Builtin::Cpu, "cpu"),
    (Builtin::Nsecs, "nsecs"),
    (Builtin::Elapsed, "elapsed"),
    (Builtin::Func, "func"),
    (Builtin::Probe, "probe"),
    (Builtin::Kstack, "kstack"),
    (Builtin::Duration, "duration"),
];

impl OperandKind {
    /// Returns what has to be fetched for the value, if anything.
    pub(super) fn fetched(&self) -> Option<&Fetched> {
        match self {
            Self::Fetched(of) | Self::Str(of) | Self::Ksym(of) => Some(of),
            Self::Divided { of, .. } => of.fetched(),
            Self::Number(_) | Self::Text(_) | Self::Builtin(_) | Self::Since(_) => None,
        }
    }

    /// Returns the dividend if the value is a division, else the value itself.
    pub(super) fn undivided(&self) -> &Self {
        match self {
            Self::Divided { of, .. } => of.undivided(),
            other => other,
        }
    }

    /// Returns whether the value is the same at every hit.
    pub(super) fn is_literal(&self) -> bool {
        matches!(self, Self::Number(_) | Self::Text(_))
    }

    /// Returns whether the value is a text. A value of `args` counts as a number, because only the guest's
    /// types say which it is.
    pub(super) fn is_text(&self) -> bool {
        match self {
            Self::Text(_) | Self::Str(_) | Self::Ksym(_) => true,
            Self::Builtin(builtin) => matches!(
                builtin,
                Builtin::Comm | Builtin::Func | Builtin::Probe | Builtin::Kstack
            ),
            Self::Number(_) | Self::Fetched(_) | Self::Since(_) | Self::Divided { .. } => false,
        }
    }
}

impl Condition {
    /// Appends the operands of all comparisons.
    pub(super) fn operands<'a>(&'a self, operands: &mut Vec<&'a Operand>) {
        match self {
            Self::Test { operand, .. } => operands.push(operand),
            Self::Kept { .. } => {}
            Self::Not(inner) => inner.operands(operands),
            Self::And(left, right) | Self::Or(left, right) => {
                left.operands(operands);
                right.operands(operands);
            }
        }
    }

    /// Returns the column of the condition.
    pub(super) fn column(&self) -> usize {
        match self {
            Self::Test { operand, .. } => operand.column.0,
            Self::Kept { column, .. } => column.0,
            Self::Not(inner) | Self::And(inner, _) | Self::Or(inner, _) => inner.column(),
        }
    }
}
