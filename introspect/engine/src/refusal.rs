//! Reasons for refusing a probe.

use std::fmt;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{self, Refusal};
use hvprobe_hit::calls::PoolError;
use hvprobe_linux::image::Forbidden;
use hvprobe_linux::modules::{ModuleError, ModuleLookupError, NoModuleTypes};
use hvprobe_linux::symbols::LookupError;
use hvprobe_linux::task::TaskUnknown;
use hvprobe_linux::unwind::OrcError;
use hvprobe_spec::definition::Definition;
use hvprobe_spec::language::text::hex;
use hvprobe_spec::{Column, Mechanism, ParseError, SpecError};

use crate::code::error::HiddenError;
use crate::unoptimized::Unoptimized;

/// Bytes in hexadecimal, or `not known`.
struct Hex<'a>(Option<&'a [u8]>);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => f.write_str(&hex(bytes)),
            None => f.write_str("not known"),
        }
    }
}

/// Why a probe was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The symbol is unknown or ambiguous.
    #[error(transparent)]
    Symbol(#[from] LookupError),
    /// The symbol of a module is unknown or ambiguous.
    #[error(transparent)]
    ModuleSymbol(#[from] ModuleLookupError),
    /// The loaded module is another build than the probe is for.
    #[error(
        "module {module} is another build than the debug information is of: its build id is {}, that of the debug \
         information {}",
        Hex(.loaded.as_deref()),
        Hex(Some(.wanted))
    )]
    OtherBuild {
        /// The module.
        module: String,
        /// Build id of the loaded module, if the guest's kernel keeps it.
        loaded: Option<Vec<u8>>,
        /// Build id that the probe is for.
        wanted: Vec<u8>,
    },
    /// No function matches the pattern.
    #[error("no function matches `{pattern}`{}", hvprobe_linux::symbols::Offer(.near))]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// Up to five similar names, best first.
        near: Vec<String>,
    },
    /// The patterns of a batch match more functions than may be planted at once.
    #[error(
        "`{pattern}` brings the batch to {matches} probes or more; at most {max} are possible: register parts of it one \
         after another, as in `[a-m]*`, or what a trace is about, as in `tcp_*`"
    )]
    TooManyMatches {
        /// The pattern.
        pattern: String,
        /// Lower bound of the number of probes.
        matches: usize,
        /// Maximum number of probes.
        max: usize,
    },
    /// The machine has its maximum number of probes.
    #[error("there are {there} probes already; at most {max} are possible")]
    TooManyProbes {
        /// Number of registered probes.
        there: usize,
        /// Maximum number of probes.
        max: usize,
    },
    /// The target is a pattern, but a single place is required.
    #[error("`{pattern}` is a pattern, which stands for no single place")]
    Pattern {
        /// The pattern.
        pattern: String,
    },
    /// The instances of a return probe cannot be allocated.
    #[error(transparent)]
    Instances(#[from] PoolError),
    /// The offset is outside the function.
    #[error("offset {offset:#x} is outside {symbol}, which is {size:#x} bytes long")]
    OffsetOutside {
        /// The function.
        symbol: String,
        /// The given offset.
        offset: u64,
        /// The function's size.
        size: u64,
    },
    /// The address is in the padding between two functions.
    #[error(
        "{at} is padding behind {symbol}, whose code is {len:#x} bytes long: nothing runs there"
    )]
    Padding {
        /// The address.
        at: Gva,
        /// The function.
        symbol: String,
        /// The length of its code.
        len: u64,
    },
    /// The kernel overlaps the window for our own code.
    #[error(
        "the kernel lies at {at}, and the code of probes goes below {end}: nothing of it can be probed unless it \
         is built with CONFIG_PHYSICAL_START=0x1000000 or more"
    )]
    LinkedLow {
        /// The kernel's start.
        at: Gva,
        /// The lowest start that a kernel may have.
        end: Gva,
    },
    /// The address is not in the kernel's text.
    #[error("{at} is not in the kernel's text")]
    NotText {
        /// The address.
        at: Gva,
    },
    /// The address is in init text, which is freed at the end of boot.
    #[error("{at} is init text, which the kernel frees before probes can be planted")]
    InitText {
        /// The address.
        at: Gva,
    },
    /// No known function contains the address, so instruction boundaries cannot be checked.
    #[error("no symbol contains {at}, so instruction boundaries cannot be checked")]
    NoSymbol {
        /// The address.
        at: Gva,
    },
    /// The kernel forbids a probe there, or patches the text itself.
    #[error("{at}: {why}")]
    Forbidden {
        /// The address.
        at: Gva,
        /// The reason.
        why: Forbidden,
    },
    /// The address is not the start of an instruction.
    #[error(transparent)]
    Boundary(#[from] insn::BoundaryError),
    /// The instruction can be neither emulated nor copied.
    #[error("{at}: {why}")]
    Instruction {
        /// The address.
        at: Gva,
        /// The reason.
        why: Refusal,
    },
    /// The text holds an int3 that is not ours.
    #[error("{at} already holds an int3 that is not ours: the guest is probing or patching it")]
    ForeignBreakpoint {
        /// The address.
        at: Gva,
    },
    /// The guest's ftrace has a call in the entry nop.
    #[error("{at} is a function entry that the guest's ftrace is using")]
    FtraceInUse {
        /// The address.
        at: Gva,
    },
    /// The text cannot be read.
    #[error("the kernel's text at {at} is not mapped")]
    Unmapped {
        /// The address.
        at: Gva,
    },
    /// The text changed between the check and the patch.
    #[error("the text at {at} changed while the probe was being planted: try again")]
    TextChanged {
        /// The address.
        at: Gva,
    },
    /// The guest runs another kernel than the one it was booted with.
    #[error(
        "the guest runs another kernel since a kexec: the probes of the first are gone, and none can be \
         planted; boot a machine with that kernel to probe it"
    )]
    Replaced,
    /// The guest rewrote the text under another probe there.
    #[error("the guest rewrote the text at {at} under a probe: unregister the probes there first")]
    Rewritten {
        /// The address.
        at: Gva,
    },
    /// The guest has a kprobe of its own there, which would not be hit any more.
    #[error("the guest has a kprobe of its own at {at}: it would not be hit any more")]
    Kprobe {
        /// The address.
        at: Gva,
    },
    /// A kprobe of the guest's own may become a jump over the address. The guest keeps a copy of the text under its
    /// jump.
    #[error("the guest has a kprobe of its own at {kprobe}, whose jump may come to cover {at}")]
    UnderKprobe {
        /// The address.
        at: Gva,
        /// Address of the guest's kprobe.
        kprobe: Gva,
    },
    /// No slot could be allocated for the out-of-line copy.
    #[error("no out-of-line slot for {at}")]
    Slot {
        /// The address.
        at: Gva,
        /// Why.
        #[source]
        source: HiddenError,
    },
    /// The exception window cannot be built.
    #[error("{at} must be stepped, and the guest's interrupt descriptor table cannot be read")]
    NoWindow {
        /// The address.
        at: Gva,
    },
    /// The requested mechanism cannot run the instruction.
    #[error("the instruction at {at} can only be emulated, not {wanted}")]
    Mechanism {
        /// The address.
        at: Gva,
        /// The requested mechanism.
        wanted: Mechanism,
    },
    /// A jump was requested, and is impossible there.
    #[error("the probe at {at} cannot be optimized")]
    Unoptimized {
        /// The address.
        at: Gva,
        /// Why.
        #[source]
        source: Unoptimized,
    },
    /// The address of a return probe, or of a function to be skipped, is not the function's entry.
    #[error(
        "{at} is {offset:#x} bytes into {symbol}: only a function's entry can be used for {what}"
    )]
    NotEntry {
        /// The address.
        at: Gva,
        /// The function.
        symbol: String,
        /// Offset into the function.
        offset: u64,
        /// The request that needs the entry.
        what: &'static str,
    },
    /// The function does not return from the call that entered it, or depends on its return address.
    #[error("{symbol} {why}, so its returns cannot be probed")]
    NeverReturns {
        /// The function.
        symbol: String,
        /// What the function does.
        why: &'static str,
    },
    /// The current task is not known, so calls of different tasks cannot be distinguished.
    #[error("return probes need the layout of the guest's tasks: {0}")]
    NoTasks(TaskUnknown),
    /// The kernel's stacks cannot be unwound.
    #[error("the kernel's stack cannot be recorded: {0}")]
    NoStacks(OrcError),
    /// The module is not loaded.
    #[error("module {module} is not loaded")]
    ModuleNotLoaded {
        /// The module's name.
        module: String,
    },
    /// The guest's modules cannot be read.
    #[error("nothing of module {module} can be probed: {why}")]
    ModulesHidden {
        /// The module's name.
        module: String,
        /// Why.
        why: ModuleError,
    },
    /// The types of a module are not known.
    #[error("module {module}: {why}")]
    NoModuleTypes {
        /// The module's name.
        module: String,
        /// Why.
        why: Box<NoModuleTypes>,
    },
    /// The pattern is for functions of a module that is not loaded, so these functions are not known.
    #[error("module {module} is not loaded, so it is not known what `{pattern}` stands for")]
    ModuleNeeded {
        /// The module's name.
        module: String,
        /// The pattern.
        pattern: String,
    },
    /// A fetch argument or a filter cannot be resolved.
    #[error(transparent)]
    Argument(ParseError),
    /// The arguments exceed what an event can carry.
    #[error(transparent)]
    Arguments(SpecError),
    /// The copy cannot be relocated to its slot.
    #[error("the instruction at {at} cannot be relocated")]
    Relocate {
        /// The address.
        at: Gva,
        /// Why.
        #[source]
        source: insn::RelocateError,
    },
}

