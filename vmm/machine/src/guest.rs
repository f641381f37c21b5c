//! The guest as the probe engine sees it: its memory, and how to stop it for a change of its text.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_engine::{StopError, WhileStopped, World};
use hvprobe_hit::table::ProbeTable;

use crate::vcpu::shared::Shared;

pub(crate) struct Guest<'a>(pub(crate) &'a Shared);

impl World for Guest<'_> {
    fn memory(&self) -> &dyn PhysMemory {
        &*self.0.ram
    }

    fn stopped(&self, change: &mut WhileStopped<'_>) -> Result<Duration, StopError> {
        let ram = &*self.0.ram;
        let control = &self.0.control;
        let stopped_for =
            control.transact(|standings| -> Option<Arc<ProbeTable>> { change(ram, standings) })?;
        // The change may have added the first detours, so the collector must check how long it may sleep.
        self.0.detours.wake();
        Ok(stopped_for)
    }

    fn has_ended(&self) -> bool {
        self.0.control.is_ending()
    }

    fn note_writes(&self, on: bool) -> bool {
        let noting = &self.0.noting_writes;
        if on && noting.swap(true, Ordering::AcqRel) {
            return false;
        }
        let done = self.0.ram.note_writes(on).is_ok();
        if !(on && done) {
            noting.store(false, Ordering::Release);
        }
        done
    }

    fn written(&self) -> Option<Vec<Gpa>> {
        self.0.ram.written().ok()
    }

    fn collect(&self) {
        self.0.detours.catch_up();
    }
}
