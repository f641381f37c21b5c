//! What is in a disk image, as text and as JSON. All text that comes from the image is made harmless.

use hvprobe_storage::{Boot, Entry, Inspection, Partition, Piece};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::json::{Shown, object};
use super::printable::harmless;
use super::{size, table};

/// Returns the tables of partitions and of boot entries, and what is booted.
pub(crate) fn text(found: &Inspection) -> String {
    let kind = found.table.name().unwrap_or("no partition table");
    let mut sections = vec![
        format!("{}, {kind}", size::text(found.size)),
        partitions(&found.partitions),
    ];
    if !found.entries.is_empty() {
        sections.push(entries(&found.entries));
    }
    if let Ok((entry, choice)) = found.chosen()
        && let Ok(boot) = &entry.boot
    {
        sections.push(booted(entry, boot, &choice.why));
    }
    let notes = found.notes.iter();
    let notes: Vec<_> = notes.map(|note| format!("note: {}", clean(note))).collect();
    if !notes.is_empty() {
        sections.push(notes.join("\n"));
    }
    sections.join("\n\n")
}

fn partitions(partitions: &[Partition]) -> String {
    const COLUMNS: [table::Column; 8] = [
        ("PARTITION", true),
        ("START", true),
        ("SIZE", true),
        ("TYPE", false),
        ("CONTENT", false),
        ("NAME", false),
        ("LABEL", false),
        ("UUID", false),
    ];
    let rows = partitions.iter().map(|partition| {
        let content = partition.file_system.name();
        let content = match &partition.problem {
            Some(problem) => format!("{content}, not read: {}", clean(problem)),
            None => content.to_owned(),
        };
        vec![
            number(partition.number),
            partition.start.to_string(),
            size::text(partition.size),
            or_dash(Some(&partition.kind)),
            content,
            or_dash(partition.name.as_deref()),
            or_dash(partition.label.as_deref()),
            or_dash(partition.uuid.as_deref()),
        ]
    });
    table::table(&COLUMNS, rows)
}

fn entries(entries: &[Entry]) -> String {
    const COLUMNS: [table::Column; 5] = [
        ("ENTRY", false),
        ("FROM", false),
        ("PARTITION", true),
        ("VERSION", false),
        ("KERNEL", false),
    ];
    let rows = entries.iter().map(|entry| {
        let kernel = match &entry.boot {
            Ok(boot) => clean(&boot.kernel.to_string()),
            Err(why) => format!("cannot be used: {}", clean(why)),
        };
        vec![
            or_dash(Some(&entry.title)),
            entry.origin.kind().to_owned(),
            number(entry.partition),
            or_dash(entry.version.as_deref()),
            kernel,
        ]
    });
    table::table(&COLUMNS, rows)
}

/// Returns what an entry boots, with one line per fact.
fn booted(entry: &Entry, boot: &Boot, why: &str) -> String {
    let mut lines = vec![("why", clean(why)), ("kernel", piece(&boot.kernel))];
    lines.extend(boot.initrds.iter().map(|initrd| ("initrd", piece(initrd))));
    lines.push(("options", clean(&boot.options)));
    let mut text = format!("boots {}", clean(&entry.title));
    let mut last = "";
    for (label, line) in lines {
        let shown = if label == last { "" } else { label };
        text.push_str(&format!("\n  {shown:<8} {line}"));
        last = label;
    }
    text
}

/// Returns where a file is, and its size.
fn piece(piece: &Piece) -> String {
    let place = match piece.partition {
        Some(number) => format!(" on partition {number}"),
        None => String::new(),
    };
    let path = clean(&piece.to_string());
    format!("{path}{place}, {}", size::text(piece.size))
}

fn number(number: Option<u32>) -> String {
    number.map_or("-".to_owned(), |number| number.to_string())
}

fn or_dash(text: Option<&str>) -> String {
    match text {
        None | Some("") => "-".to_owned(),
        Some(text) => clean(text),
    }
}

fn clean(text: &str) -> String {
    harmless(text.as_bytes())
}

impl Serialize for Shown<&Inspection> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let found = self.0;
        let chosen = found.chosen();
        let choice = chosen.as_ref().ok().map(|(_, choice)| choice);
        let problem = chosen.as_ref().err();
        object!(serializer, {
            "size": found.size,
            "table": found.table.name().map(str::to_lowercase),
            "partitions": found.partitions.iter().map(Shown).collect::<Vec<_>>(),
            "entries": found.entries.iter().map(Shown).collect::<Vec<_>>(),
            // Index of the entry that is booted, and why it is this one.
            "chosen": choice.map(|choice| choice.entry),
            "why": choice.map(|choice| clean(&choice.why)),
            // Why there is nothing to boot.
            "problem": problem.map(|error| clean(&error.to_string())),
            "notes": found.notes.iter().map(|note| clean(note)).collect::<Vec<_>>(),
        })
    }
}

