//! qcow2 image files, read by `imago`.
//!
//! Invariant: an image opens no file outside of the folder in which the first image lies, because the name of a
//! backing file comes from the image, which is untrusted. Backing files are opened here, not by `imago`, and their
//! format is the one that the image states.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use imago::file::File;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder as _};

use super::source::Source;
use crate::error::ImageError;

/// Maximum number of files in a chain of backing files.
const MAX_CHAIN: usize = 16;

/// A qcow2 image file with its backing files.
#[derive(Debug)]
pub(crate) struct Qcow2(FormatAccess<File>);

impl Qcow2 {
    /// Opens the regular file at `path`, and its backing files, for reading.
    pub(crate) fn open(path: &Path) -> Result<Self, ImageError> {
        let folder = fs::canonicalize(path)
            .map(|path| path.parent().map(Path::to_owned).unwrap_or_default())
            .map_err(|source| failed(path, source))?;
        layer(path, &folder, MAX_CHAIN).map(Self)
    }
}

/// Opens one qcow2 file of a chain, and those after it. At most `left` files may be opened.
fn layer(path: &Path, folder: &Path, left: usize) -> Result<FormatAccess<File>, ImageError> {
    let opened = open(path).map_err(|source| failed(path, source))?;
    let mut image = imago::qcow2::Qcow2::<File>::builder(opened)
        .backing(None)
        .data_file(None)
        .open(DenyImplicitOpenGate::default())
        .map_err(|source| failed(path, source))?;
    let refused = |needs: String, why: &str| ImageError::Needs {
        path: path.to_owned(),
        needs,
        why: why.to_owned(),
    };
    if image.requires_external_data_file() {
        let needs = "an external data file".to_owned();
        return Err(refused(needs, "this is not supported; convert the image"));
    }
    let Some(name) = image.implicit_backing_file().cloned() else {
        return Ok(FormatAccess::new(image));
    };
    let needs = || format!("the backing file {name:?}");
    let Some(left) = left.checked_sub(1) else {
        return Err(refused(needs(), "the chain of backing files is too long"));
    };
    let backing = inside(path, &name, folder).ok_or_else(|| {
        refused(
            needs(),
            "it is not in the folder of the image, or below it; move it there, or convert the image",
        )
    })?;
    let backing = match image.implicit_backing_format().map(String::as_str) {
        Some("qcow2") => layer(&backing, folder, left)?,
        Some("raw") => {
            let raw = open(&backing).and_then(|file| Raw::open_image(file, false));
            FormatAccess::new(raw.map_err(|source| failed(&backing, source))?)
        }
        Some(_) => {
            return Err(refused(
                needs(),
                "its format is neither raw nor qcow2; convert the image",
            ));
        }
        None => {
            return Err(refused(
                needs(),
                "the image does not state its format; run `qemu-img rebase -u` with -F",
            ));
        }
    };
    image.set_backing(Some(backing));
    Ok(FormatAccess::new(image))
}

/// Returns the file that the image at `path` calls `name`, if it is in `folder` or below it.
fn inside(path: &Path, name: &str, folder: &Path) -> Option<PathBuf> {
    // An absolute name replaces the folder.
    let named = path.parent()?.join(name);
    // A file that does not exist, or a name in the style of a URL, gives no path.
    let named = fs::canonicalize(named).ok()?;
    named.starts_with(folder).then_some(named)
}

/// Opens a regular file.
fn open(path: &Path) -> io::Result<File> {
    File::try_from(hvprobe_vmlinux::open_file(path)?)
}

fn failed(path: &Path, source: io::Error) -> ImageError {
    ImageError::Open {
        path: path.to_owned(),
        source,
    }
}

impl Source for Qcow2 {
    fn len(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        // `imago` reads zeros after the end; a window asks for nothing there.
        self.0.read(buffer, offset)
    }
}
