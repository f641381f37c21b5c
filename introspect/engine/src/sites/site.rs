//! What the registry keeps of each probe and of each site.
//!
//! ```text
//!   text of a site:  its own ◄──► int3 ◄──► jump
//!                        └──────────────────┘
//! ```
//! Invariant: what a site says of its patch is what was last written to the guest's text there.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::JUMP;
use hvprobe_arch::insn::SlotCode;
use hvprobe_arch::trap::INT3;
use hvprobe_hit::Counters;
use hvprobe_hit::calls::Pool;
use hvprobe_hit::table::Internal;
use hvprobe_spec::{Actions, ProbeId, ProbeSpec};

use crate::code::jump::Jump;
use crate::info::{Awaited, Shown};
use crate::plan::probepoint::Probepoint;
use crate::refusal::Refused;
use crate::unoptimized::Unoptimized;

#[derive(Debug)]
pub(crate) struct Probe {
    pub(crate) spec: ProbeSpec,
    pub(crate) counters: Arc<Counters>,
    pub(crate) actions: Arc<Actions>,
    pub(crate) shown: Arc<Shown>,
    /// To be told what it does and shows, if that is known once its module is loaded.
    pub(crate) awaited: Option<Awaited>,
    /// The instances of a return probe.
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) place: Place,
}

#[derive(Clone, Debug)]
pub(crate) enum Place {
    Pending,
    Refused(Refused),
    At(Gva),
    /// Its module was unloaded.
    Gone,
}

#[derive(Debug)]
pub(crate) struct SiteState {
    /// Where it is, and what was found out about that place.
    pub(crate) point: Probepoint,
    /// The call that the guest's ftrace puts there is there now.
    pub(crate) occupied: bool,
    pub(crate) slot: Option<SlotCode>,
    /// In ascending order: that of their registration.
    pub(crate) members: Vec<ProbeId>,
    /// What the engine itself wants to know here.
    pub(crate) internal: Option<Internal>,
    pub(crate) patch: Patch,
    /// Why there is no detour though the site could have a jump.
    pub(crate) unprepared: Option<Unoptimized>,
    /// The guest rewrote our patch.
    pub(crate) gone: bool,
}

/// What a site's text holds.
#[derive(Clone, Debug)]
pub(crate) enum Patch {
    /// Its own instruction.
    None,
    /// An int3 in front of the rest of its instruction.
    Breakpoint,
    /// A jump to a detour.
    Jump(Jump),
}

impl SiteState {
    pub(crate) fn is_armed(&self) -> bool {
        !matches!(self.patch, Patch::None)
    }

    pub(crate) fn jump(&self) -> Option<&Jump> {
        match &self.patch {
            Patch::Jump(jump) => Some(jump),
            Patch::None | Patch::Breakpoint => None,
        }
    }

    /// The text as its author wrote it, as far as `patch` has to do with it: the site's instruction,
    /// or all those under a jump.
    pub(crate) fn original(&self, patch: &Patch) -> &[u8] {
        match (patch, &self.point.span) {
            (Patch::Jump(_), Ok(span)) => span.bytes(),
            _ => self.point.displaced.bytes(),
        }
    }
}

impl Patch {
    /// The bytes that are there instead of the text's own.
    pub(crate) fn bytes(&self) -> impl Iterator<Item = u8> + use<> {
        let (bytes, len) = match self {
            Self::None => ([0; JUMP], 0),
            Self::Breakpoint => ([INT3; JUMP], 1),
            Self::Jump(jump) => (jump.detour.jump(), JUMP),
        };
        bytes.into_iter().take(len)
    }
}

/// What the guest's text is at `at`, where its author wrote `original`, while every one of `sites`
/// holds the patch that `of` tells.
pub(crate) fn patched<'s>(
    sites: &'s BTreeMap<Gva, SiteState>,
    at: Gva,
    original: &[u8],
    of: impl Fn(Gva, &'s SiteState) -> &'s Patch,
) -> Vec<u8> {
    let mut text = original.to_vec();
    for (start, site) in reaching(sites, at, original.len()) {
        for (n, byte) in (0..).zip(of(start, site).bytes()) {
            if let Some(into) = byte_at(&mut text, at, start.wrapping_add(n)) {
                *into = byte;
            }
        }
    }
    text
}

/// The sites whose patches may reach into the `len` bytes at `at`.
pub(super) fn reaching(
    sites: &BTreeMap<Gva, SiteState>,
    at: Gva,
    len: usize,
) -> impl Iterator<Item = (Gva, &SiteState)> {
    let end = at.wrapping_add(len as u64);
    // A jump may begin before and reach in.
    let first = at.wrapping_sub(JUMP as u64 - 1);
    let range = sites.range(first.min(at)..end.max(at));
    range.map(|(start, site)| (*start, site))
}

/// The byte of `text`, which begins at `start`, that is at `at`, if it reaches there.
pub(super) fn byte_at(text: &mut [u8], start: Gva, at: Gva) -> Option<&mut u8> {
    let offset = usize::try_from(at.offset_from(start)?).ok()?;
    text.get_mut(offset)
}
