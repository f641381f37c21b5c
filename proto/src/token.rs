//! The file with the token: a secret that clients show if the operating system does not identify them, as on a TCP
//! port.
//!
//! Invariants: a token is read only from a file that nobody but its owner and root can read or change; it is
//! too long to be guessed; it is never printed, and the time of a comparison does not depend on how much of a
//! guess was right.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use hvprobe_spec::language::text::hex;
use rustix::rand::{GetRandomFlags, getrandom};
use subtle::ConstantTimeEq as _;

/// Number of random bytes in a token that is created here.
const CHANCE: usize = 32;
/// Minimum length of a token, in characters.
const SHORTEST: usize = 16;
/// Maximum length of a token, in characters.
const LONGEST: usize = 4096;

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Other users can read or change the file, so they may know the token or have chosen it.
    #[error(
        "{} can be read or changed by other users (mode {mode:04o}): make a new one, or `chmod 600` it if none has",
        path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Another user owns the file, and knows the token.
    #[error("{} belongs to another user", .0.display())]
    Foreign(PathBuf),
    /// The path is a pipe, a device or a folder.
    #[error("{} is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// The file is empty.
    #[error("{} is empty: `hvprobe serve` makes a token if there is no file", .0.display())]
    Empty(PathBuf),
    /// The file contains something other than a token.
    #[error(
        "{} holds no token: one line of {SHORTEST} to {LONGEST} ASCII characters without spaces",
        .0.display()
    )]
    Malformed(PathBuf),
    /// The system refused.
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

/// A secret that a server and its clients share.
#[derive(Clone)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// Reads the token in the file at `path`.
    ///
    /// # Errors
    /// When there is no such file, others can read or change it, or it holds no token.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let io = |what| io_error(what, path);
        // Without `O_NONBLOCK`, opening a pipe would wait for a writer.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(io("open"))?;
        let metadata = file.metadata().map_err(io("inspect"))?;
        if !metadata.is_file() {
            return Err(TokenError::NotAFile(path.to_owned()));
        }
        if metadata.mode() & 0o077 != 0 {
            return Err(TokenError::Exposed {
                path: path.to_owned(),
                mode: metadata.mode() & 0o7777,
            });
        }
        let own = rustix::process::geteuid().as_raw();
        if ![own, 0].contains(&metadata.uid()) {
            return Err(TokenError::Foreign(path.to_owned()));
        }
        let mut text = Vec::new();
        file.take(LONGEST as u64 + 2)
            .read_to_end(&mut text)
            .map_err(io("read"))?;
        let text = text.trim_ascii_end();
        if text.is_empty() {
            return Err(TokenError::Empty(path.to_owned()));
        }
        let token = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
        token.ok_or_else(|| TokenError::Malformed(path.to_owned()))
    }

    /// Reads the token in the file at `path`. If there is no file, creates it with a random token.
    ///
    /// # Errors
    /// As [`Token::read`], and when the file cannot be created.
    pub fn read_or_create(path: &Path) -> Result<Self, TokenError> {
        let created = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path);
        match created {
            Ok(file) => {
                fill(file).map_err(|error| {
                    // An empty file would make the next attempt fail.
                    let _kept = std::fs::remove_file(path);
                    io_error("write", path)(error)
                })?;
                tracing::info!(path = %path.display(), "made a token");
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(io_error("create", path)(error)),
        }
        Self::read(path)
    }

    /// Returns the value of a call's `authorization` header.
    #[must_use]
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Whether `authorization` has this token. The time of the comparison depends on the lengths only.
    #[must_use]
    pub fn admits(&self, authorization: &[u8]) -> bool {
        // The scheme's case does not matter (RFC 9110, 11.1).
        authorization
            .split_first_chunk::<7>()
            .is_some_and(|(scheme, shown)| {
                scheme.eq_ignore_ascii_case(b"Bearer ") && shown.ct_eq(self.0.as_bytes()).into()
            })
    }
}

/// A text that is no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a token has {SHORTEST} to {LONGEST} ASCII characters without spaces")]
pub struct NotAToken;

impl FromStr for Token {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<Self, NotAToken> {
        let fits = (SHORTEST..=LONGEST).contains(&text.len());
        match fits && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(text.to_owned())),
            false => Err(NotAToken),
        }
    }
}

