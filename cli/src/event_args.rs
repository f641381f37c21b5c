//! Options that say which events are wanted, and how and where they are printed.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use hvprobe_proto::v1::SubscribeRequest;
use hvprobe_spec::fetch::read_filter;

use crate::failure::{Refused, WrongUsage, mistake};
use crate::output::times::TimeFormat;
use crate::typed::{self, bad_option};

/// Which events.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Events")]
pub(crate) struct WantedArgs {
    /// Only events of this thread; repeatable, as are --tgid and --comm; an event must match each kind of
    /// option given
    #[arg(long = "pid", value_name = "N", conflicts_with_all = ["hist", "folded", "flame", "ScriptArgs"])]
    pids: Vec<i32>,

    /// Only events of this process
    #[arg(long = "tgid", value_name = "N", conflicts_with_all = ["hist", "folded", "flame", "ScriptArgs"])]
    tgids: Vec<i32>,

    /// Only events of tasks of this name
    #[arg(long = "comm", value_name = "NAME", conflicts_with_all = ["hist", "folded", "flame", "ScriptArgs"])]
    comms: Vec<String>,

    /// Only events that match this expression over `pid`, `tgid`, `comm` and `cpu`, as after `if` in a
    /// definition
    #[arg(long, value_name = "EXPR", conflicts_with_all = ["hist", "folded", "flame", "ScriptArgs"])]
    filter: Option<String>,
}

impl WantedArgs {
    /// Checks the syntax of the filter; the error points at the mistake.
    pub(crate) fn check(&self) -> Result<(), WrongUsage> {
        typed::one("filter", self.filter.as_deref(), read_filter).map(|_| ())
    }

    /// Returns a request for these events of `probes` on `machine`.
    pub(crate) fn request(&self, machine: &str, probes: Vec<u32>) -> SubscribeRequest {
        let comms = self.comms.iter();
        SubscribeRequest {
            machine: machine.to_owned(),
            probes,
            pids: self.pids.clone(),
            tgids: self.tgids.clone(),
            comms: comms.map(|comm| comm.clone().into_bytes()).collect(),
            filter: self.filter.clone().unwrap_or_default(),
            ..Default::default()
        }
    }

    /// Returns the error for a request that the server refused. It points at the mistake in the filter if the
    /// server reports one.
    pub(crate) fn refused(&self, status: tonic::Status) -> anyhow::Error {
        match (&self.filter, mistake(&status)) {
            (Some(text), Some(mut error)) => {
                // `bad_option` adds the prefix itself.
                if let Some(message) = error.message.strip_prefix("bad filter: ") {
                    error.message = message.to_owned();
                }
                bad_option("filter", text, &error).into()
            }
            _ => Refused::from(status).into(),
        }
    }
}

/// How and where events are printed.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Format of times; JSON contains both of the first two
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t,
        conflicts_with_all = ["json", "hist", "folded", "flame"]
    )]
    pub(crate) time: TimeFormat,

    /// Write the trace into this file, replacing it, instead of printing it
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["hist", "folded", "flame"])]
    output: Option<PathBuf>,
}

impl OutputArgs {
    /// Opens the file that replaces standard output, if one was asked for.
    pub(crate) fn open(&self) -> Result<Option<OutputFile>, Unwritten> {
        let Some(path) = &self.output else {
            return Ok(None);
        };
        let file = File::create(path).map_err(|error| Unwritten::new(path, error))?;
        Ok(Some(OutputFile {
            path: path.clone(),
            file,
        }))
    }
}

/// File that events are written to.
#[derive(Debug)]
pub(crate) struct OutputFile {
    path: PathBuf,
    file: File,
}

impl OutputFile {
    /// Appends `text` without buffering.
    pub(crate) fn write(&mut self, text: &str) -> Result<(), Unwritten> {
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|error| Unwritten::new(&self.path, error))
    }
}

/// Error of a write to the requested file. A reader of a pipe that has gone away is an error too, whereas on
/// standard output it counts as one that has seen enough.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {why}", path.display())]
pub(crate) struct Unwritten {
    path: PathBuf,
    why: io::Error,
}

impl Unwritten {
    /// Makes an error from `path` and the cause.
    pub(crate) fn new(path: &Path, why: io::Error) -> Self {
        Self {
            path: path.to_owned(),
            why,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::closed_output;

    #[test]
    fn full_disk_and_a_reader_that_has_gone_are_reported() {
        let to = |path: &Path| OutputArgs {
            output: Some(path.to_owned()),
            ..OutputArgs::default()
        };
        let full = Path::new("/dev/full");
        let mut file = to(full).open().unwrap().expect("a file");
        let error = file.write("x").unwrap_err().to_string();
        assert_eq!(
            error,
            "cannot write /dev/full: No space left on device (os error 28)"
        );

        let (reader, writer) = io::pipe().unwrap();
        let mut pipe = OutputFile {
            path: "events".into(),
            file: File::from(std::os::fd::OwnedFd::from(writer)),
        };
        drop(reader);
        let error = anyhow::Error::from(pipe.write("x").unwrap_err());
        assert!(!closed_output(&error), "{error}");
        assert!(error.to_string().starts_with("cannot write events: "));

        let nowhere = to(Path::new("/nowhere/events")).open().unwrap_err();
        assert!(nowhere.to_string().contains("No such file"), "{nowhere}");
    }
}
