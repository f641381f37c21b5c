//! Values that the user typed, and errors that point at the mistakes in them.

use std::fmt;

use hvprobe_spec::ParseError;

/// Error in the user's input.
#[derive(Debug)]
pub(crate) struct WrongUsage(pub(crate) String);

impl fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// Parses each of `texts`; the first mistake is an error.
pub(crate) fn all<T>(
    option: &str,
    texts: &[String],
    read: impl Fn(&str) -> Result<T, ParseError>,
) -> Result<Vec<T>, WrongUsage> {
    let read = |text: &String| read(text).map_err(|error| bad_option(option, text, &error));
    texts.iter().map(read).collect()
}

/// Parses `text`, if it was given.
pub(crate) fn one<T>(
    option: &str,
    text: Option<&str>,
    read: impl Fn(&str) -> Result<T, ParseError>,
) -> Result<Option<T>, WrongUsage> {
    let read = |text: &str| read(text).map_err(|error| bad_option(option, text, &error));
    text.map(read).transpose()
}

/// Returns the error for `text`, the value of `option`.
pub(crate) fn bad_option(option: &str, text: &str, error: &ParseError) -> WrongUsage {
    bad(&format!("--{option}"), text, error)
}

/// Returns the error for `text`. `what` is the kind of `text`.
pub(crate) fn bad(what: &str, text: &str, error: &ParseError) -> WrongUsage {
    if text.trim().is_empty() {
        return WrongUsage(format!("bad {what}: {error}"));
    }
    let picture = error.render(text).replace('\n', "\n  ");
    WrongUsage(format!("bad {what}: {error}\n  {picture}"))
}
