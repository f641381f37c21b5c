//! Debug information that clients have uploaded.
//!
//! ```text
//!   begun ──bytes──► whole ──its build id is the kernel's──► kept ──the machine has ended, or has another──► gone
//!     │                │
//!     └────────────────┴── too long, no room, its client is gone or silent, another kernel's ──► gone
//! ```
//! Invariants: a file has no name, so the system removes it in any case when the server ends; all files together,
//! including incomplete ones, do not exceed the limit; the number of incomplete files is limited.

use std::env;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use hvprobe_linux::debug_info::{DebugError, DebugFile, Index};
use hvprobe_linux::image::KernelImage;
use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use hvprobe_sources::Sources;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Code;

use crate::bounds::limits;

/// Folder for temporary files that may be large (hier(7)), unless `TMPDIR` names another one. A small system
/// may not have it.
const FOLDER: &str = "/var/tmp";

/// Maximum length of an index that stays in memory, in bytes. The index of a distribution's kernel has 3 MB.
const LONGEST_INDEX: usize = 16 << 20;

/// The uploaded files of a server.
#[derive(Debug)]
pub(super) struct Uploads {
    folder: PathBuf,
    room: Arc<Room>,
    under_way: Arc<Semaphore>,
    kept: Mutex<Vec<Kept>>,
}

/// Limits of the length of files, in bytes.
#[derive(Debug)]
struct Room {
    /// Limit for one file.
    each: u64,
    /// Limit for all files together.
    all: u64,
    taken: AtomicU64,
}

/// A complete file that is used for answers.
#[derive(Debug)]
struct Kept {
    /// Kernel of the machine that the file was uploaded for. The kernel is freed with its machine, and the file is
    /// then removed.
    kernel: Weak<KernelImage>,
    build_id: Vec<u8>,
    upload: Arc<Upload>,
}

/// A file that is being uploaded, or is complete.
#[derive(Debug)]
pub(super) struct Upload {
    file: File,
    room: Arc<Room>,
    /// Length in bytes, which is taken from the room.
    length: u64,
    /// Permit of an upload under way; released when the file is complete.
    under_way: Option<OwnedSemaphorePermit>,
    /// Index of the file, made at its first use. It is not kept with the indexes of the host's own files, because
    /// nobody else may rely on what a client has uploaded.
    index: OnceLock<Arc<Index>>,
}

impl Default for Uploads {
    fn default() -> Self {
        let is_there = |folder: &PathBuf| env::var_os("TMPDIR").is_none() && folder.is_dir();
        let folder = Some(PathBuf::from(FOLDER)).filter(is_there);
        Self::new(
            folder.unwrap_or_else(env::temp_dir),
            limits::UPLOAD,
            limits::UPLOADS,
        )
    }
}

impl Uploads {
    /// Creates uploads in `folder`, with at most `each` bytes in a file and `all` bytes together.
    fn new(folder: PathBuf, each: u64, all: u64) -> Self {
        Self {
            folder,
            room: Arc::new(Room {
                each,
                all,
                taken: AtomicU64::new(0),
            }),
            under_way: Arc::new(Semaphore::new(limits::UPLOADS_UNDER_WAY)),
            kept: Mutex::default(),
        }
    }

    /// Creates a file. Blocks.
    ///
    /// # Errors
    /// When too many uploads are under way, or the host cannot create a file.
    pub(super) fn begin(&self) -> Result<Upload, Failure> {
        let most = limits::UPLOADS_UNDER_WAY;
        let under_way = Arc::clone(&self.under_way).try_acquire_owned();
        let under_way = under_way.map_err(|_| {
            let message = format!("{most} uploads are under way, as many as may be: wait for one");
            let kind = ErrorKind::TooManyStreams;
            Failure::new(Code::ResourceExhausted, kind, message).bound("uploads", most, 0)
        })?;
        // Drops the files of machines that are gone, to make room.
        drop(self.kept());
        let file = tempfile::tempfile_in(&self.folder).map_err(|error| {
            let folder = self.folder.display();
            on_host(&format!("cannot make a file in {folder}"), &error)
        })?;
        Ok(Upload {
            file,
            room: Arc::clone(&self.room),
            length: 0,
            under_way: Some(under_way),
            index: OnceLock::new(),
        })
    }

