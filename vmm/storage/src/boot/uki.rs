//! Unified kernel images (UAPI group, "Unified Kernel Image"): EFI programs with a kernel, an initial ramdisk and a
//! command line as sections.

use object::LittleEndian as Le;
use object::pe::{IMAGE_FILE_MACHINE_AMD64, ImageDosHeader, ImageNtHeaders64};
use object::read::pe::ImageNtHeaders as _;

use super::entry::{Boot, Entry, Origin, Piece, Section};
use super::pieces::{MAX_INITRD, MAX_KERNEL};
use super::volume::Volume;
use crate::error::FileError;
use crate::filesystem::resolve::file;

/// Bytes at the start of a file in which its headers must be.
const HEADERS: u64 = 64 << 10;
/// Maximum number of sections.
const MAX_SECTIONS: usize = 96;
/// Largest section with text, in bytes.
const MAX_TEXT: u64 = 64 << 10;

/// Reads the unified kernel image at `path`.
pub(super) fn entry(volume: &Volume, path: &str) -> Entry {
    let name = path.rsplit('/').next().unwrap_or(path);
    let mut entry = Entry {
        partition: volume.number,
        origin: Origin::Uki {
            path: path.to_owned(),
        },
        title: name.to_owned(),
        version: None,
        boot: Err(String::new()),
    };
    entry.boot = read(volume, path, &mut entry.title, &mut entry.version);
    entry
}

/// Reads the sections, and the title and the version if there are sections with them.
fn read(
    volume: &Volume,
    path: &str,
    title: &mut String,
    version: &mut Option<String>,
) -> Result<Boot, String> {
    let tree = volume.tree.as_ref();
    let failed = |error: FileError| error.to_string();
    let (at, size) = file(tree, path).map_err(failed)?;
    let headers = tree.bytes(&at, 0, size.min(HEADERS)).map_err(failed)?;
    let sections = sections(&headers, size)?;
    let text = |name: &str| -> Result<Option<String>, String> {
        let Some(found) = sections.iter().find(|it| it.name == name) else {
            return Ok(None);
        };
        if found.len > MAX_TEXT {
            return Err(format!("its section {name} is too large"));
        }
        let bytes = tree.bytes(&at, found.offset, found.len).map_err(failed)?;
        let text = String::from_utf8(bytes);
        let text = text.map_err(|_| format!("its section {name} is not UTF-8"))?;
        Ok(Some(text.trim_end_matches(['\0', '\n', ' ']).to_owned()))
    };
    if let Some(release) = text(".osrel")? {
        let value = |key| value_of(&release, key);
        if let Some(name) = value("PRETTY_NAME") {
            *title = name;
        }
        *version = value("IMAGE_VERSION").or_else(|| value("VERSION_ID"));
    }
    if let Some(kernel) = text(".uname")? {
        *version = Some(kernel);
    }
    let piece = |name: &str, limit: u64| -> Result<Option<Piece>, String> {
        let Some(found) = sections.iter().find(|it| it.name == name) else {
            return Ok(None);
        };
        if found.len > limit {
            return Err(format!("its section {name} is too large"));
        }
        Ok(Some(Piece {
            partition: volume.number,
            path: path.to_owned(),
            size: found.len,
            section: Some(Section {
                name: name.to_owned(),
                offset: found.offset,
            }),
        }))
    };
    let kernel = piece(".linux", MAX_KERNEL)?.filter(|piece| piece.size > 0);
    let mut initrds = Vec::new();
    for name in [".ucode", ".initrd"] {
        initrds.extend(piece(name, MAX_INITRD)?.filter(|piece| piece.size > 0));
    }
    Ok(Boot {
        kernel: kernel.ok_or("it has no section .linux, so it is not a unified kernel image")?,
        initrds,
        options: text(".cmdline")?.unwrap_or_default(),
    })
}

/// Bytes of the file that are a section.
#[derive(Debug)]
struct Bytes {
    name: String,
    offset: u64,
    len: u64,
}

/// Returns the sections of a file with these headers. Of an image with several profiles, these are those of the
/// first profile, before those that all profiles share.
fn sections(headers: &[u8], size: u64) -> Result<Vec<Bytes>, String> {
    let failed = |_| "it is not an EFI program for x86-64".to_owned();
    let dos = ImageDosHeader::parse(headers).map_err(failed)?;
    let mut offset = dos.nt_headers_offset().into();
    let (nt, _) = ImageNtHeaders64::parse(headers, &mut offset).map_err(failed)?;
    if nt.file_header().machine.get(Le) != IMAGE_FILE_MACHINE_AMD64 {
        return Err("it is for another machine than x86-64".to_owned());
    }
    let table = nt.sections(headers, offset);
    let table = table.map_err(|_| "its table of sections is damaged".to_owned())?;
    if table.len() > MAX_SECTIONS {
        return Err("it has more sections than are read".to_owned());
    }
    let (mut shared, mut first) = (Vec::new(), Vec::new());
    let mut profiles = 0;
    for section in table.iter() {
        let name = section.raw_name();
        let name = String::from_utf8_lossy(name).into_owned();
        if name == ".profile" {
            profiles += 1;
        }
        let (offset, len) = section.pe_file_range();
        let (offset, len) = (u64::from(offset), u64::from(len));
        if len > 0 && offset + len > size {
            return Err(format!("its section {name} ends after the end of the file"));
        }
        let bytes = Bytes { name, offset, len };
        match profiles {
            0 => shared.push(bytes),
            1 => first.push(bytes),
            _ => break,
        }
    }
    first.append(&mut shared);
    Ok(first)
}

/// Returns the value of `key` in the text of an os-release file.
fn value_of(release: &str, key: &str) -> Option<String> {
    let mut values = release.lines().filter_map(|line| {
        let value = line.trim().strip_prefix(key)?.strip_prefix('=')?;
        Some(value.trim_matches(['"', '\'']).to_owned())
    });
    values.next_back().filter(|value| !value.is_empty())
}