fn io_error<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> TokenError + 'a {
    move |source| TokenError::Io {
        what,
        path: path.to_owned(),
        source,
    }
}

/// Writes a random token into `file`.
fn fill(mut file: File) -> io::Result<()> {
    let mut chance = [0; CHANCE];
    // The kernel returns so few bytes completely or not at all (getrandom(2)).
    if getrandom(&mut chance, GetRandomFlags::empty())? != CHANCE {
        return Err(io::Error::other("the system gave too few random bytes"));
    }
    let line = hex(&chance) + "\n";
    file.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn token(text: &str) -> Token {
        text.parse().unwrap()
    }

    fn place() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        (folder, path)
    }

    fn refused(path: &Path) -> String {
        let error = Token::read_or_create(path).unwrap_err().to_string();
        error.replace(&path.display().to_string(), "FILE")
    }

    #[test]
    fn missing_file_is_made_for_its_owner_alone_and_then_read() {
        let (_folder, path) = place();
        let made = Token::read_or_create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(made.0.len(), 2 * CHANCE);
        assert_eq!(Token::read_or_create(&path).unwrap().0, made.0);
        assert_eq!(Token::read(&path).unwrap().0, made.0);
        let (_folder, other) = place();
        assert_ne!(Token::read_or_create(&other).unwrap().0, made.0);
    }

    #[test]
    fn file_that_others_can_read_or_change_is_refused() {
        let (_folder, path) = place();
        Token::read_or_create(&path).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o602, 0o644, 0o660, 0o601] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(
                refused(&path),
                format!(
                    "FILE can be read or changed by other users (mode {mode:04o}): make a new \
                     one, or `chmod 600` it if none has"
                )
            );
        }
        for mode in [0o600, 0o400] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            Token::read(&path).unwrap();
        }
    }

    #[test]
    fn file_without_a_token_is_refused() {
        let (folder, path) = place();
        let made = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path);
        drop(made.unwrap());
        for nothing in ["", "\n", " \r\n"] {
            fs::write(&path, nothing).unwrap();
            assert!(matches!(Token::read(&path), Err(TokenError::Empty(_))));
        }
        let long = "x".repeat(LONGEST + 1);
        for wrong in [
            "tooshort",
            "with spaces in its midst",
            "two-lines-of-it\nanother",
            "kein-Täuschen-möglich",
            &long,
            &"x".repeat(100_000),
        ] {
            fs::write(&path, wrong).unwrap();
            let result = Token::read(&path);
            assert!(matches!(result, Err(TokenError::Malformed(_))), "{wrong}");
        }
        fs::write(&path, format!("{}\r\n", &long[1..])).unwrap();
        Token::read(&path).unwrap();
        let not_a_file = refused(folder.path());
        assert_eq!(not_a_file, "FILE is not a regular file");
    }

    #[test]
    fn pipe_is_refused_without_waiting_for_its_writer() {
        let (_folder, path) = place();
        let made = std::process::Command::new("mkfifo")
            .args(["--mode", "600"])
            .arg(&path)
            .status();
        assert!(made.unwrap().success());
        assert_eq!(refused(&path), "FILE is not a regular file");
    }

    #[test]
    fn missing_folder_is_reported() {
        let (folder, _) = place();
        let path = folder.path().join("no/token");
        assert_eq!(refused(&path), "cannot create FILE");
        let error = Token::read(&path).unwrap_err();
        assert!(matches!(error, TokenError::Io { what: "open", .. }));
    }

    #[test]
    fn only_the_whole_token_admits() {
        let token = token("0123456789abcdef");
        for right in ["Bearer 0123456789abcdef", "bearer 0123456789abcdef"] {
            assert!(token.admits(right.as_bytes()), "{right}");
        }
        assert!(token.admits(token.bearer().as_bytes()));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "0123456789abcdef",
            "Basic  0123456789abcdef",
            "Bearer 0123456789abcdeF",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdef0",
            "Bearer 0123456789abcdef ",
            "Bearer  0123456789abcdef",
        ] {
            assert!(!token.admits(wrong.as_bytes()), "{wrong}");
        }
    }

    #[test]
    fn token_is_not_printed() {
        let printed = format!("{:?}", token("0123456789abcdef"));
        assert!(!printed.contains("0123"), "{printed}");
    }
}
