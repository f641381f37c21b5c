//! The state of each probe and each site in the registry.
//!
//! ```text
//!   text of a site:  its own ◄──► int3 ◄──► jump
//!                        └──────────────────┘
//! ```
//! Invariant: the patch stored for a site is the one last written to the guest's text there.

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
    /// Receives the probe's actions and shown values, if they are known only once its module is loaded.
    pub(crate) awaited: Option<Awaited>,
    /// Instances of a return probe.
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) placement: Placement,
}

#[derive(Clone, Debug)]
pub(crate) enum Placement {
    Pending,
    Refused(Refused),
    At(Gva),
    /// The probe's module was unloaded, or the guest runs another kernel.
    Gone,
}

#[derive(Debug)]
pub(crate) struct SiteState {
    /// The probepoint, as planned.
    pub(crate) point: Probepoint,
    /// Whether the site is left to the guest's ftrace, which has put its call there.
    pub(crate) occupied: bool,
    pub(crate) slot: Option<SlotCode>,
    /// Probes at the site, by ascending id, which is the order of registration.
    pub(crate) members: Vec<ProbeId>,
    /// The engine's own hook at the site.
    pub(crate) internal: Option<Internal>,
    pub(crate) patch: Patch,
    /// Why there is no detour although the site could have a jump.
    pub(crate) unprepared: Option<Unoptimized>,
    /// Whether the site is left to the guest, which has rewritten the text there or may rewrite it.
    pub(crate) gone: bool,
}

/// What the text of a site holds.
#[derive(Clone, Debug)]
pub(crate) enum Patch {
    /// The site's own instruction.
    None,
    /// An int3 over the first byte of the instruction.
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

    /// Returns the original text that `patch` replaces: the site's instruction, or all instructions under a jump.
    pub(crate) fn original(&self, patch: &Patch) -> &[u8] {
        match (patch, &self.point.span) {
            (Patch::Jump(_), Ok(span)) => span.bytes(),
            _ => self.point.displaced.bytes(),
        }
    }
}

impl Patch {
    /// Returns the bytes that replace the original text.
    pub(crate) fn bytes(&self) -> impl Iterator<Item = u8> + use<> {
        let (bytes, len) = match self {
            Self::None => ([0; JUMP], 0),
            Self::Breakpoint => ([INT3; JUMP], 1),
            Self::Jump(jump) => (jump.detour.jump(), JUMP),
        };
        bytes.into_iter().take(len)
    }
}

/// All sites, by their addresses.
pub(crate) type Sites = BTreeMap<Gva, SiteState>;

/// Returns the guest's text at `at` if each of the `sites` holds the patch that `of` returns for it. `original` is
/// the original text at `at`.
pub(crate) fn patched<'s>(
    sites: &'s Sites,
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

/// Returns the sites whose patches may overlap the `len` bytes at `at`.
pub(super) fn reaching(
    sites: &Sites,
    at: Gva,
    len: usize,
) -> impl Iterator<Item = (Gva, &SiteState)> {
    let end = at.wrapping_add(len as u64);
    // A jump may begin before `at` and extend past it.
    let first = at.wrapping_sub(JUMP as u64 - 1);
    let range = sites.range(first.min(at)..end.max(at));
    range.map(|(start, site)| (*start, site))
}

/// Returns the byte at address `at` of `text`, which begins at `start`; `None` if `text` does not reach it.
pub(super) fn byte_at(text: &mut [u8], start: Gva, at: Gva) -> Option<&mut u8> {
    let offset = usize::try_from(at.offset_from(start)?).ok()?;
    text.get_mut(offset)
}
