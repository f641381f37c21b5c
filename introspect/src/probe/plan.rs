//! From a definition to a probepoint: finding the address and deciding whether it is safe.
//!
//! Invariant: whatever is planned was an instruction boundary of kernel text, outside everything
//! the kernel forbids or patches itself, with an instruction we know how to carry out. When in
//! doubt the answer is no, with the reason.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Span;
use hvprobe_arch::insn::{self, Displaced, ENDBR64, Refusal, RelocateError};
use hvprobe_hit::calls::PoolError;
use hvprobe_linux::image::{Forbidden, KernelImage};
use hvprobe_linux::modules::{Module, ModuleError, ModuleList, ModuleLookupError, ModuleState};
use hvprobe_linux::symbols::{LookupError, Symbol, Symbols};
use hvprobe_linux::task::TaskUnknown;
use hvprobe_spec::definition::Target;
use hvprobe_spec::{Mechanism, ProbeSpec, Then};

use super::displaces::span;
use super::jump::Unoptimized;

/// Why a probe was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The symbol is unknown or ambiguous.
    #[error(transparent)]
    Symbol(#[from] LookupError),
    /// The symbol of a module is unknown or ambiguous.
    #[error(transparent)]
    ModuleSymbol(#[from] ModuleLookupError),
    /// No function matches the pattern.
    #[error("no function matches `{pattern}`{}", hvprobe_linux::symbols::Offer(.near))]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// Up to five names that look like it, best first.
        near: Vec<String>,
    },
    /// More functions match the patterns of a batch than may be planted at once.
    #[error("`{pattern}` brings the batch to {matches} probes or more; at most {max} are possible")]
    TooManyMatches {
        /// The pattern.
        pattern: String,
        /// How many there would be at least.
        matches: usize,
        /// How many may be.
        max: usize,
    },
    /// A pattern where one place is wanted.
    #[error("`{pattern}` is a pattern, which stands for no single place")]
    Pattern {
        /// The pattern.
        pattern: String,
    },
    /// A return probe cannot have its instances.
    #[error(transparent)]
    Instances(#[from] PoolError),
    /// The offset leads out of the function.
    #[error("offset {offset:#x} is outside {symbol}, which is {size:#x} bytes long")]
    OffsetOutside {
        /// The function.
        symbol: String,
        /// The offset asked for.
        offset: u64,
        /// The function's size.
        size: u64,
    },
    /// Not kernel text.
    #[error("{at} is not in the kernel's text")]
    NotText {
        /// The address.
        at: Gva,
    },
    /// Init text, freed at the end of boot.
    #[error("{at} is init text, which the kernel frees before probes can be planted")]
    InitText {
        /// The address.
        at: Gva,
    },
    /// No function is known to contain the address, so boundaries cannot be checked.
    #[error("no symbol contains {at}, so instruction boundaries cannot be checked")]
    NoSymbol {
        /// The address.
        at: Gva,
    },
    /// The kernel forbids it or patches it itself.
    #[error("{at}: {why}")]
    Forbidden {
        /// The address.
        at: Gva,
        /// The reason.
        why: Forbidden,
    },
    /// Not the start of an instruction.
    #[error(transparent)]
    Boundary(#[from] insn::BoundaryError),
    /// The instruction cannot be carried out elsewhere.
    #[error("{at}: {why}")]
    Instruction {
        /// The address.
        at: Gva,
        /// The reason.
        why: Refusal,
    },
    /// A breakpoint that is not ours.
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
    /// The guest's kernel is not the one that it was booted with.
    #[error(
        "the guest runs another kernel since a kexec: the probes of the first are gone, and none can be \
         planted; boot a machine with that kernel to probe it"
    )]
    Replaced,
    /// Another probe is there, and the guest rewrote the text under it.
    #[error("the guest rewrote the text at {at} under a probe: unregister the probes there first")]
    Rewritten {
        /// The address.
        at: Gva,
    },
    /// The guest's own kprobe would not be hit any more.
    #[error("the guest has a kprobe of its own at {at}: it would not be hit any more")]
    Kprobe {
        /// The address.
        at: Gva,
    },
    /// The slot for the out-of-line copy could not be had.
    #[error("no out-of-line slot for {at}")]
    Slot {
        /// The address.
        at: Gva,
        /// Why.
        #[source]
        source: crate::hidden::HiddenError,
    },
    /// The exception window cannot be built.
    #[error("{at} must be stepped, and the guest's interrupt descriptor table cannot be read")]
    NoWindow {
        /// The address.
        at: Gva,
    },
    /// The mechanism that was asked for cannot carry the instruction out.
    #[error("the instruction at {at} can only be emulated, not {wanted}")]
    Mechanism {
        /// The address.
        at: Gva,
        /// What was asked for.
        wanted: Mechanism,
    },
    /// A jump was asked for, and there can be none.
    #[error("the probe at {at} cannot be optimized")]
    Unoptimized {
        /// The address.
        at: Gva,
        /// Why.
        #[source]
        source: Unoptimized,
    },
    /// A return probe, or a function to be skipped, and not its entry.
    #[error(
        "{at} is {offset:#x} bytes into {symbol}: only a function's entry can be used for {what}"
    )]
    NotEntry {
        /// The address.
        at: Gva,
        /// The function.
        symbol: String,
        /// How far into it.
        offset: u64,
        /// What was asked for.
        what: &'static str,
    },
    /// A function that gives its stack to another task, or never returns.
    #[error("{symbol} {why}, so its returns cannot be probed")]
    NeverReturns {
        /// The function.
        symbol: String,
        /// What it does.
        why: &'static str,
    },
    /// The task that runs cannot be told, so that calls could not be told apart.
    #[error("return probes need the layout of the guest's tasks: {0}")]
    NoTasks(TaskUnknown),
    /// The module is not loaded.
    #[error("module {module} is not loaded")]
    ModuleNotLoaded {
        /// Its name.
        module: String,
    },
    /// Modules cannot be told.
    #[error("nothing of module {module} can be probed: {why}")]
    ModulesHidden {
        /// Its name.
        module: String,
        /// Why.
        why: ModuleError,
    },
    /// A pattern for functions of a module that is not loaded.
    #[error("module {module} is not loaded, so nothing tells what `{pattern}` stands for")]
    ModuleNeeded {
        /// The module's name.
        module: String,
        /// The pattern.
        pattern: String,
    },
    /// The copy cannot be made to work at its slot.
    #[error("the instruction at {at} cannot be relocated")]
    Relocate {
        /// The address.
        at: Gva,
        /// Why.
        #[source]
        source: insn::RelocateError,
    },
}

