//! Kernels that lie in `/boot`, for images without boot entries that can be used.

use super::entry::{Boot, Entry, Origin, Piece};
use super::pieces::{MAX_INITRD, MAX_KERNEL, find, listed};
use super::version::compare;
use super::volume::Volume;
use crate::filesystem::resolve::is;
use crate::filesystem::tree::Kind;

/// Maximum number of kernels that are listed.
const MAX_KERNELS: usize = 64;

/// Returns an entry for each kernel on `volume`, the newest first. `root` is the volume with the root file system,
/// if there is one.
pub(super) fn entries(
    volume: &Volume,
    root: Option<&Volume>,
    notes: &mut Vec<String>,
) -> Vec<Entry> {
    let tree = volume.tree.as_ref();
    // On the root file system in /boot, on a boot partition in its root folder.
    let mut kernels: Vec<(&str, String)> = Vec::new();
    for folder in ["/boot", ""] {
        let path = if folder.is_empty() { "/" } else { folder };
        for name in listed(volume, path, notes) {
            if let Some(version) = name.strip_prefix("vmlinuz-")
                && !version.contains("rescue")
                && !version.ends_with(".old")
            {
                kernels.push((folder, version.to_owned()));
            }
        }
    }
    kernels.sort_by(|(_, a), (_, b)| compare(b, a).then_with(|| a.cmp(b)));
    kernels.truncate(MAX_KERNELS);
    let mut entries: Vec<Entry> = kernels
        .into_iter()
        .map(|(folder, version)| {
            let kernel = format!("{folder}/vmlinuz-{version}");
            let initrds = [
                format!("{folder}/initrd.img-{version}"),
                format!("{folder}/initramfs-{version}.img"),
                format!("{folder}/initramfs-{version}"),
                format!("{folder}/initrd-{version}"),
            ];
            entry(volume, root, &kernel, &initrds, Some(version))
        })
        .collect();
    // Links such as those of Debian, which may lead to names of another form.
    if entries.is_empty() {
        for folder in ["", "/boot"] {
            let kernel = format!("{folder}/vmlinuz");
            if is(tree, &kernel, Kind::File) {
                let initrds = [
                    format!("{folder}/initrd.img"),
                    format!("{folder}/initramfs.img"),
                    format!("{folder}/initrd"),
                ];
                entries.push(entry(volume, root, &kernel, &initrds, None));
                break;
            }
        }
    }
    entries
}

/// Makes the entry for one kernel, with the first of `initrds` that exists.
fn entry(
    volume: &Volume,
    root: Option<&Volume>,
    kernel: &str,
    initrds: &[String],
    version: Option<String>,
) -> Entry {
    let tree = volume.tree.as_ref();
    let initrd = initrds.iter().find(|path| is(tree, path, Kind::File));
    let boot = || -> Result<Boot, String> {
        let kernel = find(volume, kernel, MAX_KERNEL)?;
        let initrd = initrd.map(|path| find(volume, path, MAX_INITRD));
        let initrds: Vec<Piece> = initrd.transpose()?.into_iter().collect();
        let root = root.ok_or("no root file system was found")?;
        let options = format!("root={} ro", root_name(root, !initrds.is_empty())?);
        Ok(Boot {
            kernel,
            initrds,
            options,
        })
    };
    Entry {
        partition: volume.number,
        origin: Origin::Fallback,
        title: kernel.to_owned(),
        version,
        boot: boot(),
    }
}

/// Returns how the kernel finds the root file system. Only an initial ramdisk knows UUIDs of file systems.
fn root_name(root: &Volume, has_initrd: bool) -> Result<String, String> {
    match (&root.uuid, &root.partuuid) {
        (Some(uuid), _) if has_initrd => Ok(format!("UUID={uuid}")),
        (_, Some(partuuid)) => Ok(format!("PARTUUID={partuuid}")),
        (_, None) => Err(
            "without an initial ramdisk, the kernel needs a partition with a UUID as its root"
                .to_owned(),
        ),
    }
}
