//! Collects the boot entries of all volumes, and chooses one.

use super::bls_entries::{self, Named};
use super::choice::{Choice, Loader, choose};
use super::entry::Entry;
use super::fallback;
use super::grub_entries::{Grub, MAX_CONFIG, grub};
use super::pieces::listed;
use super::uki;
use super::version::compare;
use super::volume::Volume;
use crate::filesystem::resolve::{is, read};
use crate::filesystem::tree::Kind;

/// Folder with unified kernel images.
const UKIS: &str = "/EFI/Linux";
/// Maximum number of them that are read.
const MAX_UKIS: usize = 64;
/// Files that only a root file system has.
const OF_ROOT: [&str; 3] = ["/etc/os-release", "/usr/lib/os-release", "/etc/fstab"];

/// The boot entries of an image.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) entries: Vec<Entry>,
    /// The entry that is booted, or why there is none.
    pub(crate) choice: Result<Choice, String>,
    /// What was left out, and why.
    pub(crate) notes: Vec<String>,
}

/// Collects the boot entries on `volumes`, and chooses one.
///
/// The image's own boot loader decides: GRUB if there is a `grub.cfg`, whose menu may have the entries of the Boot
/// Loader Specification; otherwise, or if there is a `loader.conf`, systemd-boot. Kernels in `/boot` come last.
pub(crate) fn collect(volumes: &[Volume]) -> Found {
    let mut notes = Vec::new();
    let grubs: Vec<Grub> = volumes.iter().filter_map(|it| grub(it, volumes)).collect();
    for Grub { menu, path, .. } in &grubs {
        if let Err(why) = menu {
            notes.push(format!("{path} was not used: {why}"));
        }
    }
    let menus = grubs.iter().filter_map(|it| it.menu.as_ref().ok());
    let bls_menu = menus.clone().find(|menu| menu.uses_bls);
    let bls = bls_entries::entries(volumes, bls_menu, &mut notes);
    let ukis = ukis(volumes, &mut notes);
    let root = volumes.iter().find(|it| is_root(it));
    let kernels = volumes.iter();
    let kernels: Vec<Entry> = kernels
        .flat_map(|it| fallback::entries(it, root, &mut notes))
        .collect();

    let mut all = Vec::new();
    let mut loaders = Vec::new();
    if let Some(menu) = bls_menu {
        let default = menu.variable("default").map(str::to_owned);
        let default = match default {
            Some(default) => by_name(&bls, &default),
            None => Err("the default depends on the machine".to_owned()),
        };
        let order = append(&mut all, bls.entries);
        loaders.push(loader("GRUB", &order, default));
        let order = append(&mut all, ukis.entries);
        loaders.push(loader("unified kernel images", &order, first(&ukis.ids)));
    } else {
        let both = Named {
            ids: [bls.ids, ukis.ids].concat(),
            entries: [bls.entries, ukis.entries].concat(),
        };
        let setting = volumes.iter().find_map(loader_conf);
        let default = match setting.as_ref().map(|it| it.as_deref()) {
            Some(Some(pattern)) => by_pattern(&both, pattern),
            _ => first(&both.ids),
        };
        let order = append(&mut all, both.entries);
        let of_bls = loader("boot entries", &order, default);
        let of_grub = grubs.into_iter().map(|it| {
            let order = append(&mut all, it.entries);
            loader("GRUB", &order, it.default)
        });
        let of_grub: Vec<Loader> = of_grub.collect();
        // Left-overs of kernel-install beside GRUB are no sign of another boot loader.
        if setting.is_some() || of_grub.is_empty() {
            loaders.push(of_bls);
            loaders.extend(of_grub);
        } else {
            loaders.extend(of_grub);
            loaders.push(of_bls);
        }
    }
    loaders.retain(|loader| !loader.order.is_empty());
    let order = append(&mut all, kernels);
    let why = "no boot entry was found, and this is the newest kernel in /boot (fallback)";
    let default = (!order.is_empty()).then(|| (0, why.to_owned()));
    if let Some(default) = default {
        loaders.push(loader("kernels", &order, Ok(default)));
    }
    Found {
        choice: choose(&all, &loaders),
        entries: all,
        notes,
    }
}