    /// Keeps the complete `upload` for the machine whose kernel has this `image`; returns the build id of both.
    /// Blocks.
    ///
    /// # Errors
    /// When `upload` has no debug information of that kernel, or `abandoned` is set because nobody waits for the
    /// result any more.
    pub(super) fn keep(
        &self,
        upload: Upload,
        image: &Arc<KernelImage>,
        abandoned: &Arc<AtomicBool>,
    ) -> Result<Vec<u8>, DebugError> {
        let build_id = upload.sources(image, abandoned)?.build_id().to_vec();
        let mut kept = self.kept();
        kept.retain(|other| !other.is_for(image));
        kept.push(Kept {
            kernel: Arc::downgrade(image),
            build_id: build_id.clone(),
            upload: Arc::new(upload),
        });
        Ok(build_id)
    }

    /// Returns the file to use for the kernel with this `image`: the one that was uploaded for its machine or,
    /// without one, the last one for a kernel with the same build id.
    pub(super) fn of(&self, image: &Arc<KernelImage>) -> Option<Arc<Upload>> {
        let kept = self.kept();
        let is_same = |other: &&Kept| image.build_id() == Some(other.build_id.as_slice());
        let own = kept.iter().find(|other| other.is_for(image));
        let found = own.or_else(|| kept.iter().rfind(is_same))?;
        Some(Arc::clone(&found.upload))
    }

    /// Removes the files of machines that are gone, and returns the others.
    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|one| one.kernel.strong_count() > 0);
        kept
    }
}

impl Kept {
    fn is_for(&self, image: &Arc<KernelImage>) -> bool {
        self.kernel.as_ptr() == Arc::as_ptr(image)
    }
}

impl Upload {
    /// Marks the file as complete.
    pub(super) fn complete(&mut self) {
        self.under_way = None;
    }

    /// Returns the length of the file in bytes.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Appends `bytes`. Blocks.
    ///
    /// # Errors
    /// When there is no room for them.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let more = bytes.len() as u64;
        let Room { each, all, taken } = &*self.room;
        let left = each.saturating_sub(self.length);
        if more > left {
            let message = format!("the debug information is too long: at most {each} bytes");
            let failure = Failure::new(Code::ResourceExhausted, ErrorKind::TooLarge, message);
            return Err(failure.bound("upload_bytes", each, left));
        }
        let fits = |taken: u64| taken.checked_add(more).filter(|sum| sum <= all);
        let took = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        took.map_err(|taken| {
            let message = format!(
                "what clients have uploaded has {taken} bytes, and together at most {all}: stop a machine first"
            );
            Failure::new(Code::ResourceExhausted, ErrorKind::TooLarge, message).bound(
                "uploads_bytes",
                all,
                all.saturating_sub(taken),
            )
        })?;
        self.length += more;
        let written = self.file.write_all(bytes);
        written.map_err(|error| on_host("cannot keep what was uploaded", &error))
    }

    /// Reads the debug information in the complete file, for the kernel with this `image`. Blocks.
    ///
    /// # Errors
    /// When the file has none for that kernel, or `abandoned` is set because nobody waits for the result any more.
    pub(super) fn sources(
        &self,
        image: &Arc<KernelImage>,
        abandoned: &Arc<AtomicBool>,
    ) -> Result<Sources, DebugError> {
        let file = DebugFile::of(&self.file)?.until(abandoned);
        if let Some(index) = self.index.get() {
            file.adopt(Arc::clone(index));
        }
        let sources = Sources::of(Arc::clone(image), file)?;
        let index = sources.index()?;
        if index.length() <= LONGEST_INDEX {
            self.index.get_or_init(|| Arc::clone(index));
        }
        Ok(sources)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.length, Ordering::Relaxed);
    }
}

fn on_host(what: &str, error: &io::Error) -> Failure {
    let message = format!("the host {what}: {error}");
    Failure::new(Code::ResourceExhausted, ErrorKind::Host, message)
}

