//! The atomics and the lock of this module, which the model checker replaces by its own.

#[cfg(feature = "loom")]
pub(super) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};
#[cfg(not(feature = "loom"))]
pub(super) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

/// Locks `mutex`. A holder that panicked left nothing half done: what the locks of this module
/// guard is published by one store at the end.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
