//! Plans a definition for a kernel image, without a running guest.
//!
//! Invariant: the plan is made by the same code as at a registration; conditions that only a running guest can
//! decide are listed and never guessed.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Span;
use hvprobe_arch::insn;
use hvprobe_linux::image::KernelImage;
use hvprobe_spec::{Actions, Item, Mechanism, ProbeSpec};

use crate::guest::readers::KernelReaders;
use crate::info::Shown;
use crate::plan::arguments::{Resolved, resolve};
use crate::plan::kernel::Probeable;
use crate::plan::probepoint::{Probepoint, plan};
use crate::plan::text::{ImageText, PristineText};
use crate::refusal::Refused;
use crate::registered::{BATCH_MAX, Skipped};
use crate::registry::expand::singles;
use crate::registry::hooks::watched;
use crate::registry::optimize::{Abilities, STACKS, needs_exit, stack_fields};
use crate::registry::slots::{mechanism_of, slot_kind};
use crate::unoptimized::Unoptimized;

/// The plan of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    /// Definition of the probe. If the given definition is a pattern, the definition of one matching function.
    pub definition: String,
    /// Name of the probe's events.
    pub event: String,
    /// The probepoint.
    pub at: Gva,
    /// Symbol that contains the probepoint, and the offset into it.
    pub symbol: (String, u64),
    /// Bytes of the instruction at the probepoint, as they are in a running guest.
    pub code: Vec<u8>,
    /// The instruction in Intel syntax.
    pub instruction: String,
    /// Why hits take an exit; `None` if they need none.
    pub exit: Option<String>,
    /// What must hold in a running guest so that hits take no exit.
    pub provided: Vec<&'static str>,
    /// How the displaced instruction takes effect if hits take exits.
    pub with_exits: Mechanism,
    /// Whether the guest's ftrace may put a call at the probepoint. The probe does not fire while the call is
    /// there.
    pub ftrace: bool,
    /// What events of the probe show.
    pub shown: Shown,
    /// Actions at hits, including the captures that the shown values need.
    pub actions: Actions,
}

/// Plans `spec` for `image`. Returns the plan of its probe, or why the probe is refused. For a pattern, returns one
/// such result for each matching function.
#[must_use]
pub fn explain(image: &KernelImage, spec: &ProbeSpec) -> Vec<Result<Explained, Skipped>> {
    let kernel = Probeable {
        image,
        modules: None,
        formed: &BTreeSet::new(),
        keeps_module_types: false,
        readable: KernelReaders::may_be_in(image),
    };
    let all = match singles(&kernel, spec, BATCH_MAX) {
        Ok(all) => all,
        Err(why) => return vec![Err(Skipped::new(0, spec, why))],
    };
    let mut results = Vec::with_capacity(all.len());
    for one in &all {
        results.push(explained(one, &kernel).map_err(|why| Skipped::new(0, one, why)));
    }
    results
}

fn explained(spec: &ProbeSpec, kernel: &Probeable<'_>) -> Result<Explained, Refused> {
    kernel.check_stacks(spec)?;
    let point = plan(spec, kernel, &Booted(kernel.image))?;
    let Resolved { shown, actions, .. } = resolve(spec, Some(&point), kernel)?;
    let can = Abilities {
        read: kernel.readable,
        stacks: stack_fields(kernel.image, kernel.image.task_layout().ok())
            .map(|_| ())
            .ok_or(STACKS),
    };
    let what = needs_exit(spec, &actions, || can);
    let fit = match (what, &point.span) {
        (Some(what), _) => Err(format!("it {what}")),
        (None, Err(why)) => Err(why.to_string()),
        (None, Ok(span)) => Ok(span),
    };
    let at = point.displaced.at();
    if let (Some(Mechanism::Optimized), Err(why)) = (spec.mechanism, &fit) {
        let source = point.span.clone().err();
        let source = source.unwrap_or_else(|| Unoptimized::Build(why.clone()));
        return Err(Refused::Unoptimized { at, source });
    }
    Ok(Explained {
        definition: spec.definition.to_string(),
        event: spec.definition.event_path(),
        at,
        code: point.displaced.bytes().to_vec(),
        instruction: insn::text(point.displaced.bytes(), at),
        provided: fit.as_ref().map_or_else(
            |_| Vec::new(),
            |span| provided(spec, &point, span, &actions, kernel),
        ),
        exit: fit.err(),
        with_exits: with_exits(spec, &point),
        ftrace: point.ftrace,
        symbol: point.symbol,
        shown,
        actions,
    })
}

/// Returns how the instruction takes effect under an int3.
fn with_exits(spec: &ProbeSpec, point: &Probepoint) -> Mechanism {
    let ends = spec.actions.post || spec.actions.faults;
    let least = spec.mechanism.unwrap_or(Mechanism::Emulated);
    let least = least.max(Mechanism::Emulated);
    mechanism_of(slot_kind(&point.displaced, point.fixup, ends, least))
}

/// Returns what must hold in a running guest so that a jump can displace `span`.
fn provided(
    spec: &ProbeSpec,
    point: &Probepoint,
    span: &Span,
    actions: &Actions,
    kernel: &Probeable<'_>,
) -> Vec<&'static str> {
    let reads = actions.capture.iter().any(Item::reaches_memory);
    let alone = span.interior().next().is_none();
    let all = [
        (true, "optimization is on, and there is room for a detour"),
        (
            watched().any(|name| name == point.symbol.0),
            "this function is not watched for the sake of other probes",
        ),
        (
            !alone,
            "no other probe, and no kprobe of the guest's own, is under the jump",
        ),
        (
            span.needs_quiescence(),
            "no task stands between the instructions under the jump when it is planted",
        ),
        (
            reads,
            "the kernel's own loads, by which memory is read, are not probed and are as they should be",
        ),
        (
            actions.record_stacks(),
            "there is no return probe, which would have another address on the stack",
        ),
        (
            spec.is_return() && kernel.image.task_layout().is_err(),
            "the running task can be identified",
        ),
    ];
    let found = all.into_iter().filter(|(needed, _)| *needed);
    found.map(|(_, what)| what).collect()
}

/// The image's own text, with the only patch that boot makes at possible probepoints: nops in place of ftrace's
/// calls.
struct Booted<'a>(&'a KernelImage);

impl PristineText for Booted<'_> {
    fn read(&self, at: Gva, into: &mut [u8]) -> usize {
        let len = ImageText(self.0).read(at, into);
        let Some(read) = into.get_mut(..len) else {
            return len;
        };
        // Boot replaces ftrace's calls with nops before probes can be planted.
        for offset in 0..read.len() {
            let here = at.wrapping_add(offset as u64);
            if read[offset] == CALL && self.0.is_ftrace_site(here) {
                for (byte, nop) in read[offset..].iter_mut().zip(NOP5) {
                    *byte = nop;
                }
            }
        }
        len
    }

    fn is_final(&self) -> bool {
        false
    }
}

/// The opcode of a near call.
const CALL: u8 = 0xe8;
/// Nop that replaces a call of ftrace (`x86_nops` in arch/x86/kernel/alternative.c).
const NOP5: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
