//! The calls that workers make, and the kernel functions that these calls enter.

use std::ffi::CString;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::rng::Rng;
use crate::sys;

/// A kind of call. The kernel enters [`Kind::symbol`] once for each call and, while the workload is the only
/// program that runs in the test guest, for nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Getpgid,
    Getsid,
    Nanosleep,
    PipeWrite,
    PipeRead,
    FutexWakeOp,
    Fork,
    Wait,
    Remap,
    Stat,
    Pin,
}

/// Number of kinds.
pub(crate) const KINDS: usize = 11;

/// A worker's counters, one per kind.
pub(crate) type Counts = [AtomicU64; KINDS];

impl Kind {
    /// All kinds, in the order of their discriminants.
    pub(crate) const ALL: [Self; KINDS] = [
        Self::Getpgid,
        Self::Getsid,
        Self::Nanosleep,
        Self::PipeWrite,
        Self::PipeRead,
        Self::FutexWakeOp,
        Self::Fork,
        Self::Wait,
        Self::Remap,
        Self::Stat,
        Self::Pin,
    ];

    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Self::Getpgid => "__x64_sys_getpgid",
            Self::Getsid => "__x64_sys_getsid",
            Self::Nanosleep => "__x64_sys_nanosleep",
            Self::PipeWrite => "pipe_write",
            Self::PipeRead => "pipe_read",
            Self::FutexWakeOp => "futex_wake_op",
            Self::Fork => "__x64_sys_fork",
            Self::Wait => "__x64_sys_waitid",
            Self::Remap => "__x64_sys_mremap",
            Self::Stat => "__x64_sys_newstat",
            Self::Pin => "__x64_sys_sched_setaffinity",
        }
    }
}

/// Whether a worker stays on its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Habit {
    Stays,
    Moves,
}

/// A worker, with the resources that its calls need. These are created once, so that a step makes only calls of the
/// kinds in [`Kind`].
#[derive(Debug)]
pub(crate) struct Worker<'a> {
    counts: &'a Counts,
    rng: Rng,
    habit: Habit,
    cpus: usize,
    pipe: (PipeReader, PipeWriter),
    region: Region,
    word: AtomicU32,
    path: CString,
}

impl<'a> Worker<'a> {
    /// Creates worker `index`. Workers are distributed over the CPUs in turn.
    pub(crate) fn new(
        index: usize,
        seed: u64,
        habit: Habit,
        counts: &'a Counts,
        path: CString,
    ) -> io::Result<Self> {
        let cpus = sys::available_cpus()?;
        let worker = Self {
            counts,
            rng: Rng::new(seed, u64::try_from(index).map_err(io::Error::other)?),
            habit,
            cpus,
            pipe: io::pipe()?,
            region: Region::new()?,
            word: AtomicU32::new(0),
            path,
        };
        worker.count(Kind::Pin, sys::pin(0, index % cpus))?;
        Ok(worker)
    }

    /// Makes one or a few calls, chosen at random; most are cheap ones.
    pub(crate) fn step(&mut self) -> io::Result<()> {
        match self.rng.below(64) {
            0 => self.fork(),
            1..4 => {
                let nanoseconds = 1_000 + self.rng.below(200_000);
                self.count(Kind::Nanosleep, sys::nanosleep(nanoseconds))
            }
            4..8 => self.remap(),
            8..16 => self.count(Kind::Stat, sys::stat(&self.path)),
            16..26 => self.through_pipe(),
            26..30 if self.habit == Habit::Moves => {
                let cpu = self
                    .rng
                    .below(u32::try_from(self.cpus).map_err(io::Error::other)?);
                self.count(
                    Kind::Pin,
                    sys::pin(0, cpu.try_into().map_err(io::Error::other)?),
                )
            }
            26..38 => self.count(Kind::FutexWakeOp, sys::futex_wake_op(&self.word)),
            38..48 => self.count(Kind::Getsid, sys::plain(libc::SYS_getsid, 0)),
            _ => self.count(Kind::Getpgid, sys::plain(libc::SYS_getpgid, 0)),
        }
    }

