//! Images for the tests, and how they are shown.

use std::fs;
use std::io::ErrorKind;
use std::process::Command;

use super::super::*;

/// UUID of the file system in the test's `grub.cfg`.
pub(crate) const ROOT: &str = "7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11";
pub(crate) const BOOT: &str = "11111111-2222-3333-4444-555555555555";

/// Returns an ext4 file system of 4 MiB with these files, made by `mke2fs`. The content of a file that begins with
/// `-> ` is the target of a link. Without `mke2fs`, returns `None`, and says that the test is skipped.
pub(crate) fn ext4(uuid: &str, files: &[(&str, &[u8])]) -> Option<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    fs::create_dir(&root).unwrap();
    for (path, content) in files {
        let path = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match content.strip_prefix(b"-> ") {
            Some(target) => {
                let target = std::str::from_utf8(target).unwrap();
                std::os::unix::fs::symlink(target, path).unwrap();
            }
            None => fs::write(path, content).unwrap(),
        }
    }
    let image = folder.path().join("image");
    let mut command = Command::new("mke2fs");
    command
        .args([
            "-q", "-F", "-t", "ext4", "-b", "1024", "-L", "a label", "-U", uuid, "-d",
        ])
        .args([&root, &image])
        .arg("4M");
    match command.output() {
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{error}");
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("skipped: needs mke2fs");
            return None;
        }
        Err(error) => panic!("{error}"),
    }
    let mut image = fs::read(image).unwrap();
    // The file may end at the last block that is in use.
    image.resize(4 << 20, 0);
    Some(image)
}

/// Shows what is found in an image: partitions, boot entries, notes, and what is booted.
pub(crate) fn shown(image: Vec<u8>) -> String {
    let image = Image::of_bytes(image);
    match image.inspect() {
        Ok(found) => text(&image, &found),
        Err(error) => format!("{error}\n"),
    }
}

fn text(image: &Image, found: &Inspection) -> String {
    let mut text = format!("{:?}\n", found.table);
    for part in &found.partitions {
        let number = part.number.map_or("disk".to_owned(), |it| it.to_string());
        let problem = part
            .problem
            .as_ref()
            .map_or(String::new(), |it| format!(": {it}"));
        let name = part.file_system.name();
        let label = part.label.as_deref().unwrap_or("-");
        let uuid = part.uuid.as_deref().unwrap_or("-");
        text.push_str(&format!("{number} {name} {label:?} {uuid}{problem}\n"));
    }
    for entry in &found.entries {
        let at = entry
            .partition
            .map_or("disk".to_owned(), |it| it.to_string());
        let origin = match &entry.origin {
            Origin::Grub { position, .. } => format!("GRUB {position}"),
            origin => origin.kind().to_owned(),
        };
        let boot = match &entry.boot {
            Ok(_) => String::new(),
            Err(why) => format!(": {why}"),
        };
        text.push_str(&format!("{at} {origin} {:?}{boot}\n", entry.title));
    }
    for note in &found.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    match found.chosen() {
        Err(error) => text.push_str(&format!("{error}\n")),
        Ok((entry, choice)) => {
            text.push_str(&format!("boots {:?}: {}\n", entry.title, choice.why));
            let boot = entry.boot.as_ref().unwrap();
            text.push_str(&format!("  {}\n", boot.kernel));
            for initrd in &boot.initrds {
                text.push_str(&format!("  {initrd}\n"));
            }
            text.push_str(&format!("  {}\n", boot.options));
            let files = image.read(boot).unwrap();
            let contents = [&files.kernel].into_iter().chain(&files.initrds);
            let contents: Vec<_> = contents.map(|it| String::from_utf8_lossy(it)).collect();
            text.push_str(&format!("  {}\n", contents.join(" + ")));
        }
    }
    text
}