impl Refused {
    /// Returns the column of the refused part in the text of `definition`; `None` if no part of it is to blame.
    /// A definition that was expanded from a pattern has the columns of the pattern.
    pub(crate) fn column(&self, definition: &Definition) -> Option<u32> {
        let marks = definition.marks;
        let column = match self {
            Self::Argument(error) => Column(error.column),
            Self::OtherBuild { .. }
            | Self::ModuleNotLoaded { .. }
            | Self::ModulesHidden { .. }
            | Self::NoModuleTypes { .. }
            | Self::ModuleNeeded { .. } => marks.target,
            Self::OffsetOutside { .. }
            | Self::Padding { .. }
            | Self::Boundary(_)
            | Self::Instruction { .. }
            | Self::NotEntry { .. } => marks.offset,
            Self::Symbol(_)
            | Self::ModuleSymbol(_)
            | Self::NoMatch { .. }
            | Self::TooManyMatches { .. }
            | Self::Pattern { .. }
            | Self::NotText { .. }
            | Self::InitText { .. }
            | Self::NoSymbol { .. }
            | Self::Forbidden { .. }
            | Self::ForeignBreakpoint { .. }
            | Self::FtraceInUse { .. }
            | Self::Unmapped { .. }
            | Self::Kprobe { .. }
            | Self::UnderKprobe { .. }
            | Self::NeverReturns { .. } => marks.place,
            // The reason is outside the definition: another option of the request, the guest or the machine.
            _ => return None,
        };
        u32::try_from(column.0).ok()
    }
}

/// A site that cannot be armed, with the reason.
#[derive(Debug)]
pub(crate) struct Obstacle {
    pub(crate) at: Gva,
    pub(crate) why: Refused,
}

/// The sites that cannot be armed; at least one.
#[derive(Debug)]
pub(crate) struct Obstacles {
    first: Obstacle,
    others: Vec<Obstacle>,
}

impl Obstacles {
    /// Returns the obstacles in `found`; `None` if there are none.
    pub(crate) fn of(found: impl IntoIterator<Item = Obstacle>) -> Option<Self> {
        let mut found = found.into_iter();
        Some(Self {
            first: found.next()?,
            others: found.collect(),
        })
    }

    pub(crate) fn first(self) -> Obstacle {
        self.first
    }

    /// Returns all obstacles, in the order in which they were found.
    pub(crate) fn all(self) -> impl Iterator<Item = Obstacle> {
        std::iter::once(self.first).chain(self.others)
    }
}

impl From<Obstacle> for Obstacles {
    fn from(first: Obstacle) -> Self {
        let others = Vec::new();
        Self { first, others }
    }
}
