//! Files of definitions, with the histograms of their events.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use hvprobe_proto::limits;
use hvprobe_spec::ParseError;
use hvprobe_spec::definition::{self, Definition, FileError, Trigger};
use hvprobe_spec::histogram::read_histogram;

use crate::failure::WrongUsage;
use crate::failure::typed::bad;

/// Maximum size of a file of definitions in bytes: a full batch of definitions of maximum length.
const LONGEST: u64 = (limits::BATCH * limits::DEFINITION) as u64;

/// A histogram that a `hist` trigger in a file defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileHistogram {
    file: PathBuf,
    trigger: Trigger,
}

impl FileHistogram {
    /// Returns the text of the histogram.
    pub(crate) fn text(&self) -> &str {
        &self.trigger.histogram
    }

    /// Returns the event, with its group.
    pub(crate) fn event(&self) -> &str {
        &self.trigger.event
    }

    /// Returns whether the histogram counts the events called `name`.
    pub(crate) fn counts(&self, name: &str) -> bool {
        definition::event_path(name) == self.trigger.event
    }

    /// Returns whether the histogram needs the kernel's stack from the events of `definition`.
    pub(crate) fn needs_stacks(&self, definition: &Definition) -> bool {
        let read = read_histogram(self.text());
        self.is_of(definition) && read.is_ok_and(|histogram| histogram.needs_stacks())
    }

    /// Returns whether the histogram counts the events of `definition`.
    pub(crate) fn is_of(&self, definition: &Definition) -> bool {
        definition.event_path() == self.trigger.event
    }

    /// Returns `error` as an error in the file.
    pub(crate) fn refused(&self, error: ParseError) -> WrongUsage {
        wrong("hist", &self.file, &self.trigger.refused(error))
    }
}

/// Refuses histograms for `command`, which does not count.
pub(crate) fn refuse(histograms: &[FileHistogram], command: &str) -> Result<(), WrongUsage> {
    let Some(first) = histograms.first() else {
        return Ok(());
    };
    let message =
        format!("{command} counts nothing: give the file to `hvprobe run` or `hvprobe trace`");
    Err(first.refused(ParseError { column: 0, message }))
}

/// Contents of a file: its definitions, without the comments, and its histograms.
type Contents = (Vec<(String, Definition)>, Vec<FileHistogram>);

/// Reads `file`.
pub(crate) fn read(file: &Path) -> Result<Contents, WrongUsage> {
    let name = file.display();
    let text = text(file).map_err(|error| WrongUsage(format!("cannot read {name}: {error}")))?;
    let events =
        definition::parse_file(&text).map_err(|error| wrong("definition", file, &error))?;
    if events.definitions.is_empty() {
        return Err(WrongUsage(format!("no definition is in {name}")));
    }
    let lines = events.definitions.into_iter().map(|line| line.definition);
    let definitions = lines.map(|read| (read.to_string(), read)).collect();
    let histograms = events.histograms.into_iter().map(|trigger| FileHistogram {
        file: file.to_owned(),
        trigger,
    });
    Ok((definitions, histograms.collect()))
}

/// Returns `error` as a mistake in an item of `file`. `what` is the kind of the item.
fn wrong(what: &str, file: &Path, error: &FileError) -> WrongUsage {
    let what = format!("{what} in {}:{}", file.display(), error.number);
    bad(&what, &error.text, &error.source)
}

/// Reads the text of `file`, unless it is too long for definitions.
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
    use expect_test::{Expect, expect};

    use super::*;

    fn check(text: &[u8], expected: Expect) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("events");
        std::fs::write(&file, text).unwrap();
        let outcome = match read(&file) {
            Ok((definitions, histograms)) => {
                let definitions = definitions.into_iter().map(|(text, _)| text);
                let counted = |it: &FileHistogram| format!("{} of {}", it.text(), it.event());
                let all: Vec<_> = definitions
                    .chain(histograms.iter().map(counted))
                    .chain(refuse(&histograms, "`hvprobe boot`").err().map(|it| it.0))
                    .collect();
                all.join("\n")
            }
            Err(error) => error.0,
        };
        expected.assert_eq(&outcome.replace(&folder.path().display().to_string(), "$FOLDER"));
    }

    #[test]
    fn definitions_are_read_without_what_stands_around_them() {
        check(
            b"# first\n\np:g/e  vfs_open x=%di # why\n\tr4 vfs_read\n",
            expect![[r#"
                p:g/e vfs_open x=%di
                r4 vfs_read"#]],
        );
    }

    #[test]
    fn histograms_are_pointed_at_where_nothing_is_counted() {
        check(
            b"p:e vfs_open x=%di\necho 'hist:keys=x' > events/kprobes/e/trigger\n",
            expect![[r#"
                p:e vfs_open x=%di
                hist:keys=x of kprobes/e
                bad hist in $FOLDER/events:2: `hvprobe boot` counts nothing: give the file to `hvprobe run` or `hvprobe trace`
                  echo 'hist:keys=x' > events/kprobes/e/trigger
                        ^"#]],
        );
    }

    #[test]
    fn a_histogram_counts_the_events_of_its_name_and_group() {
        let counts = |event: &str, name| {
            let trigger = Trigger {
                number: 1,
                line: String::new(),
                column: 0,
                event: event.to_owned(),
                histogram: String::new(),
            };
            let file = PathBuf::new();
            FileHistogram { file, trigger }.counts(name)
        };
        assert!(counts("kprobes/e", "e") && counts("kprobes/e", "kprobes/e"));
        assert!(counts("g/e", "g/e"));
        assert!(!counts("g/e", "e") && !counts("kprobes/e", "g/e") && !counts("kprobes/e", "f"));
    }

    #[test]
    fn mistakes_in_a_file_are_shown_with_their_line() {
        check(
            b"p a\n\n p b+z # no\n",
            expect![[r#"
            bad definition in $FOLDER/events:3: `z` is no digit of the offset
               p b+z # no
                   ^"#]],
        );
        check(
            b"# nothing\n",
            expect!["no definition is in $FOLDER/events"],
        );
        check(
            b"p a\xff",
            expect!["cannot read $FOLDER/events: stream did not contain valid UTF-8"],
        );
        check(
            b"p:e a\nevents/kprobes/e/trigger:hist:keys=\n",
            expect![[r#"
                bad definition in $FOLDER/events:2: the name of a field belongs here
                  events/kprobes/e/trigger:hist:keys=
                                                     ^"#]],
        );
        let long = vec![b'#'; usize::try_from(LONGEST).unwrap() + 1];
        check(
            &long,
            expect!["cannot read $FOLDER/events: it is longer than 16 MiB"],
        );
    }
}
