//! Plans a definition: finds the probepoint and decides whether it is safe.
//!
//! Invariant: when a probepoint is planned, it is an instruction boundary of kernel text, outside all text that the
//! kernel forbids or patches itself, and its instruction can be emulated or copied. In doubt the probe is refused,
//! with the reason.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Span;
use hvprobe_arch::insn::{self, Displaced, ENDBR64, RelocateError};
use hvprobe_linux::modules::{Module, ModuleLookupError};
use hvprobe_linux::symbols::{LookupError, Symbol};
use hvprobe_spec::definition::Target;
use hvprobe_spec::{Mechanism, ProbeSpec, Then};

use crate::plan::kernel::{Owner, Probeable};
use crate::plan::span::span;
use crate::plan::text::{MAX_FUNCTION, PristineText, function};
use crate::refusal::Refused;
use crate::unoptimized::Unoptimized;

/// A probepoint that may be planted.
#[derive(Clone, Debug)]
pub(crate) struct Probepoint {
    pub(crate) symbol: (String, u64),
    /// Whether calls enter the function there.
    pub(crate) entry: bool,
    /// Whether it is in a module.
    pub(crate) module: bool,
    pub(crate) displaced: Displaced,
    /// Whether the kernel has an exception-table entry for the instruction. Then it may fault, and the fault must
    /// show the instruction's own address.
    pub(crate) fixup: bool,
    /// Whether the instruction before the probepoint may be `sti`, whose interrupt shadow would cover the displaced
    /// instruction.
    pub(crate) after_sti: bool,
    /// Whether the guest's ftrace puts a call there while it traces the function.
    pub(crate) ftrace: bool,
    /// Instructions that a jump would displace, or why no jump is possible.
    pub(crate) span: Result<Span, Unoptimized>,
}

/// Finds and checks the probepoint of `spec`.
pub(crate) fn plan(
    spec: &ProbeSpec,
    kernel: &Probeable<'_>,
    text: &dyn PristineText,
) -> Result<Probepoint, Refused> {
    kernel.check_window()?;
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
    let is_entry = offset == 0 || offset == entry_skip(start, owner, text);
    if !is_entry {
        check_padding(symbol, at, offset, text)?;
    }
    let before = wanted.checked_sub(insn::MAX_LEN + 1);
    let after_sti = before.is_some_and(|at| code.get(at) == Some(&STI));
    let code = code
        .get(wanted - insn::MAX_LEN..)
        .filter(|code| !code.is_empty())
        .ok_or(Refused::Unmapped { at })?;
    if code[0] == 0xcc {
        return Err(Refused::ForeignBreakpoint { at });
    }
    // The kernel restores lock prefixes in its own text only if it has removed them.
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
        entry: is_entry,
        module: matches!(owner, Owner::Module(_)),
        fixup: owner.has_fixup(at),
        after_sti,
        ftrace: owner.is_ftrace_site(at),
        span: span(symbol, at, &owner, text, &may_get_lock),
        displaced,
    })
}

/// Refuses padding between the end of a function and the next function.
fn check_padding(
    symbol: Symbol<'_>,
    at: Gva,
    offset: u64,
    text: &dyn PristineText,
) -> Result<(), Refused> {
    let code = function(symbol, text);
    let len = insn::code_len(&code, symbol.addr) as u64;
    // Nothing is known about text that could not be read.
    if offset < len || offset >= code.len() as u64 {
        return Ok(());
    }
    let symbol = symbol.name.to_owned();
    Err(Refused::Padding { at, symbol, len })
}

/// Functions that return on another stack than the one they were called on, or in another task
/// (arch/x86/entry/entry_64.S, arch/x86/kernel/process_64.c).
const STACK_SWITCHERS: [&str; 4] = [
    "__switch_to",
    "__switch_to_asm",
    "ret_from_fork",
    "ret_from_fork_asm",
];

/// Functions that never return. Their code does not prove that, because the compiler puts parts of it elsewhere
/// (the kernel's own list: tools/objtool/noreturns.h).
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