/// A site that cannot be armed, and why.
#[derive(Debug)]
pub(super) struct Obstacle {
    pub(super) at: Gva,
    pub(super) why: Refused,
}

/// Kernel text as its author wrote it: current bytes, without our own patches.
pub(super) trait PristineText {
    /// Fills `into` from `at` on, as far as it can be read; returns how many bytes.
    fn read(&self, at: Gva, into: &mut [u8]) -> usize;

    /// Whether boot-time patching is over.
    fn is_final(&self) -> bool;
}

/// The image's own bytes, for checks before the guest has final text.
pub(super) struct ImageText<'a>(pub(super) &'a KernelImage);

impl PristineText for ImageText<'_> {
    fn read(&self, at: Gva, into: &mut [u8]) -> usize {
        // The last function of a section may be shorter than what is asked for.
        for len in (1..=into.len()).rev() {
            if let Some(bytes) = self.0.bytes_at(at, len) {
                into[..len].copy_from_slice(bytes);
                return len;
            }
        }
        0
    }

    fn is_final(&self) -> bool {
        false
    }
}

/// The functions of a stock kernel stay far below this; longer "functions" are a hole in the
/// symbol table.
const MAX_FUNCTION: u64 = 1 << 20;

/// A probepoint that may be planted.
#[derive(Clone, Debug)]
pub(super) struct Probepoint {
    pub(super) symbol: (String, u64),
    pub(super) displaced: Displaced,
    /// The kernel has an exception-table entry for the instruction: it may fault, and the handler
    /// must find it in its place.
    pub(super) fixup: bool,
    /// The instruction before it may be `sti`, whose interrupt shadow then covers it.
    pub(super) after_sti: bool,
    /// The guest's ftrace puts a call there while it traces the function.
    pub(super) ftrace: bool,
    /// What a jump would displace, if there can be one.
    pub(super) span: Result<Span, Unoptimized>,
}

