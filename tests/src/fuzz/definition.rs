//! Probe definitions as a user types them.

use hvprobe_spec::ParseError;
use hvprobe_spec::definition::{parse, parse_file};
use hvprobe_spec::fetch::read_filter;
use hvprobe_spec::histogram::read_histogram;

/// Checks that a definition does not change when it is printed and parsed again. If it cannot be parsed, checks
/// that the error has a position in the text and can be shown on a terminal. Checks the same for filters and
/// histograms. If the text is a file of definitions, checks its histograms. Returns whether the text is a
/// definition.
pub fn definition(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    match read_filter(&text) {
        Ok(filter) => {
            let printed = filter.to_string();
            assert_eq!(read_filter(&printed).as_ref(), Ok(&filter), "{printed:?}");
        }
        Err(error) => assert_shown(&text, &error),
    }
    match read_histogram(&text) {
        Ok(histogram) => {
            let printed = histogram.to_string();
            assert_eq!(
                read_histogram(&printed).as_ref(),
                Ok(&histogram),
                "{printed:?}"
            );
        }
        Err(error) => assert_shown(&text, &error),
    }
    match parse_file(&text) {
        Ok(events) => {
            for trigger in &events.histograms {
                assert!(read_histogram(&trigger.histogram).is_ok(), "{trigger:?}");
                assert!(trigger.line[trigger.column..].starts_with(&trigger.histogram));
            }
        }
        Err(error) => assert_shown(&error.text, &error.source),
    }
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

/// Checks that an error has a message and a position in `text`, and can be shown on a terminal.
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
