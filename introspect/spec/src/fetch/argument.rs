//! What a fetch argument says.

use hvprobe_arch::regs::Gpr;

use super::types::TypeName;
use crate::column::Column;

/// One fetch argument: `NAME=EXPRESSION:TYPE`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FetchArg {
    /// The name, when given.
    pub name: Option<String>,
    /// Where the argument begins.
    pub column: Column,
    /// What is fetched.
    pub expr: Expr,
    /// The type, when given.
    pub ty: Option<TypeName>,
    /// The expression and its type as they were written, without the name. This is what is printed.
    pub text: String,
}

/// What is fetched, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expr {
    /// Where it begins.
    pub column: Column,
    /// What it is.
    pub kind: ExprKind,
}

/// What is fetched.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExprKind {
    /// `%di`: a register.
    Register(Register),
    /// `@0xffffffff82000000`: the memory at an address of the kernel.
    Memory(u64),
    /// `@jiffies`, `@init_task+8`: the memory at a symbol of the kernel.
    Symbol {
        /// The symbol's name; nobody has looked whether there is one.
        name: String,
        /// Bytes from its start.
        offset: i64,
    },
    /// `$stack`: the address of the stack's top.
    Stack,
    /// `$stack3`: a word of the stack, from 0.
    StackWord(u16),
    /// `$arg1`: an argument of the function, from 1.
    Argument(u16),
    /// `$arg*`: every argument of the function. It stands alone, without a name or a type, and once.
    Arguments,
    /// `$retval`, `$retval->f.g`: what the function returned.
    Return {
        /// Members of what it points to.
        path: Vec<Access>,
    },
    /// `$comm`: the name of the current task.
    Comm,
    /// `$current`, `$current->pid`: the current task's `task_struct`.
    Current {
        /// Members of it.
        path: Vec<Access>,
    },
    /// `\5`, `\-1`, `\0x1f`: a number, in two's complement.
    Immediate(u64),
    /// `\"text"`: a text.
    Text(String),
    /// `filename`, `file->f_path.dentry`: an argument of the function by its name.
    Variable {
        /// The argument's name.
        name: String,
        /// Members of it.
        path: Vec<Access>,
    },
    /// `+8(%di)`, `-0x10(%bp)`, `+u0(%si)`: the memory at an address.
    Dereference {
        /// Whether it is memory of the user's.
        user: bool,
        /// Bytes added to what is inside.
        offset: i64,
        /// The address.
        inner: Box<Expr>,
    },
    /// `this_cpu_read(@runqueues)`, `this_cpu_ptr(@runqueues)`: a per-CPU variable on the CPU of the hit.
    PerCpu {
        /// Whether it is the variable's value that is fetched, not its address.
        read: bool,
        /// The variable.
        inner: Box<Expr>,
    },
    /// `(task_struct)%di->pid`, `(dentry,d_child)$arg1->d_name`: what an address points to is a structure
    /// of this type.
    Cast {
        /// The structure.
        of: String,
        /// The member that the address is of, when it is not the structure's own; with `.` between a
        /// member and one of its own.
        member: Option<String>,
        /// The address.
        inner: Box<Expr>,
        /// Members of the structure; at least one.
        path: Vec<Access>,
    },
}

/// One step from a value to a member of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Where the member's name begins.
    pub column: Column,
    /// `->`: the value is a pointer to what has the member; else `.`: the value has it.
    pub arrow: bool,
    /// The member.
    pub field: String,
}

/// A register as the kernel names it: what its `pt_regs` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Register {
    /// A general register: `%ax`, `%sp`, `%r15`.
    General(Gpr),
    /// `%ip`.
    Ip,
    /// `%flags`.
    Flags,
    /// `%cs`.
    Cs,
    /// `%ss`.
    Ss,
    /// `%orig_ax`: the number of the system call, or what else the kernel keeps there.
    OrigAx,
}
