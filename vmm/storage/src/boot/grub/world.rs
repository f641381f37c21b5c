//! What a script of GRUB can see of the disk.

use crate::filesystem::tree::Stat;

/// By what `search` looks for a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Key {
    Uuid,
    Label,
    PartUuid,
    /// A file that is in it.
    File,
}

/// The disk as GRUB names it: `hd0` for a disk without partitions, `hd0,gpt2` or `hd0,msdos2` for a partition.
pub(in super::super) trait World {
    /// Returns the device whose file system has this `value`.
    fn find(&self, key: Key, value: &str) -> Option<String>;

    /// Returns whether files on `device` can be seen.
    fn is_seen(&self, device: &str) -> bool;

    /// Describes the file at `path` on `device`, if there is one.
    fn stat(&self, device: &str, path: &str) -> Option<Stat>;

    /// Returns the content of the configuration file at `path` on `device`.
    fn read(&self, device: &str, path: &str) -> Option<Vec<u8>>;
}

/// Splits `(DEVICE)/PATH`. Without a device, it is that of the variable `root`.
pub(super) fn split(path: &str) -> (Option<&str>, &str) {
    match path.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
        Some((device, path)) => (Some(device), path),
        None => (None, path),
    }
}