/// Functions that are entered by a return, so the stack holds no return address of a caller
/// (arch/x86/kernel/ftrace_64.S).
const RETURNED_TO: [&str; 1] = ["return_to_handler"];
/// Functions that identify the traced function by their return address (arch/x86/kernel/ftrace_64.S).
const KNOWS_CALLER: [&str; 4] = [
    "__fentry__",
    "ftrace_caller",
    "ftrace_regs_caller",
    "ftrace_graph_caller",
];

/// Refuses functions that do not return from the call that entered them, or that depend on their return address.
fn check_returns(symbol: Symbol<'_>, text: &dyn PristineText) -> Result<(), Refused> {
    let may_return = || insn::may_return(&function(symbol, text), symbol.addr);
    let why = if STACK_SWITCHERS.contains(&symbol.name) {
        "switches stacks"
    } else if RETURNED_TO.contains(&symbol.name) {
        "is returned to, not called"
    } else if KNOWS_CALLER.contains(&symbol.name) {
        "looks at where it returns to"
    } else if NEVER_RETURN.contains(&symbol.name) || !may_return() {
        "never returns"
    } else {
        return Ok(());
    };
    let symbol = symbol.name.to_owned();
    Err(Refused::NeverReturns { symbol, why })
}

fn resolve<'a>(
    target: &Target,
    kernel: &Probeable<'a>,
    text: &dyn PristineText,
) -> Result<(Gva, Owner<'a>), Refused> {
    let image = Owner::Image(kernel.image);
    let (module, name, offset) = match target {
        Target::Address(at) => {
            let module = kernel.module_at(*at).map(Owner::Module);
            return Ok((*at, module.unwrap_or(image)));
        }
        Target::Functions { pattern, .. } => {
            let pattern = pattern.clone();
            return Err(Refused::Pattern { pattern });
        }
        Target::Symbol {
            module,
            name,
            offset,
        } => (module, name, *offset),
    };
    let (symbol, owner) = match module {
        Some(wanted) => {
            let not_loaded = || Refused::ModuleNotLoaded {
                module: wanted.clone(),
            };
            let modules = kernel.modules.ok_or_else(not_loaded)?;
            let loaded = |module: &&Module| kernel.is_loaded(module);
            modules.get(wanted).filter(loaded).ok_or_else(not_loaded)?;
            let (module, symbol) = modules.lookup_in(wanted, name)?;
            (symbol, Owner::Module(module))
        }
        None => match (kernel.image.symbols().lookup(name), kernel.modules) {
            (Ok(symbol), _) => (symbol, image),
            (Err(unknown @ LookupError::Unknown { .. }), Some(modules)) => {
                match modules.lookup(name) {
                    Ok((module, symbol)) if kernel.is_loaded(module) => {
                        (symbol, Owner::Module(module))
                    }
                    Ok(_) | Err(ModuleLookupError::Unknown { .. }) => return Err(unknown.into()),
                    Err(error) => return Err(error.into()),
                }
            }
            (Err(error), _) => return Err(error.into()),
        },
    };
    let (symbol, offset) = match offset >= symbol.size && offset > 0 {
        false => (symbol, offset),
        // The offset counts from the beginning of the text, so the address may be in any function.
        true if target.is_from_beginning() => {
            let at = symbol.addr.wrapping_add(offset);
            let found = owner.symbols().containing(at);
            found.ok_or(Refused::NoSymbol { at })?
        }
        true => {
            return Err(Refused::OffsetOutside {
                symbol: name.clone(),
                offset,
                size: symbol.size,
            });
        }
    };
    // Offset 0 of a function that begins with an ENDBR means after the ENDBR.
    let landing = match offset {
        0 => entry_skip(symbol.addr, owner, text),
        _ => offset,
    };
    Ok((symbol.addr.wrapping_add(landing), owner))
}

/// Returns the length of the ENDBR64 at `at`, or of the nop that has replaced it; otherwise 0. The kernel seals an
/// ENDBR that it does not need: it writes a nop of the same length there.
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

/// The opcode of a near call.
const CALL: u8 = 0xe8;
/// The opcode of `sti`.
const STI: u8 = 0xfb;
