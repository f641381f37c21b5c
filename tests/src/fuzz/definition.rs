//! Probe definitions as a user types them.

use hvprobe_spec::ParseError;
use hvprobe_spec::definition::parse;

/// A definition that parses prints as one that parses to the same; one that does not says where it
/// is wrong, within the text, and can be shown on a terminal.
pub fn definition(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    match parse(&text) {
        Ok(definition) => {
            let printed = definition.to_string();
            assert_eq!(parse(&printed).as_ref(), Ok(&definition), "{printed:?}");
            true
        }
        Err(error) => {
            assert_shown(&text, &error);
            false
        }
    }
}

/// An error says something, where in `text` it is, and can be shown on a terminal.
pub(super) fn assert_shown(text: &str, error: &ParseError) {
    let picture = error.render(text);
    assert!(error.column <= text.chars().count(), "{error:?}");
    assert!(!error.message.is_empty());
    assert!(
        picture
            .chars()
            .all(|c| matches!(c, '\n' | '\t') || !c.is_control()),
        "{picture:?}"
    );
    assert_eq!(picture.matches('\n').count(), 1, "{picture:?}");
}
