//! Kernel files of this process's machines. Each is unpacked and read once, for as long as anything uses it: all
//! machines with the same kernel share its symbols and types.
//!
//! Invariant: a file counts as the same as before only if its device, inode, size and times of change are. It is
//! remembered only if they were the same before and after it was read, and the last change was [`SETTLED`] ago:
//! a second change within the clock's resolution would leave no trace.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_vm::loader::LoadError;
use hvprobe_vmlinux::Kernel;

/// Age of a file's last change at which the file is remembered.
const SETTLED: Duration = Duration::from_secs(2);

/// The files in use.
static USED: Mutex<Vec<(Identity, Arc<Slot>)>> = Mutex::new(Vec::new());

/// What distinguishes a file from others, and from itself after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    file: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    fn of(path: &Path) -> io::Result<Self> {
        let file = fs::metadata(path)?;
        Ok(Self {
            file: (file.dev(), file.ino()),
            size: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }

    fn is_settled(&self, now: SystemTime) -> bool {
        let changed = u64::try_from(self.changed.0).unwrap_or(0);
        let changed = UNIX_EPOCH.checked_add(Duration::from_secs(changed));
        let age = changed.and_then(|changed| now.duration_since(changed).ok());
        age.is_some_and(|age| age > SETTLED)
    }
}

/// What the users of one file share. The locks are held while it is unpacked and read.
#[derive(Debug, Default)]
struct Slot {
    unpacked: Mutex<Weak<Kernel>>,
    image: Mutex<Weak<KernelImage>>,
}

impl Slot {
    fn of(identity: Identity) -> Arc<Self> {
        let mut used = lock(&USED);
        used.retain(|(_, slot)| slot.is_used());
        if let Some((_, slot)) = used.iter().find(|(known, _)| *known == identity) {
            return Arc::clone(slot);
        }
        let slot = Arc::<Self>::default();
        used.push((identity, Arc::clone(&slot)));
        slot
    }

    fn is_used(self: &Arc<Self>) -> bool {
        // The first reference is that of the list.
        Arc::strong_count(self) > 1
            || lock(&self.unpacked).strong_count() > 0
            || lock(&self.image).strong_count() > 0
    }
}

/// An unpacked kernel file.
#[derive(Debug)]
pub struct KernelFile {
    kernel: Arc<Kernel>,
    /// `None` if the file is not shared.
    slot: Option<Arc<Slot>>,
}

impl KernelFile {
    /// Reads and unpacks the file at `path`, unless another value of this process has done so and the file has
    /// not changed since. Values that are kept make boots of the same file shorter.
    ///
    /// # Errors
    /// As [`Kernel::open`].
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        Self::open_at(path, SystemTime::now())
    }

    fn open_at(path: &Path, now: SystemTime) -> Result<Self, LoadError> {
        let identity = Identity::of(path).ok().filter(|it| it.is_settled(now));
        let Some(identity) = identity else {
            let kernel = Arc::new(Kernel::open(path)?);
            return Ok(Self { kernel, slot: None });
        };
        let slot = Slot::of(identity);
        let mut unpacked = lock(&slot.unpacked);
        if let Some(kernel) = unpacked.upgrade() {
            drop(unpacked);
            let slot = Some(slot);
            return Ok(Self { kernel, slot });
        }
        let kernel = Arc::new(Kernel::open(path)?);
        let is_same = Identity::of(path).is_ok_and(|now| now == identity);
        if is_same {
            *unpacked = Arc::downgrade(&kernel);
        }
        drop(unpacked);
        let slot = is_same.then_some(slot);
        Ok(Self { kernel, slot })
    }

    /// Returns the unpacked kernel.
    pub(crate) fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Reads the kernel's symbols and types, unless they are in use already.
    ///
    /// # Errors
    /// As [`KernelImage::parse`].
    pub fn image(&self) -> Result<Arc<KernelImage>, ImageError> {
        let read = || KernelImage::parse(self.kernel.elf()).map(Arc::new);
        let Some(slot) = &self.slot else {
            return read();
        };
        let mut known = lock(&slot.image);
        if let Some(image) = known.upgrade() {
            return Ok(image);
        }
        let image = read()?;
        *known = Arc::downgrade(&image);
        Ok(image)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use hvprobe_fixtures::probed;

    use super::*;

    /// Opens `path` as if its last change were long ago.
    fn open(path: &Path) -> KernelFile {
        let later = SystemTime::now() + 2 * SETTLED;
        KernelFile::open_at(path, later).expect("a kernel")
    }

    #[test]
    fn a_file_is_read_once_until_it_changes_or_nobody_uses_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vmlinux");
        fs::write(&path, probed::vmlinux()).unwrap();
        let first = open(&path);
        let image = first.image().unwrap();
        let again = open(&path);
        assert!(Arc::ptr_eq(&first.kernel, &again.kernel));
        assert!(Arc::ptr_eq(&image, &again.image().unwrap()));
        let slot = first.slot.clone().expect("shared");
        // A machine keeps the image alone.
        drop((first, again));
        let third = open(&path);
        assert!(Arc::ptr_eq(&image, &third.image().unwrap()));

        fs::write(&path, probed::unwindable()).unwrap();
        let changed = open(&path);
        assert!(!Arc::ptr_eq(&third.kernel, &changed.kernel));
        assert!(!Arc::ptr_eq(&image, &changed.image().unwrap()));
        drop((third, image));
        assert_eq!(slot.unpacked.lock().unwrap().strong_count(), 0);
        assert_eq!(slot.image.lock().unwrap().strong_count(), 0);
    }

    #[test]
    fn a_file_that_has_just_changed_is_not_shared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vmlinux");
        fs::write(&path, probed::vmlinux()).unwrap();
        let [one, two] = [(); 2].map(|()| KernelFile::open(&path).unwrap());
        assert!(one.slot.is_none() && two.slot.is_none());
        assert!(!Arc::ptr_eq(&one.image().unwrap(), &two.image().unwrap()));
    }

    #[test]
    fn a_file_that_is_missing_or_no_kernel_is_refused_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vmlinux");
        assert!(KernelFile::open(&path).is_err());
        fs::write(&path, "no kernel").unwrap();
        let identity = Identity::of(&path).unwrap();
        let later = SystemTime::now() + 2 * SETTLED;
        assert!(KernelFile::open_at(&path, later).is_err());
        // Any later look removes what nobody uses.
        assert!(
            Slot::of(Identity {
                size: 0,
                ..identity
            })
            .is_used()
        );
        let used = lock(&USED);
        assert!(used.iter().all(|(known, _)| *known != identity));
    }
}
