//! Probe definitions. They are parsed before they are sent, so that an error can point at the mistake.

use std::collections::HashMap;
use std::path::PathBuf;

use hvprobe_proto::v1::ProbeSpec;
use hvprobe_spec::ParseError;
use hvprobe_spec::definition;
use hvprobe_spec::perf_probe::{PerfProbe, is_perf_probe};

use super::events_file::{self, FileHistogram};
use crate::failure::typed::bad;
use crate::failure::{Origins, WrongUsage};
use crate::options::probes::hits::{HitArgs, HoldArgs, Unnamed};

/// Definitions in the form that is sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Definitions {
    pub(crate) texts: Vec<String>,
    /// Build id of the module, for each definition that is valid for one build of its module only.
    pub(crate) builds: HashMap<String, Vec<u8>>,
    /// Text that the user typed, for each definition that was generated from such text.
    pub(crate) origins: Origins,
}

impl From<Vec<String>> for Definitions {
    fn from(texts: Vec<String>) -> Self {
        Self {
            texts,
            ..Self::default()
        }
    }
}

/// Returns the specifications of `definitions` and of the definitions in `files`, and the histograms in `files`.
/// The other options are the same for all probes.
pub(crate) fn specs(
    definitions: &Definitions,
    files: &[PathBuf],
    disabled: bool,
    hit: &HitArgs,
    hold: &HoldArgs,
) -> Result<(Vec<ProbeSpec>, Vec<FileHistogram>), WrongUsage> {
    let (mut wanted, mut histograms) = (Vec::new(), Vec::new());
    for text in &definitions.texts {
        let read = definition::parse(text);
        let read = read.map_err(|error| bad_definition(text, &error, &definitions.origins))?;
        wanted.push((text.clone(), read));
    }
    for file in files {
        let (definitions, counted) = events_file::read(file)?;
        wanted.extend(definitions);
        histograms.extend(counted);
    }
    let specs: Result<_, _> = wanted
        .into_iter()
        .map(|(text, definition)| {
            let mut hit = hit.clone();
            let is_counted = histograms.iter().any(|it| it.is_of(&definition));
            let by_stack = histograms.iter().any(|it| it.needs_stacks(&definition));
            hit.acts.count(is_counted, by_stack);
            Ok(ProbeSpec {
                disabled,
                module_build_id: definitions.builds.get(&text).cloned(),
                ..hit.spec(hold, &text, definition, Unnamed::Defaults)?
            })
        })
        .collect();
    Ok((specs?, histograms))
}

/// Returns the error for the bad definition `text`. If `text` is valid for `perf probe`, the error names the option
/// that is missing for that.
fn bad_definition(text: &str, error: &ParseError, origins: &Origins) -> WrongUsage {
    if origins.has(text) {
        let picture = origins.render(text, error).replace('\n', "\n  ");
        return WrongUsage(format!("bad definition: {error}\n  {picture}"));
    }
    let wrong = bad("definition", text, error);
    match is_perf_probe(text) && PerfProbe::parse(text).is_ok() {
        true => WrongUsage(format!(
            "{}\n`perf probe` takes that: give --debug-info, or begin with `p` or `r`",
            wrong.0
        )),
        false => wrong,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(definitions: &[&str]) -> Result<Vec<ProbeSpec>, WrongUsage> {
        let definitions: Vec<String> = definitions.iter().map(|&text| text.to_owned()).collect();
        specs(
            &definitions.into(),
            &[],
            true,
            &HitArgs::default(),
            &HoldArgs::default(),
        )
        .map(|(specs, _)| specs)
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

    #[test]
    fn events_that_a_file_counts_by_their_stacks_record_them() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("events");
        let text = "p:a vfs_open\np:b vfs_read\nevents/kprobes/b/trigger:hist:keys=stacktrace\n";
        std::fs::write(&file, text).unwrap();
        let (hit, hold) = (HitArgs::default(), HoldArgs::default());
        let (specs, _) = specs(&Definitions::default(), &[file], false, &hit, &hold).unwrap();
        let items = specs.iter().map(|spec| {
            let actions = spec.actions.as_ref();
            actions.map_or(0, |actions| actions.capture.len())
        });
        assert_eq!(items.collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn lines_of_a_file_come_behind_what_was_typed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("events");
        std::fs::write(&file, "p:g/e  vfs_open x=%di # why\nr4 vfs_read\n").unwrap();
        let (hit, hold) = (HitArgs::default(), HoldArgs::default());
        let (specs, _) =
            specs(&vec!["p a".to_owned()].into(), &[file], false, &hit, &hold).unwrap();
        let definitions: Vec<_> = specs.into_iter().map(|spec| spec.definition).collect();
        assert_eq!(definitions, ["p a", "p:g/e vfs_open x=%di", "r4 vfs_read"]);
    }
}
