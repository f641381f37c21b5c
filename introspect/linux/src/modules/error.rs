//! Errors of reading modules, their types and their symbols.

use hvprobe_arch::Gva;

use crate::symbols::{LookupError, first_few};
use crate::types::BtfError;

/// Why the guest's modules cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// The kernel has no list of modules.
    #[error("no symbol `modules`: the kernel was built without CONFIG_MODULES")]
    NoList,
    /// The kernel has a list of modules, but no symbol for it.
    #[error(
        "no symbol `modules` leads to the kernel's modules: it was built without CONFIG_KALLSYMS_ALL"
    )]
    HiddenList,
    /// The kernel's type information does not describe `struct module`.
    #[error("the kernel's type information does not describe its modules")]
    Layout(#[from] BtfError),
    /// `struct module` has an unsupported number of memory kinds.
    #[error("`struct module` has {found} kinds of memory, not {expected}")]
    Memories {
        /// Number of kinds found.
        found: u64,
        /// Number of kinds supported.
        expected: u64,
    },
    /// A link of the list, or a module on it, is not in memory.
    #[error("the guest's list of modules leads to {at}, which cannot be read")]
    Unreadable {
        /// The address that cannot be read.
        at: Gva,
    },
    /// The list returns to a module before it returns to its head.
    #[error("the guest's list of modules comes back to {at} without an end")]
    Cycle {
        /// The address that was reached twice.
        at: Gva,
    },
    /// The list has more modules than the limit, which is far above what real guests load.
    #[error("the guest's list of modules has more than {most} entries")]
    TooMany {
        /// The limit.
        most: usize,
    },
    /// The tables and names of all modules together exceed the limit, which is far above what real guests need.
    #[error("the guest's modules claim more than {most} bytes of tables and names")]
    TooMuch {
        /// The limit in bytes.
        most: usize,
    },
}

/// Why the types of a module are not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoModuleTypes {
    /// The types were not requested.
    #[error("the module's types were not read")]
    NotRead,
    /// The kernel is built without `CONFIG_DEBUG_INFO_BTF_MODULES`, or older than 5.11.
    #[error("this kernel keeps no types of modules")]
    NotKept,
    /// The kernel has no types of the module, which was built without types or for another kernel.
    #[error("the module has no type information that the kernel took")]
    None,
    /// The types cannot be read.
    #[error(transparent)]
    Unreadable(#[from] ModuleError),
    /// The types are malformed.
    #[error("the module's type information: {0}")]
    Malformed(BtfError),
}

/// Why a name does not identify exactly one address in a module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModuleLookupError {
    /// No module of that name is loaded.
    #[error("module `{name}` is not loaded")]
    NotLoaded {
        /// The module asked for.
        name: String,
    },
    /// The module has no such symbol, or several.
    #[error("module `{module}`: {why}")]
    Symbol {
        /// The module.
        module: String,
        /// The error of the look-up in the module's symbols.
        why: LookupError,
    },
    /// No loaded module has such a symbol.
    #[error("no loaded module has a symbol `{name}`")]
    Unknown {
        /// The name asked for.
        name: String,
    },
    /// Several symbols in modules have the name.
    #[error(
        "symbol `{name}` is in several modules: {}; name the module or the address",
        first_few(.at, |(module, at)| format!("{module} ({at})"))
    )]
    Ambiguous {
        /// The name asked for.
        name: String,
        /// The module and the address of each symbol, in the order of the list of modules.
        at: Vec<(String, Gva)>,
    },
}
