//! One change of guest text: the probepoints that get an int3 or a jump, and those that get their bytes back.
//!
//! Invariant: everything is checked before the first byte is written, so a change happens whole or not at all;
//! bytes are written only over the expected bytes; a probepoint that the guest has rewritten is never written
//! to.

use hvprobe_arch::Gva;
use hvprobe_arch::insn::GateHead;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{PageTables, WalkError};
use hvprobe_arch::trap::GATE_PORT;

use super::site::{SiteState, Sites, byte_at, patched, reaching};
use crate::plan::text::PristineText;
use crate::refusal::{Obstacle, Obstacles, Refused};

/// Change of the text at one place.
#[derive(Clone, Debug)]
pub(crate) struct Edit {
    pub(crate) at: Gva,
    pub(crate) from: Vec<u8>,
    /// The text that replaces `from`, of the same length.
    pub(crate) to: Vec<u8>,
}

impl Edit {
    /// Returns the part of `bytes` that has to be written: all up to the last difference between the two texts.
    /// `bytes` is either `from` or `to`.
    fn changed<'b>(&self, bytes: &'b [u8]) -> &'b [u8] {
        let same = self.from.iter().rev().zip(self.to.iter().rev());
        let same = same.take_while(|(from, to)| from == to).count();
        &bytes[..bytes.len() - same.min(bytes.len())]
    }
}

/// Guest text, accessed through the kernel's page tables.
pub(crate) struct Text<'a> {
    pub(crate) tables: &'a PageTables,
    pub(crate) mem: &'a dyn PhysMemory,
}

impl Text<'_> {
    /// Returns whether the text at `at` is `bytes`.
    pub(crate) fn holds(&self, at: Gva, bytes: &[u8]) -> bool {
        let mut now = [0; 2 * hvprobe_arch::insn::MAX_LEN];
        now.get_mut(..bytes.len())
            .is_some_and(|now| self.tables.read(self.mem, at, now).is_ok() && now == bytes)
    }

    /// Replaces text according to `edits`.
    ///
    /// # Errors
    /// The places where the text is not as expected; then no byte has changed.
    pub(crate) fn replace(&self, edits: &[Edit]) -> Result<(), Obstacles> {
        let changed = edits.iter().filter(|edit| !self.holds(edit.at, &edit.from));
        let changed = changed.map(|Edit { at, .. }| Obstacle {
            at: *at,
            why: Refused::TextChanged { at: *at },
        });
        if let Some(obstacles) = Obstacles::of(changed) {
            return Err(obstacles);
        }
        for (done, edit) in edits.iter().enumerate() {
            let at = edit.at;
            if self.write(at, edit.changed(&edit.to)).is_err() {
                for back in &edits[..done] {
                    let _ = self.write(back.at, back.changed(&back.from));
                }
                let why = Refused::Unmapped { at };
                return Err(Obstacle { at, why }.into());
            }
        }
        Ok(())
    }

    fn write(&self, at: Gva, bytes: &[u8]) -> Result<(), WalkError> {
        self.tables.write(self.mem, at, bytes)
    }

    /// Writes our `out` over the head of the guest's #BP entry.
    pub(crate) fn plant_gate(&self, gate: &GateHead) -> Result<(), Refused> {
        let at = gate.at();
        if !self.holds(at, &gate.original()) {
            return Err(Refused::TextChanged { at });
        }
        self.write(at, &GateHead::patch(GATE_PORT))
            .map_err(|_| Refused::Unmapped { at })
    }

    /// Restores the head of the #BP entry; returns `false` if our `out` is no longer there.
    pub(crate) fn remove_gate(&self, gate: &GateHead) -> bool {
        self.holds(gate.at(), &GateHead::patch(GATE_PORT))
            && self.write(gate.at(), &gate.original()).is_ok()
    }
}

/// Returns whether the guest has replaced the text at `site`, one of `sites`.
pub(crate) fn is_rewritten(site: &SiteState, sites: &Sites, text: &Text<'_>) -> bool {
    let at = site.point.displaced.at();
    let original = site.original(&site.patch);
    let as_left = patched(sites, at, original, |_, site| &site.patch);
    site.gone || !text.holds(at, &as_left)
}

/// Live text with our own patches removed.
pub(crate) struct LiveText<'a> {
    pub(crate) text: Text<'a>,
    pub(crate) sites: &'a Sites,
}

impl LiveText<'_> {
    /// Removes our patches from `bytes`, which are at `at`.
    fn clean(&self, at: Gva, bytes: &mut [u8]) {
        for (start, site) in reaching(self.sites, at, bytes.len()) {
            let original = site.original(&site.patch);
            for ((n, ours), original) in (0..).zip(site.patch.bytes()).zip(original) {
                if let Some(byte) = byte_at(bytes, at, start.wrapping_add(n))
                    && *byte == ours
                {
                    *byte = *original;
                }
            }
        }
    }
}

impl PristineText for LiveText<'_> {
    fn read(&self, at: Gva, into: &mut [u8]) -> usize {
        let Text { tables, mem } = self.text;
        let mut got = into.len();
        if tables.read(mem, at, into).is_err() {
            let bytes = (0..).zip(into.chunks_mut(1));
            let read = bytes.map(|(n, byte)| tables.read(mem, at.wrapping_add(n), byte));
            got = read.take_while(Result::is_ok).count();
        }
        self.clean(at, &mut into[..got]);
        got
    }

    fn is_final(&self) -> bool {
        true
    }
}
