//! Memory for the files that boots read.
//!
//! Invariant: the files of all boots under way take at most [`ROOM`] bytes. A boot that waits for room blocks only
//! its own thread.

use std::fs;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use hvprobe_machine::MachineConfig;

/// Room for the files of all boots under way, in bytes.
const ROOM: u64 = 4 << 30;
/// Minimum number of bytes that are counted for a kernel, because a packed kernel is unpacked.
const LEAST: u64 = 64 << 20;

/// Counts the bytes of [`ROOM`] that boots have taken.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    taken: Mutex<u64>,
    changed: Condvar,
}

/// Room for the files of one boot; released on drop.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    of: &'a Reading,
    bytes: u64,
}

/// Maximum numbers of bytes that are read of a kernel's file and of an initrd, in this order.
const LONGEST: [u64; 2] = [1 << 30, 3 << 30];

/// Returns the memory that the files of this machine take, in bytes. A file that cannot be inspected counts as
/// empty, because it cannot be read either.
pub(crate) fn length(config: &MachineConfig) -> u64 {
    let of = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
    let initrd = config.initrd.as_deref().map_or(0, of);
    // No more of it is read than fits into the guest.
    let initrd = initrd.min(config.memory).min(LONGEST[1]);
    let kernel = of(&config.kernel).clamp(LEAST, LONGEST[0]);
    kernel.saturating_add(initrd)
}

impl Reading {
    /// Waits until there is room for `bytes` bytes, and takes it. More than the whole room counts as the whole
    /// room. Blocks.
    pub(crate) fn wait(&self, bytes: u64) -> Held<'_> {
        let bytes = bytes.min(ROOM);
        let is_too_much = |taken: &mut u64| *taken > ROOM.saturating_sub(bytes);
        let taken = self.changed.wait_while(self.taken(), is_too_much);
        *taken.unwrap_or_else(PoisonError::into_inner) += bytes;
        Held { of: self, bytes }
    }

    fn taken(&self) -> MutexGuard<'_, u64> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *self.of.taken() -= self.bytes;
        self.of.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::machines::fleet::tests::config;

    #[test]
    fn files_beyond_the_room_wait_for_others_and_the_largest_has_all_of_it() {
        let reading = Reading::default();
        let (sender, hear) = mpsc::channel();
        thread::scope(|scope| {
            let [one, other] = [ROOM - LEAST, LEAST].map(|bytes| reading.wait(bytes));
            let waiting = &reading;
            scope.spawn(move || {
                let all = waiting.wait(u64::MAX);
                sender.send(*waiting.taken()).unwrap();
                drop(all);
            });
            let soon = Duration::from_millis(50);
            hear.recv_timeout(soon).unwrap_err();
            drop(one);
            hear.recv_timeout(soon).unwrap_err();
            drop(other);
            assert_eq!(hear.recv().unwrap(), ROOM);
        });
        assert_eq!(*reading.taken(), 0);
    }

    #[test]
    fn files_are_as_long_as_they_say_and_an_initrd_no_longer_than_its_guest_has_memory() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, length| {
            let path = folder.path().join(name);
            fs::File::create(&path).unwrap().set_len(length).unwrap();
            path
        };
        let mut config = MachineConfig {
            initrd: Some(file("initrd", 1 << 40)),
            memory: LEAST,
            ..config(&file("kernel", 3 * LEAST))
        };
        assert_eq!(length(&config), 4 * LEAST);
        config.initrd = None;
        // Of a kernel's file that is too long, at most `LONGEST[0]` bytes are read.
        config.kernel = file("disk", 1 << 40);
        assert_eq!(length(&config), LONGEST[0]);
        config.kernel = "/nowhere".into();
        assert_eq!(length(&config), LEAST);
    }
}
