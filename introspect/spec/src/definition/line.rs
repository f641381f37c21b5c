//! A parsed definition, and its printed form.

use std::fmt;

use hvprobe_arch::Gva;

use crate::column::Column;
use crate::fetch::{FetchArg, Filter};

/// Definition of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Definition {
    /// Kind of the probe.
    pub kind: Kind,
    /// Name as given: `event`, `group/event`, or `group/` for the default event name in that group.
    pub name: Option<String>,
    /// Place of the probe.
    pub target: Target,
    /// Values that are read at a hit, in the order of their display.
    pub arguments: Vec<FetchArg>,
    /// Filter for the hits; if absent, all hits pass.
    pub filter: Option<Filter>,
    /// Positions of the parts of the target in the text.
    pub marks: Marks,
}

/// Positions of the parts of a definition's target in its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Marks {
    /// The target, including its module.
    pub target: Column,
    /// The symbol, pattern or address itself.
    pub place: Column,
    /// The digits of the offset; [`place`](Self::place) if there is none.
    pub offset: Column,
}

/// Kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `p`: at an instruction.
    Probe,
    /// `r`, or `p` with `%return`: at the returns of a function.
    Return {
        /// Maximum number of calls in flight, 1 to 4096; the default when absent.
        maxactive: Option<u32>,
    },
}

/// Place of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Symbol with an offset.
    Symbol {
        /// The module that has the symbol; when absent, the kernel itself.
        module: Option<String>,
        /// Exact name of the symbol.
        name: String,
        /// Offset from the symbol's start, in bytes.
        offset: u64,
    },
    /// All functions whose names match.
    Functions {
        /// The functions' module, or [`KERNEL`](super::KERNEL); when absent, functions of the kernel and of all
        /// its modules match.
        module: Option<String>,
        /// Shell-style pattern for the names.
        pattern: String,
    },
    /// Address in the guest kernel.
    Address(Gva),
}

/// Symbols at the beginning of the kernel's text. An offset from one of them may lead into any function of the
/// kernel. `perf probe` writes all places in this form (`kernel_get_ref_reloc_sym` in
/// tools/perf/util/probe-event.c).
pub const BEGINNINGS: [&str; 2] = ["_stext", "_text"];

impl Target {
    /// Returns whether the target is an offset from the beginning of the kernel's text, which may lead into any
    /// function.
    #[must_use]
    pub fn is_from_beginning(&self) -> bool {
        match self {
            Self::Symbol {
                module: None,
                name,
                offset: 1..,
            } => BEGINNINGS.contains(&name.as_str()),
            _ => false,
        }
    }
}

impl Definition {
    /// Returns the group and the event, as in the paths of tracefs: `GROUP/EVENT`.
    #[must_use]
    pub fn event_path(&self) -> String {
        event_path(&self.event_name())
    }

    /// Returns the event's name, as given or as ftrace would generate it: `p_SYMBOL_OFFSET`, `r_SYMBOL_0`, with
    /// `_` for characters that an event name cannot contain (`__trace_kprobe_create` in
    /// kernel/trace/trace_kprobe.c).
    #[must_use]
    pub fn event_name(&self) -> String {
        let group = match self.name.as_deref() {
            Some(name) if !name.ends_with('/') => return name.to_owned(),
            group => group.unwrap_or_default(),
        };
        let kind = match self.kind {
            Kind::Probe => 'p',
            Kind::Return { .. } => 'r',
        };
        match &self.target {
            Target::Symbol { name, offset, .. } => {
                format!("{group}{kind}_{}_{offset}", name.replace('.', "_"))
            }
            Target::Functions { pattern, .. } => format!("{group}{kind}_{pattern}"),
            Target::Address(at) => format!("{group}{kind}_{at:#x}"),
        }
    }
}

/// Returns the group and the event of `name`, as `GROUP/EVENT`; the default group is `kprobes`.
#[must_use]
pub fn event_path(name: &str) -> String {
    match name.contains('/') {
        true => name.to_owned(),
        false => format!("kprobes/{name}"),
    }
}

impl fmt::Display for Definition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(name) = &self.name {
            write!(f, ":{name}")?;
        }
        write!(f, " {}", self.target)?;
        for argument in &self.arguments {
            write!(f, " {argument}")?;
        }
        match &self.filter {
            Some(filter) => write!(f, " if {filter}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Kind {
    /// Writes the first word of a definition: `p`, `r`, `r20`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Probe => f.write_str("p"),
            Self::Return { maxactive: None } => f.write_str("r"),
            Self::Return {
                maxactive: Some(number),
            } => write!(f, "r{number}"),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Symbol {
                module,
                name,
                offset,
            } => {
                if let Some(module) = module {
                    write!(f, "{module}:")?;
                }
                f.write_str(name)?;
                match offset {
                    0 => Ok(()),
                    offset => write!(f, "+{offset:#x}"),
                }
            }
            Self::Functions { module, pattern } => {
                if let Some(module) = module {
                    write!(f, "{module}:")?;
                }
                f.write_str(pattern)
            }
            Self::Address(at) => write!(f, "{at}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::definition::parse;

    #[test]
    fn probes_without_a_name_are_named_as_ftrace_would() {
        for (definition, name) in [
            ("p vfs_read", "p_vfs_read_0"),
            ("r vfs_read", "r_vfs_read_0"),
            ("p vfs_read%return", "r_vfs_read_0"),
            ("p vfs_read+0x11", "p_vfs_read_17"),
            ("p foo.isra.0.cold+16", "p_foo_isra_0_cold_16"),
            ("p 0xffffffff81000109", "p_0xffffffff81000109"),
            ("p:mine vfs_read", "mine"),
            ("p:group/mine vfs_read", "group/mine"),
            ("p:group/ vfs_read+0x11", "group/p_vfs_read_17"),
            ("r:group/ vfs_read", "group/r_vfs_read_0"),
            ("f vfs_read", "fprobes/vfs_read__entry"),
            ("f foo.isra.0%return", "fprobes/foo_isra_0__exit"),
            ("f:mine vfs_read", "fprobes/mine"),
            ("f:group/ vfs_read", "group/vfs_read__entry"),
            ("f:group/mine vfs_read%return", "group/mine"),
        ] {
            assert_eq!(parse(definition).unwrap().event_name(), name);
        }
    }
}
