//! GRUB's menu on a volume of the image, as boot entries.

use super::entry::{Boot, Entry, Origin};
use super::grub::menu::{Content, Menu, Node, run};
use super::grub::state::{Load, Loaded};
use super::grub::world::{Key, World};
use super::pieces::{MAX_INITRD, MAX_KERNEL, find};
use super::volume::Volume;
use crate::filesystem::resolve::{is, read, resolve};
use crate::filesystem::tree::{Kind, Stat};

/// Where a `grub.cfg` may be.
const FOLDERS: [&str; 4] = ["/boot/grub", "/boot/grub2", "/grub", "/grub2"];
/// Largest configuration file, in bytes.
pub(super) const MAX_CONFIG: u64 = 1 << 20;

/// A `grub.cfg` that was run.
#[derive(Debug)]
pub(super) struct Grub {
    /// Entries of its menu, without submenus.
    pub(super) entries: Vec<Entry>,
    /// Index in `entries` of the default, and why it is that, or why it is unknown.
    pub(super) default: Result<(usize, String), String>,
    /// The menu, or why there is none.
    pub(super) menu: Result<Menu, String>,
    pub(super) path: String,
}

/// Runs the `grub.cfg` on `volume`, one of `volumes`, if there is one.
pub(super) fn grub(volume: &Volume, volumes: &[Volume]) -> Option<Grub> {
    let tree = volume.tree.as_ref();
    let path = |folder: &&str| format!("{folder}/grub.cfg");
    let folder = FOLDERS.iter().find(|it| is(tree, &path(it), Kind::File))?;
    let path = path(folder);
    let disk = Disk(volumes);
    let menu = read(tree, &path, MAX_CONFIG)
        .map_err(|error| error.to_string())
        .and_then(|script| String::from_utf8(script).map_err(|_| "it is not UTF-8".to_owned()))
        .and_then(|script| run(&script, &device(volume.number), folder, &disk));
    let mut entries = Vec::new();
    let mut default = Err("it has no menu".to_owned());
    if let Ok(menu) = &menu {
        let found = menu.default();
        let mut at = Vec::new();
        let mut index = None;
        let wanted = found.as_ref().map(|(at, _)| at.as_slice()).ok();
        flatten(&menu.nodes, &mut at, &mut |at, node, load| {
            if wanted == Some(at) {
                index = Some(entries.len());
            }
            entries.push(entry(volume, volumes, &path, at, node, load));
        });
        default = found.and_then(|(_, why)| {
            let index = index.ok_or("its menu is empty")?;
            Ok((index, why))
        });
    }
    Some(Grub {
        entries,
        default,
        menu,
        path,
    })
}

/// Calls `visit` for each entry of the menu and of its submenus.
fn flatten(
    nodes: &[Node],
    at: &mut Vec<usize>,
    visit: &mut impl FnMut(&[usize], &Node, &Result<Load, String>),
) {
    for (index, node) in nodes.iter().enumerate() {
        at.push(index);
        match &node.content {
            Content::Entry(load) => visit(at, node, load),
            Content::Submenu(inner) => flatten(inner, at, visit),
        }
        at.pop();
    }
}

/// Makes a boot entry of an entry of the menu.
fn entry(
    volume: &Volume,
    volumes: &[Volume],
    path: &str,
    at: &[usize],
    node: &Node,
    load: &Result<Load, String>,
) -> Entry {
    let position: Vec<String> = at.iter().map(usize::to_string).collect();
    let boot = || -> Result<Boot, String> {
        let load = load.as_ref().map_err(String::clone)?;
        if let Some(trouble) = &load.trouble {
            return Err(trouble.clone());
        }
        let kernel = load.kernel.as_ref().ok_or("it loads no Linux kernel")?;
        let file = |loaded: &Loaded, limit: u64| {
            let volume = Disk(volumes).volume(&loaded.device);
            let volume = volume.ok_or_else(|| {
                let Loaded { device, path } = loaded;
                format!("{path} is on GRUB's device {device}, which cannot be read in this image")
            })?;
            find(volume, &loaded.path, limit)
        };
        let initrds = load.initrds.iter().map(|loaded| file(loaded, MAX_INITRD));
        Ok(Boot {
            kernel: file(kernel, MAX_KERNEL)?,
            initrds: initrds.collect::<Result<_, _>>()?,
            options: load.options.clone(),
        })
    };
    Entry {
        partition: volume.number,
        origin: Origin::Grub {
            path: path.to_owned(),
            position: position.join(">"),
        },
        title: node.title.clone().unwrap_or_else(|| "?".to_owned()),
        version: None,
        boot: boot(),
    }
}

/// The volumes of the image as GRUB sees them: as the first disk.
struct Disk<'v>(&'v [Volume]);

/// Returns GRUB's name of a partition, or of the whole disk.
fn device(number: Option<u32>) -> String {
    match number {
        Some(number) => format!("hd0,{number}"),
        None => "hd0".to_owned(),
    }
}

impl<'v> Disk<'v> {
    /// Returns the volume on a device of GRUB: `hd0`, `hd0,2`, `hd0,gpt2` or `hd0,msdos2`.
    fn volume(&self, device: &str) -> Option<&'v Volume> {
        let number = match device.split_once(',') {
            None => (device == "hd0").then_some(None),
            Some(("hd0", part)) => {
                let number = part.trim_start_matches("gpt").trim_start_matches("msdos");
                number.parse().ok().map(Some)
            }
            Some(_) => None,
        }?;
        self.0.iter().find(|volume| volume.number == number)
    }
}

impl World for Disk<'_> {
    fn find(&self, key: Key, value: &str) -> Option<String> {
        let is = |name: &Option<String>| match name {
            Some(name) => name.eq_ignore_ascii_case(value),
            None => false,
        };
        let found = self.0.iter().find(|volume| match key {
            Key::Uuid => is(&volume.uuid),
            Key::Label => volume.label.as_deref() == Some(value),
            Key::PartUuid => is(&volume.partuuid),
            Key::File => resolve(volume.tree.as_ref(), value).is_ok(),
        });
        found.map(|volume| device(volume.number))
    }

    fn is_seen(&self, device: &str) -> bool {
        self.volume(device).is_some()
    }

    fn stat(&self, device: &str, path: &str) -> Option<Stat> {
        let found = resolve(self.volume(device)?.tree.as_ref(), path);
        found.ok().map(|(_, stat)| stat)
    }

    fn read(&self, device: &str, path: &str) -> Option<Vec<u8>> {
        read(self.volume(device)?.tree.as_ref(), path, MAX_CONFIG).ok()
    }
}
