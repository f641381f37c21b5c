//! Kernel modules that a rig loads.
//!
//! Invariant: each module comes after all modules that it depends on. The dependencies are read from the module's
//! file (its section `.modinfo`, as scripts/mod/modpost.c of the kernel writes it for `MODULE_INFO(depends, ...)`),
//! because they change between the updates of one kernel.

use anyhow::{Context, Result};
use object::{File, Object as _, ObjectSection as _};

/// A module to load.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Module {
    /// The name of its file.
    pub(crate) file: String,
    pub(crate) parameters: String,
    pub(crate) bytes: Vec<u8>,
}

/// Returns the modules in `named` and the modules that they depend on, in the order in which they are to be loaded.
/// Each of `named` is the name of a file, with parameters after it. `read` reads a file.
pub(crate) fn in_order(
    named: &[&str],
    mut read: impl FnMut(&str) -> Result<Vec<u8>>,
) -> Result<Vec<Module>> {
    let mut modules = Vec::new();
    for line in named {
        let (file, parameters) = line.split_once(' ').unwrap_or((*line, ""));
        add(&mut modules, &mut Vec::new(), file, &mut read)?;
        if let Some(module) = modules.iter_mut().find(|module| module.file == file) {
            parameters.clone_into(&mut module.parameters);
        }
    }
    Ok(modules)
}

/// Adds the module in `file`, after its dependencies, unless it has been added. Does nothing if `file` is among
/// `waiting`, the modules whose dependencies are being added: the dependencies are cyclic then.
fn add(
    modules: &mut Vec<Module>,
    waiting: &mut Vec<String>,
    file: &str,
    read: &mut impl FnMut(&str) -> Result<Vec<u8>>,
) -> Result<()> {
    let is_there = modules.iter().any(|module| module.file == file);
    if is_there || waiting.iter().any(|waiting| waiting == file) {
        return Ok(());
    }
    let bytes = read(file)?;
    let depends = depends(&bytes).with_context(|| format!("{file} is no module"))?;
    waiting.push(file.to_owned());
    for name in depends {
        add(modules, waiting, &format!("{name}.ko"), read)?;
    }
    waiting.pop();
    modules.push(Module {
        file: file.to_owned(),
        parameters: String::new(),
        bytes,
    });
    Ok(())
}

/// Returns the names of the modules that `module` depends on.
fn depends(module: &[u8]) -> Result<Vec<String>> {
    let elf = File::parse(module)?;
    let section = elf.section_by_name(".modinfo").context("no .modinfo")?;
    let info = String::from_utf8_lossy(section.data()?).into_owned();
    let depends = info
        .split('\0')
        .find_map(|entry| entry.strip_prefix("depends="));
    let names = depends.unwrap_or_default().split(',');
    Ok(names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes an object file whose section `.modinfo` lists these dependencies.
    fn module(depends: &str) -> Vec<u8> {
        let info = format!("license=GPL\0depends={depends}\0name=it\0");
        let names = b"\0.modinfo\0.shstrtab\0";
        let end = 64 + info.len() as u64;
        let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
        elf.resize(16, 0);
        // The header says: relocatable, x86-64, version 1, and that the section headers follow the contents of the
        // sections.
        elf.extend([1, 0, 62, 0, 1, 0, 0, 0]);
        elf.extend([0; 16]);
        elf.extend((end + names.len() as u64).to_le_bytes());
        elf.extend([0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 64, 0, 3, 0, 2, 0]);
        elf.extend(info.as_bytes());
        elf.extend(names);
        let mut section = |name: u32, kind: u32, offset: u64, size: usize| {
            elf.extend([name, kind].map(u32::to_le_bytes).concat());
            let fields = [0, 0, offset, size as u64, 0, 1, 0];
            elf.extend(fields.map(u64::to_le_bytes).concat());
        };
        section(0, 0, 0, 0);
        section(1, 1, 64, info.len());
        section(10, 3, end, names.len());
        elf
    }

    fn lines(named: &[&str], files: &[(&str, &str)]) -> Result<Vec<String>> {
        let modules = in_order(named, |file| {
            let found = files.iter().find(|(name, _)| *name == file);
            Ok(module(found.with_context(|| format!("no {file}"))?.1))
        })?;
        let line = |it: &Module| format!("{} {}", it.file, it.parameters);
        Ok(modules
            .iter()
            .map(|it| line(it).trim_end().to_owned())
            .collect())
    }

    #[test]
    fn each_comes_once_and_behind_what_it_depends_on() {
        let files = [
            ("net.ko", "ring,bus,fail"),
            ("pci.ko", "ring,bus"),
            ("bus.ko", "ring"),
            ("ring.ko", ""),
            ("fail.ko", ""),
        ];
        assert_eq!(
            lines(&["pci.ko", "net.ko a=1 b", "ring.ko c=2"], &files).unwrap(),
            ["ring.ko c=2", "bus.ko", "pci.ko", "fail.ko", "net.ko a=1 b"]
        );
    }

    #[test]
    fn those_that_depend_on_each_other_end() {
        let files = [("a.ko", "b"), ("b.ko", "a")];
        assert_eq!(lines(&["a.ko"], &files).unwrap(), ["b.ko", "a.ko"]);
    }

    #[test]
    fn what_is_missing_or_no_module_is_named() {
        let error = lines(&["a.ko"], &[("a.ko", "b")]).unwrap_err();
        assert_eq!(error.to_string(), "no b.ko");
        let error = in_order(&["a.ko"], |_| Ok(b"text".to_vec())).unwrap_err();
        assert_eq!(error.to_string(), "a.ko is no module");
    }
}