    fn fork(&mut self) -> io::Result<()> {
        // SAFETY: the child makes one system call.
        let forked = unsafe { sys::fork() };
        if let Ok(0) = forked {
            sys::exit(0);
        }
        let child = *forked.as_ref().unwrap_or(&0);
        self.count(Kind::Fork, forked.map(drop))?;
        self.count(Kind::Wait, sys::wait_end(child))
    }

    /// Grows the region, touches its pages (page faults), and shrinks it again.
    fn remap(&mut self) -> io::Result<()> {
        let pages = 2 + usize::try_from(self.rng.below(7)).map_err(io::Error::other)?;
        let grown = self.region.resize(pages);
        self.count(Kind::Remap, grown)?;
        self.region.touch();
        let shrunk = self.region.resize(1);
        self.count(Kind::Remap, shrunk)
    }

    fn through_pipe(&mut self) -> io::Result<()> {
        let byte = [self.rng.next().to_le_bytes()[0]];
        let written = self.pipe.1.write(&byte).map(drop);
        self.count(Kind::PipeWrite, written)?;
        let mut back = [0];
        let read = self.pipe.0.read(&mut back).map(drop);
        self.count(Kind::PipeRead, read)?;
        if back != byte {
            return Err(io::Error::other("a pipe gave back another byte"));
        }
        Ok(())
    }

    /// Counts a call that was made. Returns its error, which ends the worker.
    fn count(&self, kind: Kind, made: io::Result<()>) -> io::Result<()> {
        self.counts[kind as usize].fetch_add(1, Ordering::Relaxed);
        made.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", kind.symbol())))
    }
}

/// Creates a file reached through several symbolic links, so that its look-up takes many steps. Returns its path.
pub(crate) fn winding_path(folder: &Path) -> io::Result<CString> {
    std::fs::create_dir_all(folder.join("deep/er"))?;
    std::fs::write(folder.join("deep/er/file"), "")?;
    for (link, target) in [
        ("a", "deep"),
        ("b", "a/er"),
        ("c", "b/../er"),
        ("d", "c/file"),
    ] {
        match symlink(target, folder.join(link)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    let path = folder.join("d").into_os_string().into_encoded_bytes();
    CString::new(path).map_err(io::Error::other)
}

const PAGE: usize = 4096;

/// Private memory of one page, which sometimes grows to at most eight pages.
#[derive(Debug)]
struct Region {
    start: *mut libc::c_void,
    pages: usize,
}

// SAFETY: the mapping is used through `&mut self` only.
unsafe impl Send for Region {}

impl Region {
    fn new() -> io::Result<Self> {
        // SAFETY: asks for new memory at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start, pages: 1 })
    }

    fn resize(&mut self, pages: usize) -> io::Result<()> {
        // SAFETY: the old mapping is ours, and there are no references into it.
        let start = unsafe {
            libc::mremap(
                self.start,
                self.pages * PAGE,
                pages * PAGE,
                libc::MREMAP_MAYMOVE,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        (self.start, self.pages) = (start, pages);
        Ok(())
    }

    fn touch(&mut self) {
        for page in 0..self.pages {
            // SAFETY: inside the mapping.
            unsafe { self.start.cast::<u8>().add(page * PAGE).write_volatile(1) };
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and there are no references into it.
        unsafe { libc::munmap(self.start, self.pages * PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_listed_in_their_order_and_have_symbols_of_their_own() {
        for (index, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
            let same = Kind::ALL.iter().filter(|k| k.symbol() == kind.symbol());
            assert_eq!(same.count(), 1);
        }
    }

    #[test]
    fn steps_of_one_seed_make_the_same_calls() {
        let folder = std::env::temp_dir().join(format!("workload-{}", std::process::id()));
        let path = winding_path(&folder).unwrap();
        let run = || {
            let counts = Counts::default();
            let mut worker = Worker::new(0, 42, Habit::Moves, &counts, path.clone()).unwrap();
            for _ in 0..500 {
                worker.step().unwrap();
            }
            drop(worker);
            counts.map(AtomicU64::into_inner)
        };
        let first = run();
        assert_eq!(first, run());
        assert!(first.iter().all(|&count| count > 0), "{first:?}");
        let of = |kind: Kind| first[kind as usize];
        assert_eq!(of(Kind::Fork), of(Kind::Wait));
        assert_eq!(of(Kind::PipeRead), of(Kind::PipeWrite));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
