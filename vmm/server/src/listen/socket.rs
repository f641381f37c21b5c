//! The unix socket the server listens on.
//!
//! Invariants, from before the path exists until after it is gone:
//!
//! - One server per path. A lock file beside the socket is held while the socket exists, so two servers that
//!   start at the same time cannot both find it stale.
//! - If another user has put a file in the place of the lock, the server neither waits for the file nor trusts it.
//! - Only the owner and root can reach the socket. The socket is given mode 0600 before it is bound, so the path
//!   never has another mode. In addition, the credentials of each client are checked.
//! - Only a dead socket is replaced, never a live one and never a file that is not a socket.
//! - The socket is removed when the listener is dropped, unless the path has become something else.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{
    FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixSocket, UnixStream};

/// Longest path of a unix socket, in bytes, without its closing zero (`unix(7)`).
const LONGEST_PATH: usize = 107;
/// Connections that the kernel queues until they are accepted.
const BACKLOG: u32 = 128;

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another server listens on the socket.
    #[error("a server already listens on {}", .0.display())]
    InUse(PathBuf),
    /// The path is taken by something that must not be replaced.
    #[error("{} exists and is not a socket; remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The file in the place of the socket's lock is not a lock file of this user.
    #[error(
        "{} is no lock of this user's; remove it, or choose another path, in a folder that only you write to",
        .0.display()
    )]
    NotALock(PathBuf),
    /// The path is too long for the kernel.
    #[error("{} is too long for a socket: at most {LONGEST_PATH} bytes", .0.display())]
    TooLong(PathBuf),
    /// The file system or the network layer refused.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// Path that was used.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

impl ListenError {
    fn io<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| Self::Io {
            what,
            path: path.to_owned(),
            source,
        }
    }
}

/// A socket in the file system that accepts connections of its owner and of root.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket, to recognise it before it is removed.
    identity: (u64, u64),
    lock: PathLock,
}

impl Listener {
    /// Listens on `path`, replacing a socket that no server listens on any more.
    ///
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// When a server listens there, when the path is something other than a socket, or when the system refuses.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        if path.as_os_str().as_bytes().len() > LONGEST_PATH {
            return Err(ListenError::TooLong(path.to_owned()));
        }
        let lock = PathLock::take(path)?;
        remove_stale(path)?;

        let socket = UnixSocket::new_stream().map_err(ListenError::io("create", path))?;
        // The kernel gives the path the mode of the unbound socket's inode, less the umask.
        socket
            .as_fd()
            .try_clone_to_owned()
            .map(File::from)
            .and_then(|inode| inode.set_permissions(Permissions::from_mode(0o600)))
            .map_err(ListenError::io("protect", path))?;
        socket.bind(path).map_err(ListenError::io("create", path))?;
        let metadata = fs::symlink_metadata(path).map_err(ListenError::io("inspect", path))?;
        let socket = socket
            .listen(BACKLOG)
            .map_err(ListenError::io("listen on", path))?;
        Ok(Self {
            socket,
            path: path.to_owned(),
            identity: (metadata.dev(), metadata.ino()),
            lock,
        })
    }

    /// Returns the path that it listens on.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next connection of a user who may connect. Closes those of other users.
    ///
    /// # Errors
    /// When the process has run out of resources for a connection.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let (stream, _) = self.socket.accept().await?;
            match stream.peer_cred() {
                Ok(peer) if admitted(peer.uid()) => return Ok(stream),
                Ok(peer) => {
                    tracing::warn!(uid = peer.uid(), "refused a connection of another user");
                }
                Err(error) => tracing::warn!(%error, "refused a connection without credentials"),
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == self.identity);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
        // The lock is released last: its next holder finds the path free.
        self.lock.release();
    }
}

/// Whether the user `uid` may talk to this server.
fn admitted(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw() || uid == 0
}

/// Removes the socket at `path` if nobody listens on it.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(ListenError::io("inspect", path)(error)),
    };
    if !found.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(ListenError::InUse(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "replacing a stale socket");
            fs::remove_file(path).map_err(ListenError::io("remove the stale socket", path))
        }
        Err(error) => Err(ListenError::io("test the socket", path)(error)),
    }
}

/// The right to create and remove the socket of one path: a locked file beside it.
#[derive(Debug)]
struct PathLock {
    path: PathBuf,
    /// Locked while open.
    file: File,
}