/// Finds and checks the probepoint of `spec`.
pub(super) fn plan(
    spec: &ProbeSpec,
    kernel: &Kernel<'_>,
    text: &dyn PristineText,
) -> Result<Probepoint, Refused> {
    let (at, owner) = resolve(&spec.definition.target, kernel, text)?;
    if owner.is_init_text(at) {
        return Err(Refused::InitText { at });
    }
    if !owner.is_text(at) {
        return Err(Refused::NotText { at });
    }
    let (symbol, offset) = owner
        .symbols()
        .containing(at)
        .filter(|(_, offset)| *offset < MAX_FUNCTION)
        .ok_or(Refused::NoSymbol { at })?;
    if let Some(why) = owner.forbidden(at) {
        return Err(Refused::Forbidden { at, why });
    }
    let start = symbol.addr;
    let wanted = usize::try_from(offset).unwrap_or(0) + insn::MAX_LEN;
    let mut code = vec![0; wanted];
    let got = text.read(start, &mut code);
    code.truncate(got);
    insn::boundary(&code, start, at)?;
    let before = wanted.checked_sub(insn::MAX_LEN + 1);
    let after_sti = before.is_some_and(|at| code.get(at) == Some(&STI));
    let code = code
        .get(wanted - insn::MAX_LEN..)
        .filter(|code| !code.is_empty())
        .ok_or(Refused::Unmapped { at })?;
    if code[0] == 0xcc {
        return Err(Refused::ForeignBreakpoint { at });
    }
    // Lock prefixes of the kernel's own text come back only if they were taken away at all.
    let settled = matches!(owner, Owner::Image(_))
        && kernel
            .modules
            .is_some_and(|modules| !modules.restores_lock_prefixes());
    let may_get_lock = |at, byte| {
        let may = text.is_final() && !settled;
        may.then(|| owner.forbidden_as_is(at, byte)).flatten()
    };
    if text.is_final() && code[0] == CALL && owner.is_ftrace_site(at) {
        return Err(Refused::FtraceInUse { at });
    }
    if let Some(why) = may_get_lock(at, code[0]) {
        return Err(Refused::Forbidden { at, why });
    }
    let displaced = insn::classify(code, at).map_err(|why| Refused::Instruction { at, why })?;
    if let Some(wanted) = spec.mechanism.filter(|least| *least > Mechanism::Emulated)
        && displaced.boosted(at) == Err(RelocateError::Emulated { at })
    {
        return Err(Refused::Mechanism { at, wanted });
    }
    let is_entry = offset == 0 || offset == entry_skip(start, owner, text);
    let entry_only = match spec.actions.then {
        _ if spec.is_return() => Some("return probes"),
        Then::Return(_) => Some("skipping it"),
        _ => None,
    };
    if let Some(what) = entry_only.filter(|_| !is_entry) {
        let symbol = symbol.name.to_owned();
        return Err(Refused::NotEntry {
            at,
            symbol,
            offset,
            what,
        });
    }
    if spec.is_return() {
        check_returns(symbol, text)?;
    }
    Ok(Probepoint {
        symbol: (symbol.name.to_owned(), offset),
        fixup: owner.has_fixup(at),
        after_sti,
        ftrace: owner.is_ftrace_site(at),
        span: span(symbol, at, &owner, text, &may_get_lock),
        displaced,
    })
}

/// The whole code of a function, as far as it can be read.
pub(super) fn function(symbol: Symbol<'_>, text: &dyn PristineText) -> Vec<u8> {
    let size = usize::try_from(symbol.size.min(MAX_FUNCTION)).unwrap_or(0);
    let mut code = vec![0; size];
    let got = text.read(symbol.addr, &mut code);
    code.truncate(got);
    code
}

/// Functions that return on another stack than they were called on, or for another task
/// (arch/x86/entry/entry_64.S, arch/x86/kernel/process_64.c).
const STACK_SWITCHERS: [&str; 4] = [
    "__switch_to",
    "__switch_to_asm",
    "ret_from_fork",
    "ret_from_fork_asm",
];

/// Functions that never return although their code alone, parts of which the compiler puts
/// elsewhere, does not prove it (the kernel's own list: tools/objtool/noreturns.h).
const NEVER_RETURN: [&str; 8] = [
    "do_exit",
    "do_group_exit",
    "do_task_dead",
    "kthread_exit",
    "make_task_dead",
    "__module_put_and_kthread_exit",
    "cpu_startup_entry",
    "panic",
];

/// [R7]: refuses functions whose return would not be that of the call.
fn check_returns(symbol: Symbol<'_>, text: &dyn PristineText) -> Result<(), Refused> {
    let refused = |why| Refused::NeverReturns {
        symbol: symbol.name.to_owned(),
        why,
    };
    if STACK_SWITCHERS.contains(&symbol.name) {
        return Err(refused("switches stacks"));
    }
    if NEVER_RETURN.contains(&symbol.name) {
        return Err(refused("never returns"));
    }
    let code = function(symbol, text);
    if insn::may_return(&code, symbol.addr) {
        Ok(())
    } else {
        Err(refused("never returns"))
    }
}

/// Everything of the kernel that can be probed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel<'a> {
    pub(super) image: &'a KernelImage,
    /// `None` when they cannot be read.
    pub(super) modules: Option<&'a ModuleList>,
    /// Modules that are not live yet but whose text is final.
    pub(super) formed: &'a BTreeSet<Gva>,
}

impl<'a> Kernel<'a> {
    /// Whether the text of `module` is there, final, and stays until we are told.
    pub(super) fn is_loaded(&self, module: &Module) -> bool {
        match module.state() {
            ModuleState::Live => true,
            ModuleState::Coming => self.formed.contains(&module.address()),
            ModuleState::Going | ModuleState::Unformed => false,
        }
    }

