//! Scripts as a user types them.

use hvprobe_spec::definition::parse;
use hvprobe_spec::histogram::read_histogram;
use hvprobe_spec::script::{compile, read_script};

use super::definition::assert_shown;

/// Checks that a script does not change when it is printed and parsed again, and that it compiles to valid
/// definitions and histograms. If it cannot be parsed or compiled, checks that the error has a message and a
/// position in the text. Returns whether it compiles.
pub fn script(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let script = match read_script(&text) {
        Ok(script) => script,
        Err(error) => {
            assert_shown(&error.text, &error.source);
            return false;
        }
    };
    let printed = script.to_string();
    assert_eq!(read_script(&printed).as_ref(), Ok(&script), "{printed:?}");
    match compile(&text, &script) {
        Ok(program) => {
            for planted in &program.probes {
                assert_eq!(
                    parse(&planted.written.text).as_ref(),
                    Ok(&planted.definition)
                );
            }
            for counted in program.maps.iter().flat_map(|map| &map.counted) {
                assert!(
                    read_histogram(&counted.histogram.text).is_ok(),
                    "{counted:?}"
                );
            }
            true
        }
        Err(error) => {
            assert_shown(&error.text, &error.source);
            false
        }
    }
}
