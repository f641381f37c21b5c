//! Probe definitions, read here before they are sent, so that a mistake is shown where it is.

use hvprobe_proto::v1::ProbeSpec;
use hvprobe_vmm::definition;

use crate::failure::WrongUsage;

/// The specifications of `definitions`.
pub(crate) fn specs(definitions: &[String], disabled: bool) -> Result<Vec<ProbeSpec>, WrongUsage> {
    definitions
        .iter()
        .map(|text| match definition::parse(text) {
            Ok(_) => Ok(ProbeSpec {
                definition: text.clone(),
                disabled,
            }),
            Err(error) if text.trim().is_empty() => {
                Err(WrongUsage(format!("bad definition: {error}")))
            }
            Err(error) => {
                let picture = error.render(text).replace('\n', "\n  ");
                Err(WrongUsage(format!("bad definition: {error}\n  {picture}")))
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caret_stands_under_the_offending_column() {
        let error = specs(&["p vfs_read".into(), "p vfs_read+".into()], false).unwrap_err();
        let lines: Vec<_> = error.0.lines().collect();
        assert_eq!(
            lines.get(1..),
            Some(&["  p vfs_read+", "             ^"][..])
        );
    }

    #[test]
    fn good_definitions_are_sent_as_they_were_typed() {
        let specs = specs(&["p:r  vfs_read".into()], true).unwrap();
        assert_eq!(specs[0].definition, "p:r  vfs_read");
        assert!(specs[0].disabled);
    }
}