/// Makes a loader of entries that are at the indexes `order`; `default` counts from the first of them.
fn loader(name: &'static str, order: &[usize], default: Result<(usize, String), String>) -> Loader {
    let default = default.and_then(|(index, why)| {
        let index = order.get(index).copied();
        index
            .map(|index| (index, why))
            .ok_or_else(|| "there is no entry".to_owned())
    });
    Loader {
        name,
        order: order.to_vec(),
        default,
    }
}

/// Appends entries, and returns their indexes.
fn append(all: &mut Vec<Entry>, entries: Vec<Entry>) -> Vec<usize> {
    let start = all.len();
    all.extend(entries);
    (start..all.len()).collect()
}

fn is_root(volume: &Volume) -> bool {
    let tree = volume.tree.as_ref();
    OF_ROOT.iter().any(|path| is(tree, path, Kind::File))
}

/// Returns the unified kernel images, the newest first.
fn ukis(volumes: &[Volume], notes: &mut Vec<String>) -> Named {
    let mut found = Vec::new();
    for volume in volumes {
        for name in listed(volume, UKIS, notes) {
            if name.to_ascii_lowercase().ends_with(".efi") {
                found.push((volume, name));
            }
        }
    }
    found.sort_by(|(_, a), (_, b)| compare(b, a).then_with(|| a.cmp(b)));
    found.truncate(MAX_UKIS);
    let entries = found.iter();
    Named {
        entries: entries
            .map(|(volume, name)| uki::entry(volume, &format!("{UKIS}/{name}")))
            .collect(),
        ids: found.into_iter().map(|(_, name)| name).collect(),
    }
}

/// Returns the setting `default` of the `loader.conf` on `volume`, if there is such a file.
fn loader_conf(volume: &Volume) -> Option<Option<String>> {
    let text = read(volume.tree.as_ref(), "/loader/loader.conf", MAX_CONFIG).ok()?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let mut values = text.lines().filter_map(|line| {
        let (key, value) = line.trim().split_once([' ', '\t'])?;
        (key == "default").then(|| value.trim().to_owned())
    });
    Some(values.next_back())
}

fn first(ids: &[String]) -> Result<(usize, String), String> {
    match ids.is_empty() {
        true => Err("there is no entry".to_owned()),
        false => Ok((0, "it is the first entry".to_owned())),
    }
}

/// Finds the default of GRUB's menu by its number, identifier or title.
fn by_name(named: &Named, default: &str) -> Result<(usize, String), String> {
    let why = || format!("`default` is `{default}`");
    if let Ok(index) = default.parse::<usize>()
        && index < named.entries.len()
    {
        return Ok((index, why()));
    }
    let mut entries = named.entries.iter().zip(&named.ids);
    let found = entries.position(|(entry, id)| {
        id == default || id.as_str() == default.trim_end_matches(".conf") || entry.title == default
    });
    match found {
        Some(index) if !default.is_empty() => Ok((index, why())),
        _ => first(&named.ids),
    }
}

/// Finds the default of systemd-boot: the first entry whose identifier fits the pattern.
fn by_pattern(named: &Named, pattern: &str) -> Result<(usize, String), String> {
    let pattern = pattern.trim_end_matches(".conf");
    let fits = |id: &String| matches(pattern.as_bytes(), id.as_bytes());
    match named.ids.iter().position(fits) {
        Some(index) => Ok((index, format!("`default` of loader.conf is `{pattern}`"))),
        None => first(&named.ids),
    }
}

/// Returns whether `text` fits a pattern with `*` and `?`.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on if the last `*` has to take one more byte.
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p, t));
                p += 1;
            }
            Some(byte) if *byte == b'?' || Some(byte) == text.get(t) => {
                p += 1;
                t += 1;
            }
            _ => match retry {
                Some((star, from)) => {
                    retry = Some((star, from + 1));
                    (p, t) = (star + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern.iter().skip(p).all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_as_in_a_shell() {
        for (pattern, text, expected) in [
            ("fedora-*", "fedora-6.1", true),
            ("*", "", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*b", "xaxxbab", true),
            ("*a*b", "xaxxba", false),
            ("", "a", false),
            ("abc", "abc", true),
        ] {
            let found = matches(pattern.as_bytes(), text.as_bytes());
            assert_eq!(found, expected, "{pattern} {text}");
        }
    }
}
