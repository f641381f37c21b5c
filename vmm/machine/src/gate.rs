//! The guest's #BP entry, at which int3s are caught in `idt-gate`.
//!
//! Invariant: undoing the push of an exception frame gives exactly the state at the int3.

use hvprobe_arch::insn::{GateError, GateHead};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{PageTables, WalkError};
use hvprobe_arch::trap::{GATE_SIZE, INT3, vector};
use hvprobe_arch::{Gva, Regs};
use kvm_bindings::kvm_sregs;

/// Offset of the #BP gate in the IDT.
const BREAKPOINT_GATE: u64 = vector::BREAKPOINT as u64 * GATE_SIZE as u64;

/// Reason why the guest's #BP entry cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GateMissing {
    #[error("the guest's interrupt descriptor table cannot be read")]
    Idt(#[source] WalkError),
    #[error("the guest's #BP entry at {at} cannot be read")]
    Entry {
        at: Gva,
        #[source]
        source: WalkError,
    },
    #[error("the guest's #BP entry cannot be patched")]
    Head(#[from] GateError),
}

/// The guest's #BP entry, for `idt-gate`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate {
    pub(crate) head: GateHead,
    pub(crate) tables: PageTables,
}

/// The exception frame that the processor pushes in 64-bit mode (SDM vol. 3, 6.14.2).
struct Frame {
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
}

impl Frame {
    /// Reads the frame at the stack pointer `rsp`. `read` reads memory at an address, and returns whether that was
    /// possible.
    fn at(read: impl FnOnce(Gva, &mut [u8]) -> bool, rsp: u64) -> Option<Self> {
        let mut raw = [0; 40];
        if !read(Gva(rsp), &mut raw) {
            return None;
        }
        let word = |n: usize| {
            raw[n * 8..n * 8 + 8]
                .try_into()
                .map_or(0, u64::from_le_bytes)
        };
        Some(Self {
            rip: word(0),
            cs: word(1),
            rflags: word(2),
            rsp: word(3),
        })
    }
}

impl Gate {
    /// Finds the guest's #BP entry through its IDT.
    pub(crate) fn find(
        tables: PageTables,
        sregs: &kvm_sregs,
        mem: &dyn PhysMemory,
    ) -> Result<Self, GateMissing> {
        let mut raw = [0; GATE_SIZE];
        let descriptor = Gva(sregs.idt.base.wrapping_add(BREAKPOINT_GATE));
        tables
            .read(mem, descriptor, &mut raw)
            .map_err(GateMissing::Idt)?;
        let [o0, o1, _, _, _, _, o2, o3, o4, o5, o6, o7, ..] = raw;
        let at = Gva(u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]));
        let mut code = [0; 16];
        tables
            .read(mem, at, &mut code)
            .map_err(|source| GateMissing::Entry { at, source })?;
        let head = GateHead::analyse(&code, at)?;
        Ok(Self { head, tables })
    }

    /// Returns the registers from before the processor delivered the #BP of a kernel-mode int3, with RIP at the
    /// int3. Returns `None` for a #BP from user mode, which is never ours, and if the frame cannot be read.
    #[inline]
    pub(crate) fn before(read: impl FnOnce(Gva, &mut [u8]) -> bool, regs: &Regs) -> Option<Regs> {
        let frame = Frame::at(read, regs.rsp).filter(|frame| frame.cs & 3 == 0)?;
        Some(Regs {
            rip: frame.rip.wrapping_sub(1),
            rsp: frame.rsp,
            rflags: frame.rflags,
            ..*regs
        })
    }

    /// Like [`Self::before`], but only for a vCPU that has not reached the gate yet, and only if the int3 is still
    /// in place. Then the delivery can be undone without losing anything.
    pub(crate) fn undone(
        &self,
        read: impl Fn(Gva, &mut [u8]) -> bool,
        regs: &Regs,
    ) -> Option<Regs> {
        let before = Self::before(&read, regs).filter(|_| self.head.is_ahead(Gva(regs.rip)))?;
        let mut byte = [0];
        (read(Gva(before.rip), &mut byte) && byte == [INT3]).then_some(before)
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::Gpa;
    use hvprobe_arch::paging::Levels;

    use super::*;

    const ENTRY: u64 = 0xffff_ffff_8160_0300;
    const AT: u64 = 0xffff_ffff_8100_0104;
    const STACK: u64 = 0xffff_c900_0000_fda8;

    /// Returns the gate of an entry that begins with `code`.
    fn gate(code: &[u8]) -> Gate {
        Gate {
            head: GateHead::analyse(code, Gva(ENTRY)).unwrap(),
            tables: PageTables {
                root: Gpa(0x1000),
                levels: Levels::Four,
            },
        }
    }

    /// Calls [`Gate::undone`] with RIP at [`ENTRY`] + `n`. The #BP came from [`AT`] in segment `cs`; the byte at
    /// [`AT`] is `byte`.
    fn undone(gate: &Gate, n: u64, cs: u64, byte: u8) -> Option<Regs> {
        let frame = [AT + 1, cs, 0x246, STACK, 0x18];
        let raw: Vec<u8> = frame.into_iter().flat_map(u64::to_le_bytes).collect();
        let read = |at: Gva, into: &mut [u8]| {
            let from: &[u8] = match at.0 {
                AT => &[byte],
                at if at == STACK - 40 => &raw,
                _ => return false,
            };
            into.copy_from_slice(from);
            true
        };
        let regs = Regs {
            rip: ENTRY + n,
            rsp: STACK - 40,
            rflags: 0x46,
            rax: 7,
            ..Regs::default()
        };
        gate.undone(read, &regs)
    }

    #[test]
    fn who_is_on_the_way_to_the_gate_goes_back_to_the_int3() {
        let back = Regs {
            rip: AT,
            rsp: STACK,
            rflags: 0x246,
            rax: 7,
            ..Regs::default()
        };
        let plain = gate(&[0x90, 0x90, 0x90, 0xfc]);
        assert_eq!(undone(&plain, 0, 0x10, 0xcc), Some(back));
        for n in [2, 3, 4] {
            assert_eq!(undone(&plain, n, 0x10, 0xcc), None);
        }
        // RIP is before the `endbr64`, where exceptions arrive, or after it.
        let tracked = gate(&[0xf3, 0x0f, 0x1e, 0xfa, 0x0f, 0x01, 0xca, 0xfc]);
        for n in [0, 4] {
            assert_eq!(undone(&tracked, n, 0x10, 0xcc), Some(back), "{n}");
        }
        assert_eq!(undone(&tracked, 6, 0x10, 0xcc), None);
    }

    #[test]
    fn breakpoints_of_user_space_and_int3s_that_are_gone_are_left_alone() {
        let gate = gate(&[0x90, 0x90, 0x90, 0xfc]);
        assert_eq!(undone(&gate, 0, 0x33, 0xcc), None);
        assert_eq!(undone(&gate, 0, 0x10, 0x55), None);
    }
}
