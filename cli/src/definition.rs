//! Probe definitions, read here before they are sent, so that a mistake is shown where it is.

use hvprobe_proto::v1::ProbeSpec;
use hvprobe_spec::definition;

use crate::failure::WrongUsage;
use crate::hit_args::{HitArgs, HoldArgs};
use crate::typed::bad;

/// The specifications of `definitions`, all with the same of everything else.
pub(crate) fn specs(
    definitions: &[String],
    disabled: bool,
    hit: &HitArgs,
    hold: &HoldArgs,
) -> Result<Vec<ProbeSpec>, WrongUsage> {
    definitions
        .iter()
        .map(|text| match definition::parse(text) {
            Ok(definition) => Ok(ProbeSpec {
                disabled,
                ..hit.spec(hold, text, definition)?
            }),
            Err(error) => Err(bad("definition", text, &error)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(definitions: &[&str]) -> Result<Vec<ProbeSpec>, WrongUsage> {
        let definitions: Vec<String> = definitions.iter().map(|&text| text.to_owned()).collect();
        specs(
            &definitions,
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
}
