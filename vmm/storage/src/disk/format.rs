//! Formats of image files.

use std::path::Path;

/// Format of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The file's bytes are the disk's bytes.
    Raw,
    /// QEMU's format, possibly with backing files.
    Qcow2,
}

impl Format {
    /// Returns the name of the format, as options have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }

    /// Returns the format that the name of a file states: qcow2 for `*.qcow2`, raw for all others. The content is
    /// not looked at, because a guest may write what it likes to the start of a raw disk.
    #[must_use]
    pub fn of_name(path: &Path) -> Self {
        match path.extension() {
            Some(extension) if extension.eq_ignore_ascii_case("qcow2") => Self::Qcow2,
            _ => Self::Raw,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_name_states_the_format() {
        for (name, expected) in [
            ("disk.qcow2", Format::Qcow2),
            ("a/disk.QCOW2", Format::Qcow2),
            ("disk.raw", Format::Raw),
            ("disk.img", Format::Raw),
            ("qcow2", Format::Raw),
            ("qcow2/disk", Format::Raw),
        ] {
            assert_eq!(Format::of_name(Path::new(name)), expected, "{name}");
        }
    }
}
