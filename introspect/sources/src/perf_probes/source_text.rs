//! Searches source files for lines that match a pattern, as `perf probe` does: white space does not count, and
//! `*`, `?` and `[...]` mean the same as in a shell.
//!
//! Invariants: a path in the debug information that leads out of the folder of the sources is refused; only regular
//! files up to a maximum length are read.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Component, Path};

use globset::{Glob, GlobMatcher};

/// Maximum length of a source file, in bytes: generated headers with register definitions come near it.
const LONGEST: u64 = 64 << 20;

/// Why the sources cannot be searched.
#[derive(Debug, thiserror::Error)]
pub(super) enum TextError {
    #[error("bad pattern: {}", .0.kind())]
    Pattern(globset::Error),
    #[error("{0} is said to lie outside the folder of the sources")]
    Outside(String),
    #[error("cannot read {file}: {why}")]
    Read { file: String, why: io::Error },
}

/// Pattern for whole lines.
#[derive(Debug)]
pub(super) struct Pattern(GlobMatcher);

impl Pattern {
    pub(super) fn new(text: &str) -> Result<Self, TextError> {
        let mut glob = String::new();
        for c in text.chars() {
            match c {
                // Escaped: braces would mean alternatives.
                '{' | '}' => glob.extend(['[', c, ']']),
                _ => glob.push(c),
            }
        }
        let glob = Glob::new(&glob).map_err(TextError::Pattern)?;
        Ok(Self(glob.compile_matcher()))
    }

    fn is_in(&self, line: &[u8]) -> bool {
        let line = String::from_utf8_lossy(line);
        let line: String = line.split_whitespace().collect();
        self.0.is_match(line)
    }
}

/// Text of a source file.
#[derive(Debug)]
pub(super) struct Source(Vec<u8>);

impl Source {
    /// Reads the source file in `folder` whose path in the debug information is `file`.
    pub(super) fn read(folder: &Path, file: &str) -> Result<Self, TextError> {
        let is_inside = |part| matches!(part, Component::Normal(_) | Component::CurDir);
        if !Path::new(file).components().all(is_inside) {
            return Err(TextError::Outside(file.to_owned()));
        }
        let path = folder.join(file);
        let read = || {
            // Opening something else than a regular file may block for ever.
            if !path.metadata()?.is_file() {
                return Err(io::Error::other("it is no file"));
            }
            let mut bytes = Vec::new();
            File::open(&path)?
                .take(LONGEST + 1)
                .read_to_end(&mut bytes)?;
            match u64::try_from(bytes.len()) {
                Ok(length) if length <= LONGEST => Ok(bytes),
                _ => Err(io::Error::other("it is longer than any source")),
            }
        };
        read().map(Self).map_err(|why| TextError::Read {
            file: path.display().to_string(),
            why,
        })
    }

    /// Returns the numbers of the lines that match `pattern`, counted from 1.
    pub(super) fn lines(&self, pattern: &Pattern) -> impl Iterator<Item = u64> {
        let lines = (1_u64..).zip(self.0.split(|byte| *byte == b'\n'));
        let found = lines.filter(|(_, line)| pattern.is_in(line));
        found.map(|(number, _)| number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_do_not_count_and_the_whole_line_has_to_match() {
        let source = Source(b"\tret = a[1];\nret = b;\n  if (!ret) {\n}\nret=c".to_vec());
        for (text, wanted) in [
            ("ret=*", &[1, 2, 5][..]),
            ("ret=b", &[]),
            ("ret=?;", &[2]),
            ("*ret*{", &[3]),
            ("}", &[4]),
            ("*[[]1]*", &[1]),
        ] {
            let pattern = Pattern::new(text).unwrap();
            assert_eq!(source.lines(&pattern).collect::<Vec<_>>(), wanted, "{text}");
        }
        assert!(Pattern::new("a[").is_err());
    }

    #[test]
    fn only_files_inside_the_folder_are_read() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.c"), "x").unwrap();
        std::fs::create_dir(folder.path().join("b")).unwrap();
        assert!(Source::read(folder.path(), "./a.c").is_ok());
        assert!(Source::read(&folder.path().join("b"), "../a.c").is_err());
        assert!(Source::read(folder.path(), "/etc/passwd").is_err());
        let long = File::create(folder.path().join("long.c")).unwrap();
        long.set_len(LONGEST + 1).unwrap();
        for file in ["b", "none.c", "long.c"] {
            let error = Source::read(folder.path(), file).unwrap_err().to_string();
            assert!(error.starts_with("cannot read "), "{error}");
        }
    }
}
