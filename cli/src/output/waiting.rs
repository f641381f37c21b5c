//! What probes that are not planted yet wait for.

use std::collections::BTreeMap;

use hvprobe_proto::v1::{Probe, ProbeState};
use hvprobe_spec::definition::{Target, parse};

use super::harmless;

/// What a probe waits for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Awaited {
    /// The kernel's text to be final.
    Kernel,
    /// This module to be loaded; the kernel, too, while it boots.
    Module(String),
}

/// What `probe` waits for, if it does.
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

/// A line for each thing that some of `probes` wait for.
pub(crate) fn lines(probes: &[Probe]) -> Vec<String> {
    let mut by_what: BTreeMap<Awaited, Vec<&str>> = BTreeMap::new();
    for probe in probes {
        if let Some(what) = awaited(probe) {
            by_what.entry(what).or_default().push(&probe.definition);
        }
    }
    let line = |(what, definitions): (Awaited, Vec<&str>)| {
        let what = match what {
            Awaited::Kernel => "the kernel to be up".to_owned(),
            Awaited::Module(name) => format!("module {name} to be loaded"),
        };
        match definitions.as_slice() {
            [one] => format!("`{}` waits for {what}", harmless(one.as_bytes())),
            several => format!("{} probes wait for {what}", several.len()),
        }
    };
    by_what.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_waited_for_is_told_once() {
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
            lines(&probes),
            [
                "3 probes wait for the kernel to be up",
                "`p dummy:dummy_setup` waits for module dummy to be loaded",
            ]
        );
        assert!(lines(&probes[1..2]).is_empty());
    }
}
