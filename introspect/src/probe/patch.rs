//! One change of guest text: which probepoints get their int3, which get their byte back.
//!
//! Invariant: everything is checked before the first byte is written, so a change happens whole or
//! not at all; a byte is written only over the byte that was expected there; a probepoint the guest
//! has rewritten is never written to.

use hvprobe_arch::Gva;
use hvprobe_arch::insn::GateHead;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;

use super::plan::{Obstacle, PristineText, Refused};

/// The breakpoint instruction.
pub(super) const INT3: u8 = 0xcc;

/// The port the patched #BP entry writes to. Its number is the opcode of `nop`, so a virtual CPU
/// that was interrupted between the first two bytes of `nop nop` while the entry was patched goes
/// on as if nothing had happened. Nothing in a PC answers there.
pub const GATE_PORT: u8 = 0x90;

/// Guest text reached through the kernel's page tables.
pub(super) struct Text<'a> {
    pub(super) tables: &'a PageTables,
    pub(super) mem: &'a dyn PhysMemory,
}

impl Text<'_> {
    fn byte(&self, at: Gva) -> Option<u8> {
        let mut byte = [0];
        self.tables.read(self.mem, at, &mut byte).ok()?;
        Some(byte[0])
    }

    /// Whether the text at `at` is `bytes`.
    pub(super) fn holds(&self, at: Gva, bytes: &[u8]) -> bool {
        let mut now = [0; hvprobe_arch::insn::MAX_LEN];
        now.get_mut(..bytes.len())
            .is_some_and(|now| self.tables.read(self.mem, at, now).is_ok() && now == bytes)
    }

    /// Whether our int3 is at `at`, in front of the rest of the instruction that was there.
    pub(super) fn is_patched(&self, at: Gva, instruction: &[u8]) -> bool {
        let rest = instruction.get(1..).unwrap_or_default();
        self.byte(at) == Some(INT3) && self.holds(at.wrapping_add(1), rest)
    }

    /// Plants an int3 at every one of `sites`, given with the bytes expected there.
    ///
    /// # Errors
    /// The first site whose text is not as expected; then no byte has changed.
    pub(super) fn arm<'s>(
        &self,
        sites: impl Iterator<Item = (Gva, &'s [u8])> + Clone,
    ) -> Result<(), Obstacle> {
        for (at, expected) in sites.clone() {
            if !self.holds(at, expected) {
                let why = Refused::TextChanged { at };
                return Err(Obstacle { at, why });
            }
        }
        for (done, (at, _)) in sites.clone().enumerate() {
            if self.tables.write(self.mem, at, &[INT3]).is_err() {
                for (back, expected) in sites.take(done) {
                    let _ = self.tables.write(self.mem, back, &expected[..1]);
                }
                let why = Refused::Unmapped { at };
                return Err(Obstacle { at, why });
            }
        }
        Ok(())
    }

    /// Gives `instruction` its first byte back, at `at`; `false` when what was left there no longer
    /// is, and nothing was done.
    pub(super) fn disarm(&self, at: Gva, instruction: &[u8]) -> bool {
        let first = instruction.get(..1).unwrap_or_default();
        self.is_patched(at, instruction) && self.tables.write(self.mem, at, first).is_ok()
    }

    /// Puts our `out` over the head of the guest's #BP entry.
    pub(super) fn plant_gate(&self, gate: &GateHead) -> Result<(), Refused> {
        let at = gate.at();
        if !self.holds(at, &gate.original()) {
            return Err(Refused::TextChanged { at });
        }
        self.tables
            .write(self.mem, at, &GateHead::patch(GATE_PORT))
            .map_err(|_| Refused::Unmapped { at })
    }

    /// Takes our `out` away again; `false` when it is no longer there.
    pub(super) fn remove_gate(&self, gate: &GateHead) -> bool {
        self.holds(gate.at(), &GateHead::patch(GATE_PORT))
            && self
                .tables
                .write(self.mem, gate.at(), &gate.original())
                .is_ok()
    }
}

/// Live text with our own patches taken out again.
pub(super) struct LiveText<'a, F> {
    pub(super) text: Text<'a>,
    /// The byte our int3 at an address displaced, if there is one.
    pub(super) displaced: F,
}

impl<F: Fn(Gva) -> Option<u8>> PristineText for LiveText<'_, F> {
    fn read(&self, at: Gva, into: &mut [u8]) -> usize {
        let mut got = into.len();
        if self.text.tables.read(self.text.mem, at, into).is_err() {
            got = 0;
            for (n, byte) in (0_u64..).zip(into.iter_mut()) {
                match self.text.byte(at.wrapping_add(n)) {
                    Some(value) => *byte = value,
                    None => break,
                }
                got += 1;
            }
        }
        for (n, byte) in (0_u64..).zip(into[..got].iter_mut()) {
            if *byte == INT3 {
                *byte = (self.displaced)(at.wrapping_add(n)).unwrap_or(INT3);
            }
        }
        got
    }

    fn is_final(&self) -> bool {
        true
    }
}
