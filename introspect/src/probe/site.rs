//! What the registry keeps of each probe and of each site.
//!
//! ```text
//!   text of a site:  its own ◄──► int3 ◄──► jump
//!                        └──────────────────┘
//! ```
//! Invariant: what a site says of its patch is what was last written to the guest's text there.

use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::Span;
use hvprobe_arch::insn::{Displaced, SlotCode};

use super::jump::{Jump, Unoptimized};
use super::patch::INT3;
use super::plan::Refused;
use super::spec::Actions;
use super::table::{Counters, Internal};
use super::{ProbeId, ProbeSpec};
use crate::calls::Pool;

#[derive(Debug)]
pub(super) struct Probe {
    pub(super) spec: ProbeSpec,
    pub(super) counters: Arc<Counters>,
    pub(super) actions: Arc<Actions>,
    /// The instances of a return probe.
    pub(super) pool: Option<Arc<Pool>>,
    pub(super) place: Place,
}

#[derive(Clone, Debug)]
pub(super) enum Place {
    Pending,
    Refused(Refused),
    At(Gva),
    /// Its module was unloaded.
    Gone,
}

#[derive(Debug)]
pub(super) struct SiteState {
    pub(super) symbol: (String, u64),
    pub(super) displaced: Displaced,
    /// The instruction may fault and must then be found in its place.
    pub(super) fixup: bool,
    /// The instruction before it may be `sti`.
    pub(super) after_sti: bool,
    /// What a jump would displace, if there can be one.
    pub(super) span: Result<Span, Unoptimized>,
    /// The guest's ftrace puts a call there while it traces the function.
    pub(super) ftrace: bool,
    /// That call is there now.
    pub(super) occupied: bool,
    pub(super) slot: Option<SlotCode>,
    pub(super) members: Vec<ProbeId>,
    /// What the engine itself wants to know here.
    pub(super) internal: Option<Internal>,
    pub(super) patch: Patch,
    /// Why there is no detour though the site could have a jump.
    pub(super) unprepared: Option<Unoptimized>,
    /// The guest rewrote our patch.
    pub(super) gone: bool,
}

/// What a site's text holds.
#[derive(Clone, Debug)]
pub(super) enum Patch {
    /// Its own instruction.
    None,
    /// An int3 in front of the rest of its instruction.
    Breakpoint,
    /// A jump to a detour.
    Jump(Jump),
}

impl SiteState {
    pub(super) fn is_armed(&self) -> bool {
        !matches!(self.patch, Patch::None)
    }

    pub(super) fn jump(&self) -> Option<&Jump> {
        match &self.patch {
            Patch::Jump(jump) => Some(jump),
            Patch::None | Patch::Breakpoint => None,
        }
    }

    /// The text as its author wrote it, as far as any patch reaches.
    pub(super) fn original(&self) -> &[u8] {
        let span = self.span.as_ref().map_or(&[][..], Span::bytes);
        // The first instruction of a span is the site's own.
        if span.is_empty() {
            self.displaced.bytes()
        } else {
            span
        }
    }

    /// The text with `patch` in it.
    pub(super) fn patched(&self, patch: &Patch) -> Vec<u8> {
        let mut text = self.original().to_vec();
        let over: &[u8] = match patch {
            Patch::None => &[],
            Patch::Breakpoint => &[INT3],
            Patch::Jump(jump) => &jump.detour.jump(),
        };
        for (byte, patched) in text.iter_mut().zip(over) {
            *byte = *patched;
        }
        text
    }
}
