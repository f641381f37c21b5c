//! Files of the Boot Loader Specification (UAPI group, "Boot Loader Specification"), type 1.

use std::cmp::Ordering;

use super::version::compare;

/// An entry as its file has it. Paths and options may have variables of GRUB.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bls {
    /// Name of the file without `.conf` and without counters of attempts to boot.
    pub(super) id: String,
    /// Whether the attempts to boot it are used up.
    pub(super) is_bad: bool,
    pub(super) title: Option<String>,
    pub(super) version: Option<String>,
    pub(super) machine_id: Option<String>,
    pub(super) sort_key: Option<String>,
    pub(super) architecture: Option<String>,
    pub(super) linux: Option<String>,
    pub(super) initrds: Vec<String>,
    pub(super) options: String,
}

/// Maximum number of initial ramdisks of an entry.
const MAX_INITRDS: usize = 16;

/// Reads the file `name` with the content `text`. Returns `None` if the name is not one of an entry.
pub(super) fn parse(name: &str, text: &str) -> Option<Bls> {
    let (id, is_bad) = id(name.strip_suffix(".conf")?);
    let mut entry = Bls {
        id,
        is_bad,
        ..Bls::default()
    };
    for line in text.lines().map(str::trim) {
        if line.starts_with('#') {
            continue;
        }
        let Some((key, value)) = line.split_once([' ', '\t']) else {
            continue;
        };
        let value = value.trim();
        let value = || value.to_owned();
        match key {
            "title" => entry.title = Some(value()),
            "version" => entry.version = Some(value()),
            "machine-id" => entry.machine_id = Some(value()),
            "sort-key" => entry.sort_key = Some(value()),
            "architecture" => entry.architecture = Some(value()),
            "linux" => entry.linux = Some(value()),
            // GRUB's entries have several, and variables, on one line.
            "initrd" => {
                let value = value();
                let paths = value.split_whitespace().map(str::to_owned);
                entry.initrds.extend(paths.take(MAX_INITRDS));
            }
            "options" => {
                if !entry.options.is_empty() {
                    entry.options.push(' ');
                }
                entry.options.push_str(&value());
            }
            _ => {}
        }
    }
    entry.initrds.truncate(MAX_INITRDS);
    Some(entry)
}

/// Splits counters of attempts to boot off the name of an entry: `+LEFT` or `+LEFT-DONE`. Returns also whether none
/// are left.
fn id(name: &str) -> (String, bool) {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    if let Some((id, counters)) = name.rsplit_once('+') {
        let (left, done) = counters.split_once('-').unwrap_or((counters, "0"));
        if is_number(left) && is_number(done) {
            return (id.to_owned(), left.bytes().all(|it| it == b'0'));
        }
    }
    (name.to_owned(), false)
}

/// Orders entries as the specification does: the first one is the default.
pub(super) fn order(one: &Bls, other: &Bls) -> Ordering {
    let (a, b) = (one.sort_key.as_ref(), other.sort_key.as_ref());
    let bad = one.is_bad.cmp(&other.is_bad);
    let keys = match (a, b) {
        (Some(a), Some(b)) => a.cmp(b).then_with(|| {
            let machines = one.machine_id.cmp(&other.machine_id);
            let version = |entry: &Bls| entry.version.clone().unwrap_or_default();
            machines.then_with(|| compare(&version(other), &version(one)))
        }),
        // Entries with a key come first.
        (a, b) => b.is_some().cmp(&a.is_some()),
    };
    bad.then(keys).then_with(|| order_of_names(one, other))
}

/// Orders entries as GRUB does: by their names, the newest version first.
pub(super) fn order_of_names(one: &Bls, other: &Bls) -> Ordering {
    compare(&other.id, &one.id).then_with(|| one.id.cmp(&other.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read() {
        let text = "\
# comes from kernel-install
title      Fedora Linux 41\tWorkstation
version    6.11.4-301.fc41.x86_64
linux      /vmlinuz-6.11.4-301.fc41.x86_64
initrd\t/microcode.img
initrd     /initramfs-6.11.4-301.fc41.x86_64.img $tuned_initrd
options    root=UUID=1 ro
options    $kernelopts
grub_users $grub_users
devicetree
";
        let entry = parse("a-6.11+2-1.conf", text).unwrap();
        let expected = Bls {
            id: "a-6.11".to_owned(),
            title: Some("Fedora Linux 41\tWorkstation".to_owned()),
            version: Some("6.11.4-301.fc41.x86_64".to_owned()),
            linux: Some("/vmlinuz-6.11.4-301.fc41.x86_64".to_owned()),
            initrds: [
                "/microcode.img",
                "/initramfs-6.11.4-301.fc41.x86_64.img",
                "$tuned_initrd",
            ]
            .map(str::to_owned)
            .to_vec(),
            options: "root=UUID=1 ro $kernelopts".to_owned(),
            ..Bls::default()
        };
        assert_eq!(entry, expected);
        assert_eq!(parse("README", text), None);
    }

    #[test]
    fn entries_are_in_the_order_of_the_specification() {
        let entry = |name: &str, sort_key: &str, version: &str| {
            let text = match sort_key {
                "" => format!("version {version}"),
                key => format!("version {version}\nsort-key {key}"),
            };
            parse(name, &text).unwrap()
        };
        let mut entries = [
            entry("old-6.1.0-9.conf", "", "6.1.0-9"),
            entry("old-6.1.0-18.conf", "", "6.1.0-18"),
            entry("x.conf", "fedora", "6.2"),
            entry("y.conf", "fedora", "6.10"),
            entry("z.conf", "arch", "1"),
            entry("a+0-3.conf", "arch", "7"),
        ];
        entries.sort_by(order);
        let ids = entries.each_ref().map(|entry| entry.id.as_str());
        assert_eq!(ids, ["z", "y", "x", "old-6.1.0-18", "old-6.1.0-9", "a"]);
    }

    #[test]
    fn counters_are_no_part_of_a_name() {
        for (name, expected) in [
            ("a", ("a", false)),
            ("a+3", ("a", false)),
            ("a+0", ("a", true)),
            ("a+0-1", ("a", true)),
            ("a+2-1", ("a", false)),
            ("a+", ("a+", false)),
            ("a+b", ("a+b", false)),
            ("6.1+deb12", ("6.1+deb12", false)),
        ] {
            assert_eq!(id(name), (expected.0.to_owned(), expected.1), "{name}");
        }
    }
}
