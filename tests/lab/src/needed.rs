//! The shared libraries that a dynamically linked program needs, found by reading ELF headers.
//!
//! Unlike with `ldd`, nothing is executed. `PT_INTERP` names the loader, and `DT_NEEDED` the libraries, which are
//! searched in the folders that the loader searches by default.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use object::Endianness;
use object::elf::{DT_NEEDED, ELFMAG};
use object::read::elf::{ElfFile64, ProgramHeader as _};

/// Folders that the loader searches without `RPATH`, `LD_LIBRARY_PATH` or its cache.
const FOLDERS: [&str; 5] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/lib",
    "/usr/lib",
];

/// Loader and libraries that one ELF file names.
#[derive(Debug, Default, PartialEq, Eq)]
struct Needs {
    loader: Option<String>,
    libraries: Vec<String>,
}

/// Returns every library and loader that `programs` need, directly or through other libraries. For each, returns
/// the path at which the programs expect it, and the file on this machine. Static programs and scripts need none.
pub(crate) fn closure<'a>(
    programs: impl IntoIterator<Item = &'a Path>,
) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut unread: Vec<PathBuf> = programs.into_iter().map(Path::to_path_buf).collect();
    while let Some(file) = unread.pop() {
        let bytes = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let needs = needs(&bytes).with_context(|| format!("cannot pack {}", file.display()))?;
        let libraries = needs
            .libraries
            .iter()
            .map(|name| locate(name).with_context(|| format!("{} needs {name}", file.display())));
        for path in needs.loader.into_iter().map(Ok).chain(libraries) {
            let path = path?;
            let source = PathBuf::from(&path);
            if found.insert(path, source.clone()).is_none() {
                unread.push(source);
            }
        }
    }
    Ok(found)
}

fn locate(name: &str) -> Result<String> {
    FOLDERS
        .iter()
        .map(|folder| format!("{folder}/{name}"))
        .find(|path| Path::new(path).is_file())
        .with_context(|| format!("no such library in {}", FOLDERS.join(", ")))
}

fn needs(file: &[u8]) -> Result<Needs> {
    if !file.starts_with(&ELFMAG) {
        return Ok(Needs::default());
    }
    let elf = ElfFile64::<Endianness>::parse(file).context("damaged or not 64-bit ELF")?;
    let mut needs = Needs::default();
    for segment in elf.elf_program_headers() {
        if let Some(path) = segment.interpreter(elf.endian(), file)? {
            needs.loader = Some(String::from_utf8(path.to_vec())?);
        }
    }
    let dynamic = elf.elf_dynamic_table()?;
    for entry in dynamic.iter() {
        if entry.tag == DT_NEEDED {
            needs
                .libraries
                .push(String::from_utf8(dynamic.string(entry)?.to_vec())?);
        }
    }
    Ok(needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_needs_nothing() {
        assert_eq!(needs(b"#!/bin/sh\n").unwrap(), Needs::default());
    }

    #[test]
    fn truncated_elf_is_an_error_at_every_length() {
        let test_binary = fs::read(std::env::current_exe().unwrap()).unwrap();
        for length in [4, 16, 63, 64, 100, 500] {
            assert!(needs(&test_binary[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn this_test_needs_the_c_library_and_the_loader() {
        let found = closure([std::env::current_exe().unwrap().as_path()]).unwrap();
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert!(
            names.iter().any(|name| name.ends_with("/libc.so.6")),
            "{names:?}"
        );
        assert!(
            names.iter().any(|name| name.contains("/ld-linux")),
            "{names:?}"
        );
    }

    #[test]
    fn missing_library_says_where_it_was_looked_for() {
        let message = locate("libnowhere.so.9").unwrap_err().to_string();
        assert!(message.contains("/lib/x86_64-linux-gnu"), "{message}");
    }
}
