//! A job of a rig: programs, files, and the steps that run them.

use std::ffi::OsString;
use std::io::{IsTerminal, stdout};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cargo::{Executable, PACKED};
use crate::image;
use crate::kind::Kind;

/// The name of cargo among a job's programs.
pub(crate) const CARGO: &str = "cargo";

/// The name of the lab itself among a job's programs.
pub(crate) const LAB: &str = "lab";

/// Kind of a step's standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stdio {
    /// No input; output into a pipe.
    Plain,
    /// No input; output to a terminal.
    Terminal,
    /// A terminal, on which a user or a program types.
    Interactive,
}

impl Stdio {
    /// Returns the streams that suit a program whose output goes to the lab's stdout.
    pub(crate) fn of_stdout() -> Self {
        if stdout().is_terminal() {
            Self::Terminal
        } else {
            Self::Plain
        }
    }
}

/// One program to run.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// The program's name in the rig's `/bin`.
    pub(crate) program: String,
    pub(crate) arguments: Vec<OsString>,
    /// The tests that the arguments select, if these are not all tests of the program.
    pub(crate) group: Option<Group>,
    /// Folder of the package that the program tests. On this machine it is the program's working folder.
    pub(crate) package: Option<PathBuf>,
}

impl Step {
    /// Creates a step that is not a group of tests.
    pub(crate) fn new(program: &str, arguments: impl IntoIterator<Item: Into<OsString>>) -> Self {
        Self {
            program: program.to_owned(),
            arguments: arguments.into_iter().map(Into::into).collect(),
            group: None,
            package: None,
        }
    }

    /// Returns the name that the lab prints for the step.
    pub(crate) fn name(&self) -> String {
        match &self.group {
            Some(group) if !group.name.is_empty() => format!("{}: {}", self.program, group.name),
            None if !self.is_tests() => {
                let arguments = self.arguments.iter().map(|it| it.to_string_lossy());
                [self.program.as_str().into()]
                    .into_iter()
                    .chain(arguments)
                    .collect::<Vec<_>>()
                    .join(" ")
            }
            _ => self.program.clone(),
        }
    }

    /// Returns whether the program of the step prints what libtest prints.
    pub(crate) fn is_tests(&self) -> bool {
        self.program != LAB
    }
}

/// Tests of one program that run in one process, one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// Common beginning of the tests' names.
    pub(crate) name: String,
    pub(crate) tests: Vec<String>,
    /// Whether the tests need the machine for themselves.
    pub(crate) is_alone: bool,
}

/// A file of this machine that tests read.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    /// Environment variable with the file's path.
    pub(crate) variable: &'static str,
    /// The file's path in an emulated rig, without the leading slash.
    pub(crate) in_rig: &'static str,
    pub(crate) source: PathBuf,
}

/// Everything that one start of a rig does.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Programs besides busybox, by their names in `/bin`.
    pub(crate) programs: Vec<(String, PathBuf)>,
    /// Other files, by their name in the rig, without the leading slash.
    pub(crate) files: Vec<(String, PathBuf)>,
    /// Steps, which run one after another, even after one has failed.
    pub(crate) steps: Vec<Step>,
    pub(crate) environment: Vec<(String, OsString)>,
    pub(crate) stdio: Stdio,
    /// Whether the lab reads the output. If not, a program on this machine writes to the lab's own stdout and
    /// stderr.
    pub(crate) captured: bool,
    /// Number of CPUs of the rig; `None` for the rig's default.
    pub(crate) cpus: Option<u32>,
    /// Memory of the rig in MiB; `None` for the rig's default.
    pub(crate) memory: Option<u32>,
    /// TCP port of this machine's loopback address that leads to the same port of the rig.
    pub(crate) forward: Option<u16>,
    /// Time limit for the whole run, including the boot of the rig.
    pub(crate) timeout: Duration,
    /// Maximum time without output, after which the rig counts as hung.
    pub(crate) silence: Option<Duration>,
    /// Time limit of a test on this machine. A test that exceeds the limit has failed, and its stacks are
    /// shown.
    pub(crate) test_limit: Option<Duration>,
    /// Whether to keep log and images even if nothing failed.
    pub(crate) keep: bool,
}

impl Job {
    /// Creates a job without steps, with the [`PACKED`] programs among `built`.
    pub(crate) fn new(built: &[Executable], timeout: Duration) -> Self {
        Self {
            programs: built
                .iter()
                .filter(|executable| !executable.test)
                .filter(|executable| PACKED.contains(&executable.name.as_str()))
                .map(|executable| (executable.name.clone(), executable.path.clone()))
                .collect(),
            files: Vec::new(),
            steps: Vec::new(),
            environment: Vec::new(),
            stdio: Stdio::Plain,
            captured: false,
            cpus: None,
            memory: None,
            forward: None,
            timeout,
            silence: None,
            test_limit: None,
            keep: false,
        }
    }

    /// Makes `input` available to the steps, which run in `rig`.
    pub(crate) fn give(&mut self, input: &Input, rig: Kind) {
        let place = match rig.is_emulated() {
            true => {
                self.files
                    .push((input.in_rig.to_owned(), input.source.clone()));
                Path::new("/").join(input.in_rig)
            }
            false => input.source.clone(),
        };
        self.environment
            .push((input.variable.to_owned(), place.into()));
    }

    /// Finds what the user means by `program`: a program of this workspace, a file of this machine (if there is
    /// a slash in it), or a busybox applet. Returns its name in the rig.
    pub(crate) fn resolve(&mut self, program: &str) -> Result<String> {
        if program.contains('/') {
            let path = Path::new(program);
            if !path.is_file() {
                bail!("there is no program {program}");
            }
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .with_context(|| format!("{program} has no usable file name"))?;
            if self.programs.iter().all(|(packed, _)| packed != name) {
                self.programs.push((name.to_owned(), path.canonicalize()?));
            }
            return Ok(name.to_owned());
        }
        let applets = image::applets()?;
        if self.programs.iter().any(|(name, _)| name == program)
            || applets.iter().any(|applet| applet == program)
        {
            return Ok(program.to_owned());
        }
        let ours: Vec<&str> = self
            .programs
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        bail!(
            "no program `{program}`: give one of {}, a busybox applet, or a path with a slash in it",
            ours.join(", ")
        );
    }
}