impl PathLock {
    fn take(socket: &Path) -> Result<Self, ListenError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                // Opening a FIFO would block.
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(&path)
                .map_err(ListenError::io("create", &path))?;
            let opened = file.metadata().map_err(ListenError::io("inspect", &path))?;
            if !opened.is_file() || opened.uid() != rustix::process::geteuid().as_raw() {
                return Err(ListenError::NotALock(path));
            }
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(ListenError::InUse(socket.to_owned()));
                }
                Err(TryLockError::Error(error)) => {
                    return Err(ListenError::io("lock", &path)(error));
                }
            }
            // The last holder may have removed the file between the opening and the locking. Then the lock is
            // on a file that no other process finds.
            let locked = file.metadata().map_err(ListenError::io("inspect", &path))?;
            if fs::symlink_metadata(&path)
                .is_ok_and(|found| (found.dev(), found.ino()) == (locked.dev(), locked.ino()))
            {
                return Ok(Self { path, file });
            }
        }
    }

    /// Removes the file while it is locked, then unlocks it.
    fn release(&self) {
        let removed = fs::remove_file(&self.path);
        let unlocked = self.file.unlock();
        if let Err(error) = removed.and(unlocked) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the lock file");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hvprobe.sock");
        (folder, path)
    }

    fn is_empty(folder: &tempfile::TempDir) -> bool {
        fs::read_dir(folder.path()).unwrap().next().is_none()
    }

    #[tokio::test]
    async fn socket_has_mode_0600_and_is_gone_with_its_lock_after_drop() {
        let (folder, path) = place();
        let listener = Listener::bind(&path).unwrap();
        let mode = fs::symlink_metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(listener);
        assert!(is_empty(&folder));
    }

    #[tokio::test]
    async fn own_connection_is_accepted() {
        let (_folder, path) = place();
        let listener = Listener::bind(&path).unwrap();
        let (served, _client) = tokio::join!(listener.accept(), UnixStream::connect(&path));
        served.unwrap();
    }

    #[tokio::test]
    async fn second_server_is_refused_and_the_first_goes_on() {
        let (_folder, path) = place();
        let first = Listener::bind(&path).unwrap();
        let error = Listener::bind(&path).unwrap_err();
        assert!(matches!(error, ListenError::InUse(_)), "{error:?}");
        let (served, _client) = tokio::join!(first.accept(), UnixStream::connect(&path));
        served.unwrap();
    }

    #[tokio::test]
    async fn server_that_holds_no_lock_is_found_alive() {
        let (_folder, path) = place();
        let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let error = Listener::bind(&path).unwrap_err();
        assert!(matches!(error, ListenError::InUse(_)), "{error:?}");
    }

    #[tokio::test]
    async fn what_others_put_in_the_place_of_the_lock_is_neither_waited_for_nor_taken() {
        let (_folder, path) = place();
        let mut lock = path.as_os_str().to_owned();
        lock.push(".lock");
        let lock = PathBuf::from(lock);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &lock,
            rustix::fs::FileType::Fifo,
            0o666.into(),
            0,
        )
        .unwrap();
        // Without a reader of the FIFO, then with one.
        let reader = || {
            OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(&lock)
        };
        assert!(matches!(Listener::bind(&path), Err(ListenError::Io { .. })));
        let _reader = reader().unwrap();
        assert!(matches!(
            Listener::bind(&path),
            Err(ListenError::NotALock(_))
        ));
        fs::remove_file(&lock).unwrap();
        // A file of another user, which only root can create.
        if rustix::process::geteuid().is_root() {
            File::create(&lock).unwrap();
            std::os::unix::fs::chown(&lock, Some(12345), None).unwrap();
            assert!(matches!(
                Listener::bind(&path),
                Err(ListenError::NotALock(_))
            ));
            fs::remove_file(&lock).unwrap();
        }
        Listener::bind(&path).unwrap();
    }

    #[tokio::test]
    async fn stale_socket_and_stale_lock_are_replaced() {
        let (_folder, path) = place();
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        fs::write(path.with_extension("sock.lock"), "").unwrap();
        let listener = Listener::bind(&path).unwrap();
        let (served, _client) = tokio::join!(listener.accept(), UnixStream::connect(&path));
        served.unwrap();
    }

    #[tokio::test]
    async fn other_file_is_not_replaced() {
        let (_folder, path) = place();
        fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&path).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket(_)), "{error:?}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn link_is_not_followed() {
        let (folder, path) = place();
        let target = folder.path().join("target");
        std::os::unix::fs::symlink(&target, &path).unwrap();
        let error = Listener::bind(&path).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket(_)), "{error:?}");
        assert!(!target.exists());
    }

    #[tokio::test]
    async fn path_that_became_another_server_is_left_alone() {
        let (_folder, path) = place();
        let listener = Listener::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn too_long_and_missing_folders_are_reported() {
        let long = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        assert!(matches!(
            Listener::bind(&long).unwrap_err(),
            ListenError::TooLong(_)
        ));
        let (folder, _) = place();
        let error = Listener::bind(&folder.path().join("no/such/folder.sock")).unwrap_err();
        assert!(
            matches!(error, ListenError::Io { what: "create", .. }),
            "{error:?}"
        );
    }

    #[test]
    fn only_root_and_the_owner_are_admitted() {
        let own = rustix::process::geteuid().as_raw();
        assert!(admitted(own) && admitted(0));
        assert!(!admitted(own.wrapping_add(1).max(1000)));
    }
}