#[cfg(test)]
mod tests {
    use hvprobe_fixtures::dwarf::{self, BUILD_ID};
    use hvprobe_spec::line_range::LineRange;
    use tonic::Status;

    use super::*;

    fn image() -> Arc<KernelImage> {
        Arc::new(KernelImage::parse(&dwarf::file()).unwrap())
    }

    fn uploads(each: u64, all: u64) -> Uploads {
        Uploads::new(env::temp_dir(), each, all)
    }

    fn handed_in(uploads: &Uploads, file: &[u8]) -> Upload {
        let mut upload = uploads.begin().unwrap();
        for bytes in file.chunks(100) {
            upload.append(bytes).unwrap();
        }
        upload
    }

    #[test]
    fn what_was_handed_in_for_a_machine_answers_for_its_kernel_until_the_machine_is_gone() {
        let file = dwarf::file();
        let length = file.len() as u64;
        let uploads = uploads(length, 3 * length);
        let [one, other] = [image(), image()];
        assert!(uploads.of(&one).is_none());
        let upload = handed_in(&uploads, &file);
        assert_eq!(upload.length(), length);
        assert_eq!(
            uploads.keep(upload, &one, &Arc::default()).unwrap(),
            BUILD_ID
        );
        for image in [&one, &other] {
            let sources = uploads
                .of(image)
                .unwrap()
                .sources(image, &Arc::default())
                .unwrap();
            let all = LineRange::parse("vfs_test").unwrap();
            assert_eq!(sources.lines(&all).unwrap().functions[0].first, 10);
        }
        // The next upload replaces it, and its room is free.
        for _ in 0..5 {
            let upload = handed_in(&uploads, &file);
            uploads.keep(upload, &one, &Arc::default()).unwrap();
            assert_eq!(uploads.room.taken.load(Ordering::Relaxed), length);
        }
        drop(one);
        assert!(uploads.of(&other).is_none());
        assert_eq!(uploads.room.taken.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_is_of_another_kernel_or_none_is_not_kept() {
        let image = image();
        let uploads = uploads(1 << 20, 1 << 20);
        let wrong = [
            dwarf::file_of(b"another build"),
            b"no such file".to_vec(),
            vec![],
        ];
        for file in wrong {
            let upload = handed_in(&uploads, &file);
            uploads.keep(upload, &image, &Arc::default()).unwrap_err();
            assert!(uploads.of(&image).is_none());
        }
        assert_eq!(uploads.room.taken.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn there_is_room_for_so_much_and_no_more() {
        let uploads = uploads(1000, 1500);
        let refused = |upload: &mut Upload, length| {
            let status = Status::from(upload.append(&vec![7; length]).unwrap_err());
            assert_eq!(status.code(), Code::ResourceExhausted);
            status.message().to_owned()
        };
        let mut one = uploads.begin().unwrap();
        one.append(&[7; 999]).unwrap();
        assert!(refused(&mut one, 2).contains("at most 1000"));
        one.append(&[7]).unwrap();
        let mut other = uploads.begin().unwrap();
        other.append(&[7; 500]).unwrap();
        assert!(refused(&mut other, 1).contains("at most 1500"));
        drop(one);
        other.append(&[7; 500]).unwrap();
    }

    #[test]
    fn no_more_are_under_way_than_may_be_and_those_that_are_whole_are_not_counted() {
        let (image, file) = (image(), dwarf::file());
        let uploads = uploads(1 << 20, 1 << 30);
        let mut whole = handed_in(&uploads, &file);
        whole.complete();
        uploads.keep(whole, &image, &Arc::default()).unwrap();
        let mut begun: Vec<_> = (0..limits::UPLOADS_UNDER_WAY)
            .map(|_| uploads.begin().unwrap())
            .collect();
        let status = Status::from(uploads.begin().unwrap_err());
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(
            status.message().contains("32 uploads are under way"),
            "{status:?}"
        );
        begun.pop();
        begun.push(uploads.begin().unwrap());
        uploads.begin().unwrap_err();
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let uploads = Uploads::new("/nowhere/at/all".into(), 1, 1);
        let status = Status::from(uploads.begin().unwrap_err());
        assert!(status.message().contains("/nowhere/at/all"), "{status:?}");
    }
}
