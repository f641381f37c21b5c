//! Changes that a hit makes to registers and memory of the guest.
//!
//! Invariant: a change that cannot be made does not prevent the others, and is counted by the caller.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::regs::Gpr;
use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::Change;

use super::context::Scene;

/// Makes as many of the `changes` as possible. Returns whether all of them could be made.
#[inline]
pub(super) fn apply<M: PhysMemory + ?Sized, C>(
    changes: &[Change],
    regs: &mut Regs,
    scene: &Scene<'_, M, C>,
) -> bool {
    changes.is_empty() || apply_all(changes, regs, scene)
}

/// Does the work of [`apply`] in a separate function, so that hits without changes do not need all registers.
#[inline(never)]
fn apply_all<M: PhysMemory + ?Sized, C>(
    changes: &[Change],
    regs: &mut Regs,
    scene: &Scene<'_, M, C>,
) -> bool {
    let mut all = true;
    for change in changes {
        match change {
            Change::Register { register, value } => regs.set(*register, *value),
            Change::Memory {
                base,
                offset,
                bytes,
            } => {
                let base = base.map_or(0, |base: Gpr| regs.get(base));
                let at = Gva(base.wrapping_add_signed(*offset));
                all &= scene.write(at, bytes);
            }
        }
    }
    all
}