    fn module_at(&self, at: Gva) -> Option<&'a Module> {
        let module = self.modules?.containing(at)?;
        self.is_loaded(module).then_some(module)
    }
}

/// Whose text an address is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Owner<'a> {
    Image(&'a KernelImage),
    Module(&'a Module),
}

impl<'a> Owner<'a> {
    fn is_text(self, at: Gva) -> bool {
        match self {
            Self::Image(image) => image.is_text(at),
            Self::Module(module) => module.text().contains(&at),
        }
    }

    fn is_init_text(self, at: Gva) -> bool {
        match self {
            Self::Image(image) => image.is_init_text(at),
            Self::Module(module) => module.init_text().is_some_and(|text| text.contains(&at)),
        }
    }

    fn symbols(self) -> &'a Symbols {
        match self {
            Self::Image(image) => image.symbols(),
            Self::Module(module) => module.symbols(),
        }
    }

    pub(super) fn forbidden(self, at: Gva) -> Option<Forbidden> {
        match self {
            Self::Image(image) => image.forbidden(at),
            Self::Module(module) => module.forbidden(at),
        }
    }

    fn forbidden_as_is(self, at: Gva, first: u8) -> Option<Forbidden> {
        match self {
            Self::Image(image) => image.forbidden_as_is(at, first),
            Self::Module(module) => module.forbidden_as_is(at, first),
        }
    }

    pub(super) fn has_fixup(self, at: Gva) -> bool {
        match self {
            Self::Image(image) => image.has_fixup(at),
            Self::Module(module) => module.has_fixup(at),
        }
    }

    fn is_ftrace_site(self, at: Gva) -> bool {
        match self {
            Self::Image(image) => image.is_ftrace_site(at),
            Self::Module(module) => module.is_ftrace_site(at),
        }
    }
}

fn resolve<'a>(
    target: &Target,
    kernel: &Kernel<'a>,
    text: &dyn PristineText,
) -> Result<(Gva, Owner<'a>), Refused> {
    let image = Owner::Image(kernel.image);
    let (name, offset, symbol, owner) = match target {
        Target::Address(at) => {
            let module = kernel.module_at(*at).map(Owner::Module);
            return Ok((*at, module.unwrap_or(image)));
        }
        Target::Functions { pattern, .. } => {
            let pattern = pattern.clone();
            return Err(Refused::Pattern { pattern });
        }
        Target::Symbol {
            module: Some(wanted),
            name,
            offset,
        } => {
            let not_loaded = || Refused::ModuleNotLoaded {
                module: wanted.clone(),
            };
            let modules = kernel.modules.ok_or_else(not_loaded)?;
            let loaded = |module: &&Module| kernel.is_loaded(module);
            modules.get(wanted).filter(loaded).ok_or_else(not_loaded)?;
            let (module, symbol) = modules.lookup_in(wanted, name)?;
            (name, offset, symbol, Owner::Module(module))
        }
        Target::Symbol {
            module: None,
            name,
            offset,
        } => match (kernel.image.symbols().lookup(name), kernel.modules) {
            (Ok(symbol), _) => (name, offset, symbol, image),
            (Err(unknown @ LookupError::Unknown { .. }), Some(modules)) => {
                match modules.lookup(name) {
                    Ok((module, symbol)) if kernel.is_loaded(module) => {
                        (name, offset, symbol, Owner::Module(module))
                    }
                    Ok(_) | Err(ModuleLookupError::Unknown { .. }) => return Err(unknown.into()),
                    Err(error) => return Err(error.into()),
                }
            }
            (Err(error), _) => return Err(error.into()),
        },
    };
    if *offset >= symbol.size && *offset > 0 {
        return Err(Refused::OffsetOutside {
            symbol: name.clone(),
            offset: *offset,
            size: symbol.size,
        });
    }
    // [K15]: offset 0 of a function that begins with an ENDBR means after the ENDBR.
    let landing = if *offset == 0 {
        entry_skip(symbol.addr, owner, text)
    } else {
        *offset
    };
    Ok((symbol.addr.wrapping_add(landing), owner))
}

/// Length of the ENDBR64 at `at`, or 0. The kernel seals those that it does not need: one that became
/// any nop of its length is still one.
fn entry_skip(at: Gva, owner: Owner<'_>, text: &dyn PristineText) -> u64 {
    let mut head = [0; ENDBR64.len()];
    if text.read(at, &mut head) < head.len() {
        return 0;
    }
    let was_endbr = || match owner {
        Owner::Image(image) => image.bytes_at(at, head.len()) == Some(&ENDBR64),
        Owner::Module(_) => false,
    };
    if insn::is_endbr64(&head) || insn::is_nop4(&head) && was_endbr() {
        head.len() as u64
    } else {
        0
    }
}

/// The opcodes of a near call and of `sti`.
const CALL: u8 = 0xe8;
const STI: u8 = 0xfb;
