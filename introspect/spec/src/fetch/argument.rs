//! Parsed fetch arguments.

use hvprobe_arch::regs::Gpr;

use super::types::TypeName;
use crate::column::Column;

/// Fetch argument: `NAME=EXPRESSION:TYPE`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FetchArg {
    /// Name, if given.
    pub name: Option<String>,
    /// Column of the argument.
    pub column: Column,
    /// Expression that is fetched.
    pub expr: Expr,
    /// Type, if given.
    pub ty: Option<TypeName>,
    /// Expression and type as written, without the name. This text is printed.
    pub text: String,
}

/// Expression with its position.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expr {
    /// Column of the expression.
    pub column: Column,
    /// Kind of the expression.
    pub kind: ExprKind,
}

/// Kind of a fetched expression.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExprKind {
    /// Register, such as `%di`.
    Register(Register),
    /// Memory at a kernel address, such as `@0xffffffff82000000`.
    Memory(u64),
    /// Memory at a kernel symbol, such as `@jiffies` or `@init_task+8`.
    Symbol {
        /// Name of the symbol, which may not exist.
        name: String,
        /// Offset from the symbol's start, in bytes.
        offset: i64,
    },
    /// `$stack`: the address of the top of the stack.
    Stack,
    /// Stack word, counted from 0, such as `$stack3`.
    StackWord(u16),
    /// Argument of the function, counted from 1, such as `$arg1`.
    Argument(u16),
    /// `$arg*`: all arguments of the function. Allowed once, without a name or a type.
    Arguments,
    /// Result of the function: `$retval`, `$retval->f.g`.
    Return {
        /// Members of the structure that the result points to.
        path: Vec<Access>,
    },
    /// `$comm`: the name of the current task.
    Comm,
    /// `task_struct` of the current task: `$current`, `$current->pid`.
    Current {
        /// Members of the `task_struct`.
        path: Vec<Access>,
    },
    /// Number in two's complement: `\5`, `\-1`, `\0x1f`.
    Immediate(u64),
    /// Text: `\"text"`.
    Text(String),
    /// Argument of the function by name: `filename`, `file->f_path.dentry`.
    Variable {
        /// Name of the argument.
        name: String,
        /// Members of the argument.
        path: Vec<Access>,
    },
    /// Memory at a computed address: `+8(%di)`, `-0x10(%bp)`, `+u0(%si)`.
    Dereference {
        /// Whether it is user memory.
        user: bool,
        /// Offset that is added to the inner expression, in bytes.
        offset: i64,
        /// Inner expression: the address.
        inner: Box<Expr>,
    },
    /// Per-CPU variable on the CPU of the hit: `this_cpu_read(@runqueues)`, `this_cpu_ptr(@runqueues)`.
    PerCpu {
        /// Whether the value of the variable is fetched, instead of its address.
        read: bool,
        /// The variable.
        inner: Box<Expr>,
    },
    /// Address that is cast to a structure type: `(task_struct)%di->pid`, `(dentry,d_child)$arg1->d_name`.
    Cast {
        /// Name of the structure.
        of: String,
        /// Member whose address is given; `None` if it is the address of the structure itself. In a path to a
        /// nested member, a `.` separates the names.
        member: Option<String>,
        /// The address.
        inner: Box<Expr>,
        /// Members of the structure; at least one.
        path: Vec<Access>,
    },
}

/// Step from a value to its member.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Column of the member's name.
    pub column: Column,
    /// Whether the step is `->`: the value is a pointer to the structure with the member. Otherwise the step is
    /// `.`, and the value is the structure.
    pub arrow: bool,
    /// Name of the member.
    pub field: String,
}

/// Register by its kernel name, from `pt_regs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Register {
    /// General register: `%ax`, `%sp`, `%r15`.
    General(Gpr),
    /// `%ip`.
    Ip,
    /// `%flags`.
    Flags,
    /// `%cs`.
    Cs,
    /// `%ss`.
    Ss,
    /// `%orig_ax`: the number of the system call, or another value that the kernel keeps there.
    OrigAx,
}
