//! Initramfs images: uncompressed newc cpio archives, built in memory.
//!
//! Every entry's parent folders come before it, and each name is entered once. The bytes depend on nothing but what
//! was added (there are no times and no owners), so equal inputs give equal images.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use cpio::newc::{Builder, ModeFileType, trailer};

/// An archive under construction.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Archive {
    /// Starts an archive with two device nodes: `/dev/console`, which the kernel opens as the standard streams of
    /// `/init`, and `/dev/null`.
    pub(crate) fn with_console() -> Result<Self> {
        let mut archive = Self::default();
        for (name, major, minor) in [("dev/console", 5, 1), ("dev/null", 1, 3)] {
            let node = Builder::new(name).rdev_major(major).rdev_minor(minor);
            archive.add(name, node, ModeFileType::Char, 0o600, b"")?;
        }
        Ok(archive)
    }

    /// Adds a folder and its parents.
    pub(crate) fn folder(&mut self, name: &str) -> Result<()> {
        if self.names.contains(name) {
            return Ok(());
        }
        self.add(
            name,
            Builder::new(name),
            ModeFileType::Directory,
            0o755,
            b"",
        )
    }

    /// Adds a file with the given contents.
    pub(crate) fn file(&mut self, name: &str, mode: u32, contents: &[u8]) -> Result<()> {
        self.add(
            name,
            Builder::new(name),
            ModeFileType::Regular,
            mode,
            contents,
        )
    }

    /// Adds a copy of the file at `source`; it is executable if `source` is.
    pub(crate) fn copy(&mut self, name: &str, source: &Path) -> Result<()> {
        let contents =
            fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        let mode = fs::metadata(source)?.permissions().mode() & 0o755;
        self.file(name, mode, &contents)
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, name: &str, target: &str) -> Result<()> {
        let link = Builder::new(name);
        self.add(name, link, ModeFileType::Symlink, 0o777, target.as_bytes())
    }

    /// Returns whether an entry of that name was added.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Finishes the archive. The image's length is a multiple of 512, so that another archive can be appended to
    /// it.
    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        let mut bytes = trailer(self.bytes)?;
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        Ok(bytes)
    }

    fn add(
        &mut self,
        name: &str,
        entry: Builder,
        kind: ModeFileType,
        mode: u32,
        contents: &[u8],
    ) -> Result<()> {
        if name.is_empty() || name.starts_with('/') {
            bail!("`{name}` is not a relative name for an archive entry");
        }
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.folder(parent)?;
        }
        if !self.names.insert(name.to_owned()) {
            bail!("two files in the image are called {name}");
        }
        let size = u32::try_from(contents.len())
            .with_context(|| format!("{name} is too large for an initramfs (4 GiB at most)"))?;
        let mut writer = entry
            .mode(mode)
            .set_mode_file_type(kind)
            .write(std::mem::take(&mut self.bytes), size);
        writer.write_all(contents)?;
        self.bytes = writer.finish()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::Read;

    use cpio::newc::Reader;
    use expect_test::{Expect, expect};

    fn listing(image: &[u8]) -> String {
        let mut listing = String::new();
        let mut rest = image;
        loop {
            let mut reader = Reader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                return listing;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            let mut contents = String::new();
            reader.read_to_string(&mut contents).unwrap();
            listing += &format!("{mode:06o} {name} {contents:?}\n");
            rest = reader.finish().unwrap();
        }
    }

    fn check(build: impl Fn(&mut Archive) -> Result<()>, expect: Expect) {
        let mut archive = Archive::default();
        build(&mut archive).unwrap();
        expect.assert_eq(&listing(&archive.finish().unwrap()));
    }

    #[test]
    fn parents_are_entered_once_and_before_their_files() {
        check(
            |archive| {
                archive.file("a/b/one", 0o755, b"1")?;
                archive.file("a/b/two", 0o644, b"")?;
                archive.link("a/link", "b/one")
            },
            expect![[r#"
                040755 a ""
                040755 a/b ""
                100755 a/b/one "1"
                100644 a/b/two ""
                120777 a/link "b/one"
            "#]],
        );
    }

    #[test]
    fn console_image_has_the_two_nodes() {
        let image = Archive::with_console().unwrap().finish().unwrap();
        expect![[r#"
            040755 dev ""
            020600 dev/console ""
            020600 dev/null ""
        "#]]
        .assert_eq(&listing(&image));
    }

    #[test]
    fn image_can_be_followed_by_another() {
        let mut archive = Archive::default();
        archive.file("odd", 0o644, b"123").unwrap();
        assert_eq!(archive.finish().unwrap().len() % 512, 0);
    }

    #[test]
    fn same_name_twice_is_refused() {
        let mut archive = Archive::default();
        archive.file("x", 0o644, b"").unwrap();
        assert!(archive.file("x", 0o644, b"").is_err());
    }

    #[test]
    fn absolute_name_is_refused() {
        assert!(Archive::default().file("/x", 0o644, b"").is_err());
    }
}
