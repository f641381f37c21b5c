//! What a definition says, and its printed form.

use std::fmt;

use hvprobe_arch::Gva;

use crate::column::Column;
use crate::fetch::{FetchArg, Filter};

/// What to probe, and the name of its events.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Definition {
    /// Which kind of probe.
    pub kind: Kind,
    /// `event`, `group/event` or, for the name that it has without one in that group, `group/`, when given.
    pub name: Option<String>,
    /// Where the probe goes.
    pub target: Target,
    /// What is read at a hit, in the order in which it is shown.
    pub arguments: Vec<FetchArg>,
    /// Which hits count; all of them when absent.
    pub filter: Option<Filter>,
    /// Where the parts of the target stand.
    pub marks: Marks,
}

/// Where the parts of a definition's target stand in its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Marks {
    /// The target, with the module before it.
    pub target: Column,
    /// The symbol, pattern or address itself.
    pub place: Column,
    /// The digits of the offset; [`place`](Self::place) if there is none.
    pub offset: Column,
}

/// The kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `p`: at an instruction.
    Probe,
    /// `r`, or `p` with `%return`: at the returns of a function.
    Return {
        /// How many calls may be in flight, 1 to 4096; the default when absent.
        maxactive: Option<u32>,
    },
}

/// Where a probe goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// So many bytes into a symbol.
    Symbol {
        /// The module that has the symbol; when absent, the kernel itself.
        module: Option<String>,
        /// The symbol's exact name.
        name: String,
        /// Bytes from its start.
        offset: u64,
    },
    /// Every function whose name matches.
    Functions {
        /// The module whose functions, or [`KERNEL`](super::KERNEL); when absent, those of the kernel and of all its
        /// modules.
        module: Option<String>,
        /// What the names match: a shell-style pattern.
        pattern: String,
    },
    /// An address in the guest kernel.
    Address(Gva),
}

/// Symbols that the kernel's text begins with. An offset from one of them may lead into any function of it, which is
/// how `perf probe` writes all places (`kernel_get_ref_reloc_sym` in tools/perf/util/probe-event.c).
pub const BEGINNINGS: [&str; 2] = ["_stext", "_text"];

impl Target {
    /// Whether it may be in any function of the kernel, by how far behind the text's beginning it is.
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
    /// Its event and the group of that, as files of tracefs are called: `GROUP/EVENT`.
    #[must_use]
    pub fn event_path(&self) -> String {
        event_path(&self.event_name())
    }

    /// The event's name: as given, or as ftrace would make it: `p_SYMBOL_OFFSET`, `r_SYMBOL_0`, with
    /// `_` for what an event name cannot hold (`__trace_kprobe_create` in
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

/// The event that `name` is of, with its group: `kprobes` where it says none.
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
    /// The word a definition starts with: `p`, `r`, `r20`.
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
