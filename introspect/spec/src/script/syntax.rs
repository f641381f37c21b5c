//! What a script says, and where it says it.

use std::num::NonZeroU64;

use crate::column::Column;
use crate::fetch::Operator;
use crate::script::format::Format;

/// A script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// Its clauses, in their order.
    pub clauses: Vec<Clause>,
}

/// `PROBE, PROBE /CONDITION/ { STATEMENTS }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clause {
    /// When it is done; at least one.
    pub points: Vec<Point>,
    /// At which hits it is done; at all when absent.
    pub condition: Option<Condition>,
    /// What is done.
    pub statements: Vec<Statement>,
}

/// When a clause is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// Where it begins.
    pub column: Column,
    /// What it is.
    pub kind: PointKind,
}

/// What a clause waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PointKind {
    /// `BEGIN`: before everything else.
    Begin,
    /// `END`: behind everything else.
    End,
    /// `interval:s:5`, `interval:ms:100`: every so many milliseconds.
    Interval(u64),
    /// `kprobe:vfs_read`, `kretprobe:vfs_read`.
    Function {
        /// Whether it is the function's returns.
        returns: bool,
        /// Where the target begins.
        column: Column,
        /// The target, as a definition has it.
        target: String,
    },
}

/// At which hits a clause is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// `OPERAND OPERATOR VALUE`.
    Test {
        /// What is compared.
        operand: Operand,
        /// How.
        operator: Operator,
        /// With what: a number or a text.
        value: Operand,
    },
    /// `@NAME[tid]`: calls of which the map has the time at which they began.
    Kept {
        /// Where it begins.
        column: Column,
        /// The name of the map, without its `@`.
        map: String,
    },
    /// `!`: at those where it does not hold.
    Not(Box<Self>),
    /// `&&`: where both hold.
    And(Box<Self>, Box<Self>),
    /// `||`: where one holds at least.
    Or(Box<Self>, Box<Self>),
}

/// Something that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Where it begins.
    pub column: Column,
    /// What it is.
    pub kind: StatementKind,
}

/// Something that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatementKind {
    /// `@NAME[KEYS] = count()`.
    Gather {
        /// The name of the map, without its `@`.
        map: String,
        /// What tells its entries apart.
        keys: Vec<Operand>,
        /// What is told of each.
        what: Gather,
    },
    /// `@NAME[tid] = nsecs`: keeps when a call began.
    Keep {
        /// The name of the map, without its `@`.
        map: String,
    },
    /// `delete(@NAME[tid])`, `delete(@NAME, tid)`: when it began is of no use any more.
    Forget {
        /// The name of the map.
        map: String,
    },
    /// `printf("FORMAT", VALUES)`.
    Printf {
        /// What is printed.
        format: Format,
        /// What stands in the places of its directives.
        values: Vec<Operand>,
    },
    /// `print(@NAME)`, `print(@NAME, 5)`.
    Print {
        /// The name of the map.
        map: String,
        /// How many entries, of the greatest; all when absent.
        top: Option<u64>,
    },
    /// `clear(@NAME)`, or `delete(@NAME)`.
    Clear {
        /// The name of the map.
        map: String,
    },
    /// `time("%H:%M:%S\n")`.
    Time(String),
    /// `exit()`.
    Exit,
}

/// What is told of the hits that are counted together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gather {
    /// What is told.
    pub told: Told,
    /// Of which value; none if it is told of the hits themselves.
    pub of: Option<Operand>,
}

/// What is told of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// `count()`: how many hits it has.
    Hits,
    /// `sum(x)`: the sum of the first value of its histogram.
    Sum,
    /// `avg(x)`: its average.
    Average,
    /// `min(x)`: the least.
    Least,
    /// `max(x)`: the greatest.
    Greatest,
    /// `hist(x)`: how many hits there are between powers of two, by the last key of its histogram.
    Powers,
    /// `lhist(x, MIN, MAX, STEP)`: how many there are in each step, likewise.
    Steps {
        /// Where they begin.
        min: u64,
        /// Where they end.
        max: u64,
        /// How wide they are.
        step: u64,
    },
}

/// A value, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Where it begins.
    pub column: Column,
    /// What it is.
    pub kind: OperandKind,
}

/// A value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum OperandKind {
    /// A number.
    Number(i64),
    /// `"text"`, without what `\` stands for.
    Text(String),
    /// What every hit has.
    Builtin(Builtin),
    /// `nsecs - @NAME[tid]`: how long ago the call began of which the map has the time.
    Since(String),
    /// What is fetched for it.
    Fetched(Fetched),
    /// `str(x)`: the text at an address.
    Str(Fetched),
    /// `ksym(x)`: the symbol at an address.
    Ksym(Fetched),
    /// `x / N`: a number divided, towards zero.
    Divided {
        /// Which.
        of: Box<OperandKind>,
        /// By what.
        by: NonZeroU64,
    },
}

/// A value that is fetched for a script.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Fetched {
    /// `arg0`: an argument of the function, from 0.
    Argument(u16),
    /// `args.NAME`, with members behind it.
    Named(String),
    /// `retval`: what the function returned.
    Return,
    /// `curtask`: the address of the current `task_struct`.
    CurrentTask,
}

/// A value that every hit has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Builtin {
    /// `pid`: the process.
    Pid,
    /// `tid`: the thread.
    Tid,
    /// `comm`: the name of the task.
    Comm,
    /// `cpu`: the number of the virtual CPU.
    Cpu,
    /// `nsecs`: when it was.
    Nsecs,
    /// `elapsed`: how long after the script began.
    Elapsed,
    /// `func`: the function.
    Func,
    /// `probe`: the probe, as it is written.
    Probe,
    /// `kstack`: the kernel's stack.
    Kstack,
    /// `duration`: how long the call took, in nanoseconds.
    Duration,
}

/// The names of [`Builtin`].
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
    /// What has to be fetched for it, if anything.
    pub(super) fn fetched(&self) -> Option<&Fetched> {
        match self {
            Self::Fetched(of) | Self::Str(of) | Self::Ksym(of) => Some(of),
            Self::Divided { of, .. } => of.fetched(),
            Self::Number(_) | Self::Text(_) | Self::Builtin(_) | Self::Since(_) => None,
        }
    }

    /// What is divided, if it is; itself otherwise.
    pub(super) fn undivided(&self) -> &Self {
        match self {
            Self::Divided { of, .. } => of.undivided(),
            other => other,
        }
    }

    /// Whether it is the same at every hit.
    pub(super) fn is_literal(&self) -> bool {
        matches!(self, Self::Number(_) | Self::Text(_))
    }

    /// Whether it is a text; those of `args` are known by the guest's types only, and count as numbers.
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
    /// Adds all values that it compares.
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

    /// Where it begins.
    pub(super) fn column(&self) -> usize {
        match self {
            Self::Test { operand, .. } => operand.column.0,
            Self::Kept { column, .. } => column.0,
            Self::Not(inner) | Self::And(inner, _) | Self::Or(inner, _) => inner.column(),
        }
    }
}
