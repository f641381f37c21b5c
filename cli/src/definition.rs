//! Probe definitions, read here before they are sent, so that a mistake is shown where it is.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use hvprobe_proto::v1::ProbeSpec;
use hvprobe_spec::definition::{self, Definition};

use crate::failure::WrongUsage;
use crate::hit_args::{HitArgs, HoldArgs};
use crate::typed::bad;

/// The longest file of definitions: of as many of the longest ones as one batch may have.
const LONGEST: u64 = 16384 * 1024;

/// The specifications of `definitions` and of those in `files`, all with the same of everything else.
pub(crate) fn specs(
    definitions: &[String],
    files: &[PathBuf],
    disabled: bool,
    hit: &HitArgs,
    hold: &HoldArgs,
) -> Result<Vec<ProbeSpec>, WrongUsage> {
    let mut wanted = Vec::new();
    for text in definitions {
        let read = definition::parse(text).map_err(|error| bad("definition", text, &error))?;
        wanted.push((text.clone(), read));
    }
    for file in files {
        wanted.extend(in_file(file)?);
    }
    wanted
        .into_iter()
        .map(|(text, definition)| {
            Ok(ProbeSpec {
                disabled,
                ..hit.spec(hold, &text, definition)?
            })
        })
        .collect()
}

/// The definitions in `file`, without the comments around them.
fn in_file(file: &Path) -> Result<Vec<(String, Definition)>, WrongUsage> {
    let name = file.display();
    let text = text(file).map_err(|error| WrongUsage(format!("cannot read {name}: {error}")))?;
    let lines = definition::parse_file(&text).map_err(|error| {
        let what = format!("definition in {name}:{}", error.number);
        bad(&what, &error.text, &error.source)
    })?;
    if lines.is_empty() {
        return Err(WrongUsage(format!("no definition is in {name}")));
    }
    let lines = lines.into_iter().map(|line| line.definition);
    Ok(lines.map(|read| (read.to_string(), read)).collect())
}

/// The text in `file`, unless it is too long to be one of definitions.
fn text(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    let read = File::open(file)?
        .take(LONGEST + 1)
        .read_to_string(&mut text)?;
    match u64::try_from(read) {
        Ok(read) if read <= LONGEST => Ok(text),
        _ => Err(io::Error::other("it is longer than 16 MiB")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(definitions: &[&str]) -> Result<Vec<ProbeSpec>, WrongUsage> {
        let definitions: Vec<String> = definitions.iter().map(|&text| text.to_owned()).collect();
        specs(
            &definitions,
            &[],
            true,
            &HitArgs::default(),
            &HoldArgs::default(),
        )
    }

    #[test]
    fn caret_stands_under_the_offending_column() {
        let error = read(&["p vfs_read", "p vfs_read+"]).unwrap_err();
        let lines: Vec<_> = error.0.lines().collect();
        assert_eq!(
            lines.get(1..),
            Some(&["  p vfs_read+", "             ^"][..])
        );
    }

    #[test]
    fn good_definitions_are_sent_as_they_were_typed() {
        let specs = read(&["p:r  vfs_read"]).unwrap();
        assert_eq!(specs[0].definition, "p:r  vfs_read");
        assert!(specs[0].disabled);
    }

    fn read_file(text: &[u8]) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("events");
        std::fs::write(&file, text).unwrap();
        let (hit, hold) = (HitArgs::default(), HoldArgs::default());
        let specs = specs(&["p a".to_owned()], &[file], false, &hit, &hold);
        let specs = specs.map_err(|error| {
            let folder = folder.path().display().to_string();
            error.0.replace(&folder, "$FOLDER")
        })?;
        Ok(specs.into_iter().map(|spec| spec.definition).collect())
    }

    #[test]
    fn lines_of_a_file_come_behind_what_was_typed() {
        let text = b"# first\n\np:g/e  vfs_open x=%di # why\n\tr4 vfs_read\n";
        assert_eq!(
            read_file(text).unwrap(),
            ["p a", "p:g/e vfs_open x=%di", "r4 vfs_read"]
        );
    }

    #[test]
    fn mistakes_in_a_file_are_shown_with_their_line() {
        for (text, expected) in [
            (
                &b"p a\n\n p b+z # no\n"[..],
                "bad definition in $FOLDER/events:3: `z` is no digit of the offset\n   p b+z # no\n       ^",
            ),
            (b"# nothing\n", "no definition is in $FOLDER/events"),
            (
                b"p a\xff",
                "cannot read $FOLDER/events: stream did not contain valid UTF-8",
            ),
        ] {
            assert_eq!(read_file(text).unwrap_err(), expected);
        }
        let long = vec![b'#'; usize::try_from(LONGEST).unwrap() + 1];
        let error = read_file(&long).unwrap_err();
        assert!(error.ends_with("it is longer than 16 MiB"), "{error}");
    }
}
