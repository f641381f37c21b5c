//! What was typed with an option, read, or pointed at.

use hvprobe_spec::ParseError;

use crate::failure::WrongUsage;

/// What each of `texts` says, if there is nothing wrong with one of them.
pub(crate) fn all<T>(
    option: &str,
    texts: &[String],
    read: impl Fn(&str) -> Result<T, ParseError>,
) -> Result<Vec<T>, WrongUsage> {
    let read = |text: &String| read(text).map_err(|error| bad_option(option, text, &error));
    texts.iter().map(read).collect()
}

/// What `text` says, if it was given and there is nothing wrong with it.
pub(crate) fn one<T>(
    option: &str,
    text: Option<&str>,
    read: impl Fn(&str) -> Result<T, ParseError>,
) -> Result<Option<T>, WrongUsage> {
    let read = |text: &str| read(text).map_err(|error| bad_option(option, text, &error));
    text.map(read).transpose()
}

/// What is wrong with `text`, given with `option`.
pub(crate) fn bad_option(option: &str, text: &str, error: &ParseError) -> WrongUsage {
    bad(&format!("--{option}"), text, error)
}

/// What is wrong with `text`, which is a `what`.
pub(crate) fn bad(what: &str, text: &str, error: &ParseError) -> WrongUsage {
    if text.trim().is_empty() {
        return WrongUsage(format!("bad {what}: {error}"));
    }
    let picture = error.render(text).replace('\n', "\n  ");
    WrongUsage(format!("bad {what}: {error}\n  {picture}"))
}
