//! How we learn that the kernel's text is final.
//!
//! Until late in boot the kernel rewrites its own text (alternatives, ftrace, static calls) and
//! cannot take our breakpoints. So before the guest starts we overwrite two bytes of a function
//! that runs once, right before the first user process, with `out GATE_PORT, al`; the exit gives us
//! the moment. States: `set → lifted`. Invariant: the original bytes are back before the guest
//! executes past them.

use std::sync::atomic::{AtomicBool, Ordering};

use hvprobe_arch::insn::{GateHead, instruction_len};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_introspect::image::KernelImage;
use hvprobe_introspect::probe::patch::GATE_PORT;

use crate::memory::GuestRam;

/// Functions of `kernel_init` (init/main.c) that run once, after `mark_readonly`, the latest first.
const CANDIDATES: [&str; 2] = ["rcu_end_inkernel_boot", "mark_rodata_ro"];

/// The entry nop, or the `call __fentry__` it was: ftrace checks these bytes during boot.
const ENTRY_NOP_LEN: usize = 5;

/// Two patched bytes of the guest kernel.
#[derive(Debug)]
pub(super) struct Tripwire {
    at: Gva,
    gpa: Gpa,
    original: [u8; 2],
    lifted: AtomicBool,
}

impl Tripwire {
    /// Sets a tripwire in the loaded, not yet started kernel; `None` when the image has no place
    /// for one.
    pub(super) fn set(image: &KernelImage, ram: &GuestRam) -> Option<Self> {
        let at = CANDIDATES.iter().find_map(|name| place(image, name))?;
        let gpa = Gpa(at.0.wrapping_sub(image.virt_to_phys_offset()));
        let expected = image.bytes_at(at, 2)?;
        let mut original = [0; 2];
        ram.read(gpa, &mut original).ok()?;
        if original != expected {
            return None;
        }
        ram.write(gpa, &GateHead::patch(GATE_PORT)).ok()?;
        Some(Self {
            at,
            gpa,
            original,
            lifted: AtomicBool::new(false),
        })
    }

    pub(super) fn at(&self) -> Gva {
        self.at
    }

    pub(super) fn gpa(&self) -> Gpa {
        self.gpa
    }

    /// Whether `rip` is what a host shows at our `out`: its address or the one after it.
    pub(super) fn is_at(&self, rip: Gva) -> bool {
        rip == self.at || rip == self.at.wrapping_add(2)
    }

    /// Puts the original bytes back; `false` if that has been done, or the guest was faster.
    pub(super) fn lift(&self, ram: &GuestRam) -> bool {
        if self.lifted.swap(true, Ordering::AcqRel) {
            return false;
        }
        let mut now = [0; 2];
        ram.read(self.gpa, &mut now).is_ok()
            && now == GateHead::patch(GATE_PORT)
            && ram.write(self.gpa, &self.original).is_ok()
    }
}

/// The first instruction after the function's entry nop that may be overwritten.
fn place(image: &KernelImage, name: &str) -> Option<Gva> {
    let symbol = image.symbols().lookup(name).ok()?;
    if image.is_init_text(symbol.addr) {
        return None;
    }
    let mut at = symbol.addr;
    let mut skipped = 0;
    while skipped < ENTRY_NOP_LEN {
        // ENDBR64 and the entry nop are whole instructions of four and five bytes.
        let code = image.bytes_at(at, 16)?;
        let len = instruction_len(code, at)?;
        if len < 4 {
            break;
        }
        skipped = if len == ENTRY_NOP_LEN { len } else { 0 };
        at = at.wrapping_add(len as u64);
        if at.offset_from(symbol.addr)? + 2 > symbol.size {
            return None;
        }
    }
    let second = at.wrapping_add(1);
    (image.forbidden(at).is_none() && image.forbidden(second).is_none()).then_some(at)
}
