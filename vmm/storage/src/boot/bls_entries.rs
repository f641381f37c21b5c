//! Entries of the Boot Loader Specification on the volumes of an image.

use super::bls::{Bls, order, order_of_names, parse};
use super::entry::{Boot, Entry, Origin};
use super::grub::menu::Menu;
use super::grub_entries::MAX_CONFIG;
use super::pieces::{MAX_INITRD, MAX_KERNEL, find, listed};
use super::volume::Volume;
use crate::filesystem::resolve::read;

/// Where entries may be, and the prefix that paths in them may need.
const FOLDERS: [(&str, &str); 2] = [("/loader/entries", ""), ("/boot/loader/entries", "/boot")];
/// Maximum number of entries that are read.
const MAX_ENTRIES: usize = 256;

/// Entries of a menu, the first one first, with the names by which a default may be chosen.
#[derive(Debug, Default)]
pub(super) struct Named {
    pub(super) entries: Vec<Entry>,
    pub(super) ids: Vec<String>,
}

/// Returns the entries on `volumes`, in the order of the specification, or in that of GRUB if its menu is given.
pub(super) fn entries(volumes: &[Volume], menu: Option<&Menu>, notes: &mut Vec<String>) -> Named {
    let mut found = Vec::new();
    for volume in volumes {
        let tree = volume.tree.as_ref();
        for (folder, prefix) in FOLDERS {
            let mut files = listed(volume, folder, notes);
            files.sort();
            for name in files {
                let path = format!("{folder}/{name}");
                if !name.ends_with(".conf") {
                    continue;
                }
                if found.len() == MAX_ENTRIES {
                    notes.push(format!("only {MAX_ENTRIES} boot entries were read"));
                    break;
                }
                let text = read(tree, &path, MAX_CONFIG).map_err(|error| error.to_string());
                let text = text.and_then(|text| {
                    String::from_utf8(text).map_err(|_| "it is not UTF-8".to_owned())
                });
                match text {
                    Ok(text) => {
                        if let Some(entry) = parse(&name, &text) {
                            found.push((entry, volume, path, prefix));
                        }
                    }
                    Err(why) => notes.push(format!("{path} was not read: {why}")),
                }
            }
        }
    }
    let order = if menu.is_some() {
        order_of_names
    } else {
        order
    };
    found.sort_by(|(a, ..), (b, ..)| order(a, b));
    let ids = found.iter().map(|(bls, ..)| bls.id.clone()).collect();
    let entries = found.into_iter().map(|(bls, volume, path, prefix)| Entry {
        boot: boot(&bls, volume, prefix, menu),
        partition: volume.number,
        origin: Origin::Bls { path },
        title: bls.title.unwrap_or(bls.id),
        version: bls.version,
    });
    Named {
        entries: entries.collect(),
        ids,
    }
}

/// Returns what an entry boots, or why it cannot be used.
fn boot(bls: &Bls, volume: &Volume, prefix: &str, menu: Option<&Menu>) -> Result<Boot, String> {
    if let Some(architecture) = &bls.architecture
        && !architecture.eq_ignore_ascii_case("x64")
    {
        return Err(format!("it is for {architecture}, not for x64"));
    }
    let file = |path: &str, limit: u64| {
        let path = match path.starts_with('/') {
            true => path.to_owned(),
            false => format!("/{path}"),
        };
        // Without a boot partition, paths are relative to the root file system or to its /boot.
        match find(volume, &path, limit) {
            Err(_) if !prefix.is_empty() && !path.starts_with(prefix) => {
                find(volume, &format!("{prefix}{path}"), limit)
            }
            found => found,
        }
    };
    let linux = bls.linux.as_ref().ok_or("it has no line `linux`")?;
    let linux = expanded(linux, menu)?;
    let mut initrds = Vec::new();
    for initrd in &bls.initrds {
        for path in expanded(initrd, menu)?.split_whitespace() {
            initrds.push(file(path, MAX_INITRD)?);
        }
    }
    Ok(Boot {
        kernel: file(linux.trim(), MAX_KERNEL)?,
        initrds,
        options: expanded(&bls.options, menu)?.trim().to_owned(),
    })
}

/// Expands variables as GRUB does; other boot loaders have none.
fn expanded(text: &str, menu: Option<&Menu>) -> Result<String, String> {
    let Some(menu) = menu else {
        return Ok(text.to_owned());
    };
    let mut rest = text;
    let mut expanded = String::new();
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let (name, after) = match after.strip_prefix('{').and_then(|it| it.split_once('}')) {
            Some((name, after)) => (name, after),
            None => after.split_at(after.find(|c| !is_name(c)).unwrap_or(after.len())),
        };
        let value = menu.variable(name);
        let value = value
            .ok_or_else(|| format!("it needs ${name}, whose value only the machine can tell"))?;
        expanded.push_str(value);
        rest = after;
    }
    expanded.push_str(rest);
    Ok(expanded)
}
