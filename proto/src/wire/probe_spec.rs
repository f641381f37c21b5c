//! Requests to register probes.
//!
//! Invariant: the limits of a request are checked, and all of it is parsed, before any of its probes is registered.
//! A refusal has the index of the entry that is to blame and, if its definition cannot be parsed, the column.

use hvprobe_spec::definition::{self, Target};
use hvprobe_spec::{Actions, Budget, Mechanism, ProbeSpec};

use super::enums::WireEnum as _;
use super::meaningless::Meaningless;
use super::value::Wire as _;
use crate::failure::Failure;
use crate::limits;
use crate::v1::{self, ErrorKind};

/// Checks the number and the lengths of `probes` without parsing them, so that a request that is too long neither
/// waits nor makes others wait.
///
/// # Errors
/// When there are too many, or one is too long.
pub fn bounded(probes: &[v1::ProbeSpec]) -> Result<(), Failure> {
    limits::at_most("the number of probes", probes.len(), limits::BATCH)?;
    let mut definitions = probes.iter().map(|probe| probe.definition.len());
    definitions.try_for_each(|length| limits::at_most("a definition", length, limits::DEFINITION))
}

/// Parses the requested probes, all or none.
///
/// # Errors
/// When a limit is exceeded, or a probe is invalid. The error has the probe's index and, if its definition cannot
/// be parsed, the column.
pub fn specs(probes: Vec<v1::ProbeSpec>) -> Result<Vec<ProbeSpec>, Failure> {
    bounded(&probes)?;
    let mut specs = Vec::with_capacity(probes.len());
    for (index, probe) in probes.into_iter().enumerate() {
        let definition = definition::parse(&probe.definition).map_err(|error| {
            let message = format!("probe {index}, column {}: {error}", error.column);
            Failure::invalid(ErrorKind::Definition, message)
                .at_index(index)
                .at_column(error.column)
        })?;
        let bad = |error: Meaningless| {
            let message = format!("probe {index} ({definition}): {error}");
            Failure::invalid(ErrorKind::BadActions, message).at_index(index)
        };
        if let Some(id) = &probe.module_build_id {
            let names_one = matches!(
                definition.target,
                Target::Symbol {
                    module: Some(_),
                    ..
                }
            );
            if !names_one || !(1..=limits::BUILD_ID).contains(&id.len()) {
                let message = format!(
                    "probe {index} ({definition}): module_build_id has 1 to {} bytes, and goes with \
                     MODULE:SYMBOL",
                    limits::BUILD_ID
                );
                return Err(Failure::invalid(ErrorKind::Definition, message).at_index(index));
            }
        }
        specs.push(ProbeSpec {
            mechanism: Mechanism::numbered(probe.mechanism).map_err(bad)?,
            actions: Actions::from_wire(probe.actions.unwrap_or_default()).map_err(bad)?,
            disabled: probe.disabled,
            maxactive_auto: probe.maxactive_auto,
            default_arguments: probe.default_arguments,
            module_build_id: probe.module_build_id,
            budget: probe
                .budget
                .map(Budget::from_wire)
                .transpose()
                .map_err(bad)?,
            definition,
        });
    }
    Ok(specs)
}

#[cfg(test)]
mod tests {
    use tonic::{Code, Status};

    use super::*;

    fn read(definitions: &[&str]) -> Result<Vec<ProbeSpec>, Status> {
        let probes = definitions.iter().map(|definition| v1::ProbeSpec {
            definition: (*definition).to_owned(),
            disabled: true,
            ..Default::default()
        });
        Ok(specs(probes.collect())?)
    }

    #[test]
    fn definitions_keep_their_order_and_flags() {
        let specs = read(&["p vfs_read", "p:w vfs_write+4"]).unwrap();
        let texts: Vec<_> = specs
            .iter()
            .map(|spec| spec.definition.to_string())
            .collect();
        assert_eq!(texts, ["p vfs_read", "p:w vfs_write+0x4"]);
        assert!(specs.iter().all(|spec| spec.disabled));
    }

    #[test]
    fn builds_are_those_of_a_module_that_is_named() {
        let read = |definition: &str, len| {
            let spec = v1::ProbeSpec {
                definition: definition.to_owned(),
                module_build_id: Some(vec![7; len]),
                ..Default::default()
            };
            specs(vec![spec]).map_err(Status::from)
        };
        let spec = read("p ext4:ext4_sync_fs", 20).unwrap().remove(0);
        assert_eq!(spec.module_build_id, Some(vec![7; 20]));
        for (definition, len) in [
            ("p ext4:ext4_sync_fs", 0),
            ("p ext4:ext4_sync_fs", limits::BUILD_ID + 1),
            ("p vfs_read", 20),
            ("p 0xffffffff81000000", 20),
            ("p ext4:ext4_*", 20),
        ] {
            let status = read(definition, len).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{definition}");
            assert!(
                status.message().contains("goes with MODULE:SYMBOL"),
                "{status}"
            );
        }
    }

    #[test]
    fn bad_definition_and_oversized_batch_are_refused() {
        assert_eq!(
            read(&["p a", "p"]).unwrap_err().code(),
            Code::InvalidArgument
        );
        let many = vec!["p a"; limits::BATCH + 1];
        assert_eq!(read(&many).unwrap_err().code(), Code::InvalidArgument);
        let long = format!("p {}", "a".repeat(limits::DEFINITION));
        assert_eq!(read(&[&long]).unwrap_err().code(), Code::InvalidArgument);
        // These errors are found without parsing any definition.
        let spec = |definition: &str| v1::ProbeSpec {
            definition: definition.to_owned(),
            ..Default::default()
        };
        assert!(bounded(&vec![spec(""); limits::BATCH]).is_ok());
        assert!(bounded(&vec![spec(""); limits::BATCH + 1]).is_err());
        assert!(bounded(&[spec(""), spec(&long)]).is_err());
    }
}
