//! `--flame`: counted stacks, drawn as a flame graph.
//!
//! inferno draws the graph. Its licence (CDDL-1.0) differs from ours, hence the cargo feature `flame`. A program
//! without the feature accepts the option, but reports an error before it boots or plants anything.

use std::fs;
use std::io;
use std::path::Path;

use crate::output::file::Unwritten;

/// Draws the stacks in `folded`, which has the format of `--folded`, and replaces the file at `path` by the graph.
pub(crate) fn draw(folded: &str, path: &Path) -> Result<(), Unwritten> {
    let picture = picture(folded).and_then(|picture| fs::write(path, picture));
    picture.map_err(|error| Unwritten::new(path, error))
}

#[cfg(feature = "flame")]
fn picture(folded: &str) -> io::Result<Vec<u8>> {
    use inferno::flamegraph::{Options, from_lines};

    let mut options = Options::default();
    options.title = "Hits by kernel stack".to_owned();
    options.count_name = "hits".to_owned();
    let mut picture = Vec::new();
    let drawn = from_lines(&mut options, folded.lines(), &mut picture);
    match drawn {
        // If there are no stacks, inferno fails, but it has drawn a picture that says so.
        Err(_) if folded.is_empty() => Ok(picture),
        drawn => drawn.map(|()| picture),
    }
}

/// Unreachable: the check of the options fails first.
#[cfg(not(feature = "flame"))]
fn picture(_folded: &str) -> io::Result<Vec<u8>> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
#[cfg(feature = "flame")]
mod tests {
    use super::*;

    fn drawn(folded: &str) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        draw(folded, file.path()).unwrap();
        fs::read_to_string(file.path()).unwrap()
    }

    #[test]
    fn a_function_is_as_wide_as_its_hits() {
        let picture = drawn("dd;ksys_read;vfs_read 3\nls;vfs_read 1\n");
        for title in [
            "<title>vfs_read (3 hits, 75.00%)</title>",
            "<title>ls (1 hits, 25.00%)</title>",
            "<title>all (4 hits, 100%)</title>",
        ] {
            assert!(picture.contains(title), "{title}: {picture}");
        }
    }

    #[test]
    fn names_of_a_guest_are_text_in_the_picture() {
        let picture = drawn("</title><script>;a&b 1\n");
        assert!(!picture.contains("</title><script>"), "{picture}");
        assert!(picture.contains("a&amp;b"), "{picture}");
    }

    #[test]
    fn no_hits_are_a_picture_that_says_so() {
        let picture = drawn("");
        assert!(picture.contains("</svg>"), "{picture}");
    }

    #[test]
    fn a_file_that_cannot_be_written_is_reported() {
        let error = draw("a 1\n", Path::new("/nowhere/x.svg")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/x.svg"), "{error}");
    }
}
