//! Conditions that pending probes wait for.

use std::collections::BTreeMap;

use hvprobe_proto::v1::{Probe, ProbeState};
use hvprobe_spec::definition::{Target, parse};

use super::printable::harmless;

/// Returns whether the kernel of a machine is up, judging by its `probes`: no probe is placed before that.
pub(crate) fn is_up(probes: &[Probe]) -> bool {
    probes
        .iter()
        .any(|probe| probe.state() == ProbeState::Placed)
}

/// Condition that a pending probe waits for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Awaited {
    /// The kernel's text is final.
    Kernel,
    /// This module is loaded. While the kernel boots, the kernel's text must also become final.
    Module(String),
}

/// Returns the condition that `probe` waits for, if it is pending.
pub(super) fn awaited(probe: &Probe) -> Option<Awaited> {
    if probe.state() != ProbeState::Pending {
        return None;
    }
    let target = parse(&probe.definition).ok().map(|it| it.target);
    Some(match target {
        Some(Target::Symbol {
            module: Some(module),
            ..
        }) => Awaited::Module(module),
        _ => Awaited::Kernel,
    })
}

/// Returns a line for each condition that some of `probes` wait for. `is_up` says whether the machine's kernel
/// is known to be up.
pub(crate) fn lines(probes: &[Probe], is_up: bool) -> Vec<String> {
    let mut by_what: BTreeMap<Awaited, Vec<&str>> = BTreeMap::new();
    for probe in probes {
        if let Some(what) = awaited(probe) {
            by_what.entry(what).or_default().push(&probe.definition);
        }
    }
    let line = |(what, definitions): (Awaited, Vec<&str>)| {
        let (one_does, several_do) = match what {
            // The client does not know what else the probe waits for.
            Awaited::Kernel if is_up => (
                "is not planted yet".to_owned(),
                "are not planted yet".to_owned(),
            ),
            Awaited::Kernel => (
                "waits for the kernel to be up".to_owned(),
                "wait for the kernel to be up".to_owned(),
            ),
            Awaited::Module(name) => (
                format!("waits for module {name} to be loaded"),
                format!("wait for module {name} to be loaded"),
            ),
        };
        match definitions.as_slice() {
            [one] => format!("`{}` {one_does}", harmless(one.as_bytes())),
            several => format!("{} probes {several_do}", several.len()),
        }
    };
    by_what.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_waited_for_is_reported_once() {
        let probe = |definition: &str, state: ProbeState| Probe {
            definition: definition.to_owned(),
            state: state.into(),
            ..Default::default()
        };
        let pending = |definition| probe(definition, ProbeState::Pending);
        let probes = [
            pending("p dummy:dummy_setup"),
            probe("p ext4:ext4_map_blocks", ProbeState::Placed),
            pending("p vfs_read"),
            pending("r vfs_read"),
            pending("p vmlinux:vfs_write"),
        ];
        assert_eq!(
            lines(&probes, false),
            [
                "3 probes wait for the kernel to be up",
                "`p dummy:dummy_setup` waits for module dummy to be loaded",
            ]
        );
        assert!(lines(&probes[1..2], true).is_empty());
        // Another probe of the machine is placed.
        assert!(is_up(&probes) && !is_up(&probes[2..]));
        assert_eq!(
            lines(&probes, true),
            [
                "3 probes are not planted yet",
                "`p dummy:dummy_setup` waits for module dummy to be loaded",
            ]
        );
        assert_eq!(
            lines(&probes[2..3], true),
            ["`p vfs_read` is not planted yet"]
        );
    }
}
