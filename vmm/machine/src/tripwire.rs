//! The tripwire, which shows when the kernel's text is final.
//!
//! Until late in boot the kernel rewrites its own text (alternatives, ftrace, static calls) and does not tolerate
//! our breakpoints. Therefore, before the guest starts, two bytes of a function are overwritten with `out
//! GATE_PORT, al`. The function runs once, right before the first user process, so the exit of this `out` shows
//! that the text is final. States: `set → lifted`. Invariant: the original bytes are back before the guest executes
//! past them.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use hvprobe_arch::insn::{GateHead, instruction_len};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::trap::GATE_PORT;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_linux::image::{Forbidden, KernelImage};
use hvprobe_vm::memory::GuestRam;

/// Functions of `kernel_init` (init/main.c) that run once, after `mark_readonly`, the latest first.
const CANDIDATES: [&str; 2] = ["rcu_end_inkernel_boot", "mark_rodata_ro"];

/// Length of the nop at a function's entry, which replaces `call __fentry__`. ftrace checks these bytes during
/// boot.
const ENTRY_NOP_LEN: usize = 5;

/// Error: the image has no place for a tripwire. Contains the reason for each candidate.
#[derive(Debug)]
pub struct NoTripwire(Vec<(&'static str, Unfit)>);

impl fmt::Display for NoTripwire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing in this kernel shows when its text is final, which has to be known before probes are planted")?;
        for (name, why) in &self.0 {
            write!(f, "; `{name}`: {why}")?;
        }
        Ok(())
    }
}

impl std::error::Error for NoTripwire {}

/// Reason why a function is no place for a tripwire.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Unfit {
    #[error("no such function")]
    Missing,
    #[error("its code is discarded after boot")]
    Init,
    #[error("too short")]
    Short,
    #[error("{0}")]
    Forbidden(#[from] Forbidden),
    #[error("memory has other bytes than the image")]
    Other,
}

/// A tripwire: two patched bytes of the guest kernel.
#[derive(Debug)]
pub(crate) struct Tripwire {
    at: Gva,
    gpa: Gpa,
    original: [u8; 2],
    lifted: AtomicBool,
}

impl Tripwire {
    /// Sets a tripwire in the kernel, which is loaded and not started yet.
    pub(crate) fn set(image: &KernelImage, ram: &GuestRam) -> Result<Self, NoTripwire> {
        let mut unfit = Vec::new();
        for name in CANDIDATES {
            match place(image, name).and_then(|at| Self::set_at(at, image, ram)) {
                Ok(tripwire) => return Ok(tripwire),
                Err(why) => unfit.push((name, why)),
            }
        }
        Err(NoTripwire(unfit))
    }

    fn set_at(at: Gva, image: &KernelImage, ram: &GuestRam) -> Result<Self, Unfit> {
        let gpa = Gpa(at.0.wrapping_sub(image.virt_to_phys_offset()));
        let mut original = [0; 2];
        ram.read(gpa, &mut original).map_err(|_| Unfit::Other)?;
        if image.bytes_at(at, 2) != Some(&original) {
            return Err(Unfit::Other);
        }
        ram.write(gpa, &GateHead::patch(GATE_PORT))
            .map_err(|_| Unfit::Other)?;
        Ok(Self {
            at,
            gpa,
            original,
            lifted: AtomicBool::new(false),
        })
    }

    pub(crate) fn at(&self) -> Gva {
        self.at
    }

    pub(crate) fn gpa(&self) -> Gpa {
        self.gpa
    }

    /// Returns whether `rip` is a possible RIP of an exit by our `out`: its address or the one after it.
    pub(crate) fn is_at(&self, rip: Gva) -> bool {
        rip == self.at || rip == self.at.wrapping_add(2)
    }

    /// Restores the original bytes. Returns `false` if the tripwire was lifted before, or if the guest has
    /// overwritten the patch.
    pub(crate) fn lift(&self, ram: &GuestRam) -> bool {
        if self.lifted.swap(true, Ordering::AcqRel) {
            return false;
        }
        let mut now = [0; 2];
        ram.read(self.gpa, &mut now).is_ok()
            && now == GateHead::patch(GATE_PORT)
            && ram.write(self.gpa, &self.original).is_ok()
    }
}

/// Returns the address of the first instruction after the entry nop of function `name`, if it may be overwritten.
fn place(image: &KernelImage, name: &str) -> Result<Gva, Unfit> {
    let symbol = image.symbols().lookup(name).map_err(|_| Unfit::Missing)?;
    if image.is_init_text(symbol.addr) {
        return Err(Unfit::Init);
    }
    let mut at = symbol.addr;
    let mut skipped = 0;
    while skipped < ENTRY_NOP_LEN {
        // ENDBR64 and the entry nop are whole instructions of four and five bytes.
        let code = image.bytes_at(at, 16).ok_or(Unfit::Short)?;
        let len = instruction_len(code, at).ok_or(Unfit::Short)?;
        if len < 4 {
            break;
        }
        skipped = if len == ENTRY_NOP_LEN { len } else { 0 };
        at = at.wrapping_add(len as u64);
        let passed = at.offset_from(symbol.addr).ok_or(Unfit::Short)?;
        if passed + 2 > symbol.size {
            return Err(Unfit::Short);
        }
    }
    for at in [at, at.wrapping_add(1)] {
        if let Some(why) = image.forbidden(at) {
            return Err(why.into());
        }
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_a_place_is_reported_with_all_reasons() {
        let why = NoTripwire(vec![
            ("rcu_end_inkernel_boot", Unfit::Missing),
            ("mark_rodata_ro", Forbidden::Entry.into()),
        ]);
        let text = why.to_string();
        let reasons =
            "; `rcu_end_inkernel_boot`: no such function; `mark_rodata_ro`: it is entry code";
        assert!(text.contains(reasons), "{text}");
    }
}
