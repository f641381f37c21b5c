//! Whom records leave it to to follow the stacks that detours have copied.

use std::fmt;

use hvprobe_arch::Regs;
use hvprobe_arch::detour::StackCopy;
use hvprobe_arch::mem::PhysMemory;

use crate::event::Captured;

/// Follows copied stacks.
pub trait Follower: fmt::Debug + Send + Sync {
    /// Appends the stack in `copy` at a hit with the registers `regs`, of at most `most` addresses, to `into`.
    fn follow(
        &self,
        copy: &StackCopy<'_>,
        regs: &Regs,
        mem: &dyn PhysMemory,
        most: u8,
        into: &mut Captured,
    );
}
