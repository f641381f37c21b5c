//! An ext4 file system on a thread of its own.
//!
//! `ext4-view` 1.0 has no unsafe code, but an image that was made to harm makes it panic (a count in a block of a
//! hash tree) or walk a tree of extents practically without end, in blocks that it keeps, so that no read of ours
//! could stop it. Therefore a thread owns the file system. A panic there is an error here, and so is a request that
//! takes too long; the thread of that one is left behind, and ends with the walk or with the process.
//!
//! ```text
//!  caller ── Request ──► thread with the volume
//!         ◄── Answer ───
//! ```

use std::cell::Cell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use super::ext4::Volume;
use super::tree::{Stat, Tree};
use crate::disk::source::Window;
use crate::error::FileError;

/// Time limit of a request, and the bytes that add a second to it.
const LIMIT: Duration = Duration::from_secs(20);
const BYTES_PER_SECOND: u64 = 4 << 20;

/// What the thread is to do with the file at a path.
enum Request {
    Stat(String),
    Target(String),
    Names(String),
    Bytes { path: String, offset: u64, len: u64 },
}

enum Answer {
    Opened,
    Stat(Stat),
    Target(String),
    Names(Vec<String>),
    Bytes(Vec<u8>),
}

type Answered = Result<Answer, FileError>;

/// An ext4 file system.
#[derive(Debug)]
pub(super) struct Ext4 {
    requests: Sender<Request>,
    answers: Receiver<Answered>,
    /// Whether a request took too long. Its answer may still come, and no later request may take it for its own.
    late: Cell<bool>,
    limit: Duration,
}

impl Ext4 {
    /// Opens the file system in `part`.
    pub(super) fn open(part: &Window) -> Result<Self, FileError> {
        Self::within(part, LIMIT)
    }

    /// Opens the file system in `part`, with `limit` for each request.
    fn within(part: &Window, limit: Duration) -> Result<Self, FileError> {
        let (requests, asked) = channel();
        let (answer, answers) = channel();
        let part = part.clone();
        thread::Builder::new()
            .name("ext4".to_owned())
            .spawn(move || serve(&part, &asked, &answer))?;
        let this = Self {
            requests,
            answers,
            late: Cell::new(false),
            limit,
        };
        match this.answer(limit)? {
            Answer::Opened => Ok(this),
            _ => Err(gone()),
        }
    }

    fn ask(&self, request: Request) -> Answered {
        let size = match &request {
            Request::Bytes { offset, len, .. } => offset.saturating_add(*len),
            _ => 0,
        };
        let limit = self.limit + Duration::from_secs(size / BYTES_PER_SECOND);
        if self.late.get() {
            return Err(FileError::TooSlow(self.limit.as_secs()));
        }
        self.requests.send(request).map_err(|_| gone())?;
        self.answer(limit)
    }

    fn answer(&self, limit: Duration) -> Answered {
        match self.answers.recv_timeout(limit) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                self.late.set(true);
                Err(FileError::TooSlow(limit.as_secs()))
            }
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
        }
    }
}

/// Returns the error for a thread that has ended: it has panicked.
fn gone() -> FileError {
    FileError::Damaged("its reader failed".to_owned())
}

/// Answers requests until the other end goes away.
fn serve(part: &Window, requests: &Receiver<Request>, answers: &Sender<Answered>) {
    let volume = match Volume::open(part) {
        Ok(volume) => volume,
        Err(error) => {
            // The other end may have gone away.
            let _closed = answers.send(Err(error));
            return;
        }
    };
    let mut answer = Ok(Answer::Opened);
    while answers.send(answer).is_ok() {
        let Ok(request) = requests.recv() else {
            return;
        };
        answer = match request {
            Request::Stat(path) => volume.stat(&path).map(Answer::Stat),
            Request::Target(path) => volume.target(&path).map(Answer::Target),
            Request::Names(path) => volume.names(&path).map(Answer::Names),
            Request::Bytes { path, offset, len } => {
                volume.bytes(&path, offset, len).map(Answer::Bytes)
            }
        };
    }
}

impl Tree for Ext4 {
    fn stat(&self, path: &str) -> Result<Stat, FileError> {
        match self.ask(Request::Stat(path.to_owned()))? {
            Answer::Stat(stat) => Ok(stat),
            _ => Err(gone()),
        }
    }

    fn target(&self, path: &str) -> Result<String, FileError> {
        match self.ask(Request::Target(path.to_owned()))? {
            Answer::Target(target) => Ok(target),
            _ => Err(gone()),
        }
    }

    fn names(&self, path: &str) -> Result<Vec<String>, FileError> {
        match self.ask(Request::Names(path.to_owned()))? {
            Answer::Names(names) => Ok(names),
            _ => Err(gone()),
        }
    }

    fn bytes(&self, path: &str, offset: u64, len: u64) -> Result<Vec<u8>, FileError> {
        let path = path.to_owned();
        match self.ask(Request::Bytes { path, offset, len })? {
            Answer::Bytes(bytes) => Ok(bytes),
            _ => Err(gone()),
        }
    }
}

#[cfg(test)]
mod tests;
