//! A script as the user wrote it: its parts, its probes, and errors that point into it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use hvprobe_proto::detail;
use hvprobe_proto::v1::ProbeSpec;
use hvprobe_spec::ParseError;
use hvprobe_spec::definition::{FileError, Kind, Target};
use hvprobe_spec::script::{Planted, Program, SCRIPT_MAX, Written, compile, in_line, read_script};

use crate::failure::typed::bad;
use crate::failure::{Refused, WrongUsage};
use crate::options::probes::hits::{HitArgs, HoldArgs, Unnamed};
use crate::options::probes::script::ScriptArgs;

/// Script of the user.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    /// Compiled script.
    pub(crate) program: Program,
    /// Text of all parts.
    text: String,
    /// Parts of the text: those of `-e` and the files. Each has the number of its first line, counted from 1.
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    line: usize,
    file: Option<PathBuf>,
}

impl Script {
    /// Reads and compiles the script, if one was given.
    pub(crate) fn read(args: &ScriptArgs) -> Result<Option<Self>, WrongUsage> {
        let mut script = Self {
            program: Program::default(),
            text: String::new(),
            parts: Vec::new(),
        };
        let typed = args.programs.iter().map(|text| Ok((None, text.clone())));
        let files = args.scripts.iter().map(|file| {
            let text = text(file)
                .map_err(|error| WrongUsage(format!("cannot read {}: {error}", file.display())))?;
            Ok((Some(file.clone()), text))
        });
        for part in typed.chain(files) {
            let (file, text) = part?;
            let line = script.text.matches('\n').count() + 1;
            script.parts.push(Part { line, file });
            // Each part must be a complete script.
            read_script(&text).map_err(|mut error| {
                error.number += line - 1;
                script.wrong(&error)
            })?;
            script.text.push_str(&text);
            script.text.push('\n');
        }
        if script.parts.is_empty() {
            return Ok(None);
        }
        let read = read_script(&script.text);
        let compiled = read.and_then(|read| compile(&script.text, &read));
        script.program = compiled.map_err(|error| script.wrong(&error))?;
        Ok(Some(script))
    }

    /// Returns the probes in the order of their registration. At a return, the probe that was registered last is
    /// hit first, as with kretprobes. So return probes are registered in reverse, and the clauses run in the order
    /// of the script.
    fn in_order(&self) -> impl Iterator<Item = (usize, &Planted)> {
        let returns =
            |(_, it): &(usize, &Planted)| matches!(it.definition.kind, Kind::Return { .. });
        let probes = || self.program.probes.iter().enumerate();
        let entries = probes().filter(move |it| !returns(it));
        entries.chain(probes().rev().filter(returns))
    }

    /// Returns the specifications of the probes.
    pub(crate) fn specs(
        &self,
        hit: &HitArgs,
        hold: &HoldArgs,
    ) -> Result<Vec<ProbeSpec>, WrongUsage> {
        let specs = self.in_order().map(|(_, planted)| {
            let mut hit = hit.clone();
            hit.acts
                .count(!self.program.maps.is_empty(), planted.stacks);
            let definition = planted.definition.clone();
            hit.spec(hold, &planted.written.text, definition, Unnamed::Nothing)
        });
        specs.collect()
    }

    /// Returns the position in the program of each registered probe, by its id. The arguments are from the answer
    /// to a request with all [`specs`](Self::specs): `ids`, and for each id the number of its entry in the request.
    pub(crate) fn positions(
        &self,
        ids: &[u32],
        entries: &[u32],
    ) -> anyhow::Result<HashMap<u32, usize>> {
        let (probes, known) = (ids.len(), entries.len());
        ensure!(
            probes == known,
            "the server has registered {probes} probes and named {known} of them"
        );
        let order: Vec<_> = self.in_order().map(|(position, _)| position).collect();
        let position = |(id, entry): (&u32, &u32)| {
            let found = usize::try_from(*entry).ok().and_then(|at| order.get(at));
            let found =
                found.with_context(|| format!("the server has registered no probe {entry}"));
            Ok((*id, *found?))
        };
        ids.iter().zip(entries).map(position).collect()
    }

    /// Returns whether the script has patterns. Functions of a pattern that cannot be probed are skipped, as in
    /// bpftrace.
    pub(crate) fn has_patterns(&self) -> bool {
        let mut probes = self.program.probes.iter();
        probes.any(|it| matches!(it.definition.target, Target::Functions { .. }))
    }

    /// Returns the error for refused probes. It points at the mistake if the server reports its position.
    pub(crate) fn refused(&self, status: tonic::Status) -> anyhow::Error {
        let detail = detail(&status);
        let number = |number: Option<u32>| number.and_then(|it| usize::try_from(it).ok());
        let index = number(detail.as_ref().and_then(|it| it.index));
        let probe = index.and_then(|index| self.in_order().nth(index));
        match (probe, number(detail.and_then(|it| it.column))) {
            (Some((_, probe)), column) => {
                // An error without a column is about the place of the probe.
                let column = column.unwrap_or(2);
                let message = Refused::from(status).to_string();
                let error = ParseError { column, message };
                self.wrong_in(&probe.written, error).into()
            }
            _ => Refused::from(status).into(),
        }
    }

    /// Returns the error for a mistake in text that was generated from the script. It points at the position in the
    /// script.
    pub(super) fn wrong_in(&self, written: &Written, error: ParseError) -> WrongUsage {
        self.wrong(&in_line(&self.text, written.in_script(error)))
    }

    /// Returns `error` as a mistake in the script: with the file and line of its part, or `-e`.
    fn wrong(&self, error: &FileError) -> WrongUsage {
        let mut parts = self.parts.iter().rev();
        let part = parts.find(|part| part.line <= error.number);
        let what = match part {
            Some(Part {
                line,
                file: Some(file),
            }) => format!("script in {}:{}", file.display(), error.number + 1 - line),
            _ => "-e".to_owned(),
        };
        bad(&what, &error.text, &error.source)
    }
}

/// Reads the text in `file`, at most one byte more than a script may have. The parser refuses a text of that
/// length.
fn text(file: &PathBuf) -> io::Result<String> {
    let mut text = String::new();
    let most = u64::try_from(SCRIPT_MAX).unwrap_or(u64::MAX);
    File::open(file)?.take(most + 1).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests;