impl Serialize for Shown<&Partition> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let partition = self.0;
        let text = |text: &Option<String>| text.as_deref().map(clean);
        object!(serializer, {
            "number": partition.number,
            "start": partition.start,
            "size": partition.size,
            "type": Some(clean(&partition.kind)).filter(|kind| !kind.is_empty()),
            "name": text(&partition.name),
            "partuuid": text(&partition.partuuid),
            "file_system": partition.file_system.name(),
            "label": text(&partition.label),
            "uuid": text(&partition.uuid),
            "problem": text(&partition.problem),
        })
    }
}

impl Serialize for Shown<&Entry> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entry = self.0;
        let boot = entry.boot.as_ref().ok();
        let initrds = |boot: &Boot| {
            let initrds = boot.initrds.iter().map(|it| clean(&it.to_string()));
            initrds.collect::<Vec<_>>()
        };
        object!(serializer, {
            "title": clean(&entry.title),
            "from": entry.origin.kind().to_lowercase(),
            "partition": entry.partition,
            "path": entry.origin.path().map(clean),
            "version": entry.version.as_deref().map(clean),
            "kernel": boot.map(|boot| clean(&boot.kernel.to_string())),
            "kernel_partition": boot.and_then(|boot| boot.kernel.partition),
            "initrds": boot.map(initrds),
            "options": boot.map(|boot| clean(&boot.options)),
            "problem": entry.boot.as_ref().err().map(|why| clean(why)),
        })
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use hvprobe_fixtures::disk::{ESP, LINUX, fat, gpt, uki};
    use hvprobe_storage::Image;

    use super::*;

    fn found(disk: Vec<u8>) -> Inspection {
        Image::of_bytes(disk).inspect().unwrap()
    }

    /// A disk with an entry whose title has an escape sequence, a unified kernel image, and a partition with xfs.
    fn disk() -> Vec<u8> {
        let image = uki(&[(".linux", b"kernel"), (".cmdline", b"quiet")]);
        let volume = fat(&[
            ("/EFI/Linux/b.efi", &image),
            (
                "/loader/entries/a.conf",
                b"title A \x1b[2J\nlinux /linux\ninitrd /one\ninitrd /two\noptions x y",
            ),
            ("/loader/entries/Z.conf", b"title None\nversion 1"),
            ("/linux", &[1; 1024]),
            ("/one", b"1"),
            ("/two", b"2"),
        ]);
        let mut xfs = vec![0; 4096];
        xfs[..4].copy_from_slice(b"XFSB");
        gpt(&[(ESP, "EFI \x1b", &volume), (LINUX, "", &xfs)])
    }

    #[test]
    fn partitions_and_entries_are_listed() {
        let text = text(&found(disk()));
        assert!(!text.contains('\x1b'), "{text}");
        for line in [
            "boots A ?[2J",
            "  why      boot entries: it is the first entry",
            "  kernel   /linux on partition 1, 1 KiB",
            "  initrd   /one on partition 1, 1 bytes",
            "           /two on partition 1, 1 bytes",
            "  options  x y",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        assert!(
            text.contains("cannot be used: it has no line `linux`"),
            "{text}"
        );
        assert!(text.contains("/EFI/Linux/b.efi(.linux)"), "{text}");
        let without = super::text(&found(vec![0; 4096]));
        assert!(
            without.starts_with("4 KiB, no partition table\n\n"),
            "{without}"
        );
        assert!(
            !without.contains("ENTRY") && !without.contains("boots"),
            "{without}"
        );
    }

    #[test]
    fn json_has_every_member() {
        let json = serde_json::to_value(Shown(&found(disk()))).unwrap();
        assert_eq!(json["table"], "gpt");
        assert_eq!(json["partitions"][0]["name"], "EFI ?");
        assert_eq!(json["partitions"][1]["file_system"], "xfs");
        assert_eq!(json["chosen"], 0);
        assert_eq!(json["problem"], serde_json::Value::Null);
        let entries = serde_json::to_string_pretty(&json["entries"]).unwrap();
        expect![[r#"
            [
              {
                "from": "bls",
                "initrds": [
                  "/one",
                  "/two"
                ],
                "kernel": "/linux",
                "kernel_partition": 1,
                "options": "x y",
                "partition": 1,
                "path": "/loader/entries/a.conf",
                "problem": null,
                "title": "A ?[2J",
                "version": null
              },
              {
                "from": "bls",
                "initrds": null,
                "kernel": null,
                "kernel_partition": null,
                "options": null,
                "partition": 1,
                "path": "/loader/entries/Z.conf",
                "problem": "it has no line `linux`",
                "title": "None",
                "version": "1"
              },
              {
                "from": "uki",
                "initrds": [],
                "kernel": "/EFI/Linux/b.efi(.linux)",
                "kernel_partition": 1,
                "options": "quiet",
                "partition": 1,
                "path": "/EFI/Linux/b.efi",
                "problem": null,
                "title": "b.efi",
                "version": null
              }
            ]"#]]
        .assert_eq(&entries);
        let nothing = serde_json::to_value(Shown(&found(vec![0; 4096]))).unwrap();
        assert_eq!(nothing["table"], serde_json::Value::Null);
        assert_eq!(nothing["chosen"], serde_json::Value::Null);
        assert!(
            nothing["problem"]
                .as_str()
                .unwrap()
                .contains("give --kernel and --initrd")
        );
    }
}
