//! Options of a probe, as a user types them.

use std::fmt::Debug;

use hvprobe_spec::language::{
    Capture, ask, capture, change, condition, decision, rate, share, text, value,
};
use hvprobe_spec::{Hold, ParseError};

/// Checks that an option does not change when it is printed and parsed again, and that an error has a position in
/// the text. Returns whether the text parses as an option of any kind.
pub fn language(data: &[u8]) -> bool {
    let typed = String::from_utf8_lossy(data);
    let captured = holds(&typed, capture, |what| match what {
        // Registers are printed together as a set.
        Capture::Register(_) => typed.to_string(),
        Capture::Item(item) => text::item(item),
    });
    let asked = holds(&typed, ask, |hold| match hold {
        Hold::Ask { deadline, default } => text::ask(*deadline, default),
        Hold::Stop => panic!("{typed:?} is read as a stop"),
    });
    let read = [
        captured,
        asked,
        holds(&typed, change, text::change),
        holds(&typed, condition, text::condition),
        holds(&typed, decision, text::decision),
        holds(&typed, value, |value| format!("{value:#x}")),
        holds(&typed, rate, |rate| format!("{rate}/s")),
        holds(&typed, share, |share| format!("{share}%")),
    ];
    read.contains(&true)
}

/// Checks one kind of option, which `read` parses and `print` prints. Returns whether `typed` parses.
fn holds<T: Debug + PartialEq>(
    typed: &str,
    read: impl Fn(&str) -> Result<T, ParseError>,
    print: impl Fn(&T) -> String,
) -> bool {
    match read(typed) {
        Ok(meant) => {
            let printed = print(&meant);
            assert_eq!(read(&printed).as_ref(), Ok(&meant), "{printed:?}");
            true
        }
        Err(error) => {
            super::definition::assert_shown(typed, &error);
            false
        }
    }
}
