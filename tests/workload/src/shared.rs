//! A value shared by threads and forked processes of this program.

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;

/// Types that are valid when all their bytes are zero, and that several processes may use at once.
///
/// # Safety
/// The type must have both properties. In practice such types are atomics, and arrays and structs of them.
pub(crate) unsafe trait Shareable: Sync {}

/// A `T` in memory that stays shared across `fork`. Never unmapped before the program ends.
#[derive(Debug)]
pub(crate) struct Shared<T: 'static>(&'static T);

impl<T: Shareable> Shared<T> {
    /// Creates a value whose bytes are all zero.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: asks for new memory at an address of the kernel's choice.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<T>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let value = NonNull::new(memory.cast::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: page-aligned zero bytes of the right size, valid by the trait's promise, mapped
        // until the program ends, and never handed out mutably.
        Ok(Self(unsafe { value.as_ref() }))
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

// SAFETY: atomics are valid as zeros, and atomic across processes.
unsafe impl Shareable for std::sync::atomic::AtomicU32 {}
// SAFETY: as above.
unsafe impl Shareable for std::sync::atomic::AtomicU64 {}
// SAFETY: an array of shareable values.
unsafe impl<T: Shareable, const N: usize> Shareable for [T; N] {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::child::Child;

    #[test]
    fn child_writes_what_the_parent_reads() {
        let words = Shared::<[AtomicU32; 3]>::new().unwrap();
        let child = Child::start(|| {
            words[2].store(9, Ordering::Relaxed);
            Ok(())
        });
        child.unwrap().end().unwrap().succeeded().unwrap();
        assert_eq!(
            words.each_ref().map(|w| w.load(Ordering::Relaxed)),
            [0, 0, 9]
        );
    }
}
