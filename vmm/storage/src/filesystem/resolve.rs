//! Paths with symbolic links, resolved to paths without.
//!
//! Invariant: a path has at most [`MAX_STEPS`] parts, those of its links included, so that resolving it ends.

use std::collections::VecDeque;

use super::tree::{Kind, Stat, Tree};
use crate::error::FileError;

/// Maximum number of links in a path, as in Linux.
const MAX_LINKS: usize = 40;
/// Maximum number of parts that are followed.
const MAX_STEPS: usize = 512;
/// Maximum length of a name.
const MAX_NAME: usize = 255;

/// Returns the path in `tree` to which `path` leads when every link is followed, and what is there.
pub(crate) fn resolve(tree: &dyn Tree, path: &str) -> Result<(String, Stat), FileError> {
    let mut left: VecDeque<String> = parts(path);
    let mut at: Vec<String> = Vec::new();
    let mut stat = tree.stat("/")?;
    let (mut links, mut steps) = (0, 0);
    while let Some(part) = left.pop_front() {
        steps += 1;
        if steps > MAX_STEPS || part.len() > MAX_NAME {
            return Err(FileError::TooDeep);
        }
        match part.as_str() {
            "." => continue,
            ".." => {
                at.pop();
                stat = tree.stat(&joined(&at))?;
                continue;
            }
            _ => {}
        }
        if stat.kind != Kind::Folder {
            return Err(FileError::WrongKind("folder"));
        }
        at.push(part);
        stat = tree.stat(&joined(&at))?;
        if stat.kind == Kind::Link {
            links += 1;
            if links > MAX_LINKS {
                return Err(FileError::TooDeep);
            }
            let target = tree.target(&joined(&at))?;
            at.pop();
            if target.starts_with('/') {
                at.clear();
            }
            stat = tree.stat(&joined(&at))?;
            for part in parts(&target).into_iter().rev() {
                left.push_front(part);
            }
            if left.len() > MAX_STEPS {
                return Err(FileError::TooDeep);
            }
        }
    }
    Ok((joined(&at), stat))
}

/// Returns whether `path` leads to something of the given kind.
pub(crate) fn is(tree: &dyn Tree, path: &str, kind: Kind) -> bool {
    resolve(tree, path).is_ok_and(|(_, stat)| stat.kind == kind)
}

/// Returns the names in the folder `path`.
pub(crate) fn names(tree: &dyn Tree, path: &str) -> Result<Vec<String>, FileError> {
    let (at, stat) = resolve(tree, path)?;
    if stat.kind != Kind::Folder {
        return Err(FileError::WrongKind("folder"));
    }
    tree.names(&at)
}

/// Returns the content of the file `path`, which may have at most `limit` bytes.
pub(crate) fn read(tree: &dyn Tree, path: &str, limit: u64) -> Result<Vec<u8>, FileError> {
    let (at, size) = file(tree, path)?;
    if size > limit {
        return Err(FileError::TooLarge { size, limit });
    }
    tree.bytes(&at, 0, size)
}

/// Returns the path without links of the file `path`, and its size.
pub(crate) fn file(tree: &dyn Tree, path: &str) -> Result<(String, u64), FileError> {
    let (at, stat) = resolve(tree, path)?;
    if stat.kind != Kind::File {
        return Err(FileError::WrongKind("file"));
    }
    Ok((at, stat.size))
}

fn parts(path: &str) -> VecDeque<String> {
    let parts = path.split('/').filter(|part| !part.is_empty());
    parts.map(str::to_owned).collect()
}

fn joined(parts: &[String]) -> String {
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A tree of folders, files and links, where a link's entry is its target.
    struct Made(BTreeMap<&'static str, &'static str>);

    const FOLDER: &str = "(folder)";
    const FILE: &str = "(file)";

    impl Tree for Made {
        fn stat(&self, path: &str) -> Result<Stat, FileError> {
            let kind = match *self.0.get(path).ok_or(FileError::NotFound)? {
                FOLDER => Kind::Folder,
                FILE => Kind::File,
                _ => Kind::Link,
            };
            Ok(Stat { kind, size: 0 })
        }

        fn target(&self, path: &str) -> Result<String, FileError> {
            Ok(self.0[path].to_owned())
        }

        fn names(&self, _: &str) -> Result<Vec<String>, FileError> {
            Ok(Vec::new())
        }

        fn bytes(&self, _: &str, _: u64, _: u64) -> Result<Vec<u8>, FileError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn links_are_followed_and_circles_end() {
        let tree = Made(BTreeMap::from([
            ("/", FOLDER),
            ("/boot", FOLDER),
            ("/boot/vmlinuz-6.1", FILE),
            ("/vmlinuz", "boot/vmlinuz-6.1"),
            ("/boot/again", "../vmlinuz"),
            ("/b", "/boot"),
            ("/circle", "/circle"),
            ("/grows", "grows/grows/grows"),
            ("/out", "../../../../boot/./vmlinuz-6.1"),
            ("/dangling", "nothing"),
        ]));
        let check = |path: &str, expected: &str| {
            let found = match resolve(&tree, path) {
                Ok((path, _)) => path,
                Err(error) => error.to_string(),
            };
            assert_eq!(found, expected, "{path}");
        };
        check("/", "/");
        check("", "/");
        check("/vmlinuz", "/boot/vmlinuz-6.1");
        check("//boot//again", "/boot/vmlinuz-6.1");
        check("/b/again", "/boot/vmlinuz-6.1");
        check("/out", "/boot/vmlinuz-6.1");
        check("/boot/../b/", "/boot");
        check("/dangling", "there is no such file");
        check("/vmlinuz/x", "it is not a folder");
        let deep = "its path has too many symbolic links or parts";
        check("/circle", deep);
        check("/grows", deep);
        check(&"/boot/..".repeat(300), deep);
        check(&"x".repeat(256), deep);
    }
}
