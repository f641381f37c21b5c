//! Interface for unwinding the stacks that detours have copied.

use std::fmt;

use hvprobe_arch::Regs;
use hvprobe_arch::detour::StackCopy;
use hvprobe_arch::mem::PhysMemory;

use crate::event::Captured;

/// Unwinds copied stacks.
pub trait Follower: fmt::Debug + Send + Sync {
    /// Appends at most `most` addresses of the stack in `copy` to `into`. `regs` are the registers at the hit.
    fn follow(
        &self,
        copy: &StackCopy<'_>,
        regs: &Regs,
        mem: &dyn PhysMemory,
        most: u8,
        into: &mut Captured,
    );
}
