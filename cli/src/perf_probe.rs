//! What debug information is good for: probes as `perf probe` defines them, which are made into definitions before
//! anything else looks at those, and lines in stacks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use hvprobe_server::{Kernel, Sources, SourcesError};
use hvprobe_spec::language::text::hex;
use hvprobe_spec::perf_probe::{PerfProbe, is_perf_probe};
use tracing::info;

use crate::client::Client;
use crate::output;
use crate::output::lines::Lines;
use crate::typed::bad;

/// Where lines of sources and their variables are known from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct DebugArgs {
    /// vmlinux with the debug information (DWARF) of the guest's kernel. Stacks are shown with lines of its
    /// sources then, and probes can be defined as for `perf probe`, too: `[EVENT=]FUNC[@SRC][:LINE|+OFFSET|%return|;TEXT] [ARGUMENT...]`, `[EVENT=]SRC(:LINE|;TEXT) ...`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    debug_info: Option<PathBuf>,

    /// Folder with the sources of that kernel, in which `;TEXT` looks for lines
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "debug_info")]
    source: Option<PathBuf>,
}

impl DebugArgs {
    /// `definitions` for the kernel at the path that `kernel` tells, which is asked for only if there is debug
    /// information; and the lines of that kernel.
    pub(crate) fn of_kernel(
        &self,
        definitions: Vec<String>,
        kernel: impl FnOnce() -> anyhow::Result<PathBuf>,
    ) -> anyhow::Result<(Vec<String>, Option<Lines>)> {
        let Some(file) = &self.debug_info else {
            return Ok((definitions, None));
        };
        let sources = open(&open_kernel(&kernel()?)?, file)?;
        let definitions = self.expand(definitions, &sources)?;
        Ok((definitions, Some(Lines::new(sources))))
    }

    /// `definitions` for whichever kernel the debug information is of, which a machine has to have then.
    pub(crate) fn of_any(&self, definitions: Vec<String>) -> anyhow::Result<Made> {
        let Some(file) = &self.debug_info else {
            let theirs = Theirs::default();
            return Ok(Made {
                definitions,
                theirs,
            });
        };
        // The file is the kernel, too, with everything that was stripped from the other one.
        let sources = open(&open_kernel(file)?, file)?;
        let definitions = self.expand(definitions, &sources)?;
        let kernel = TheirKernel {
            file: file.to_owned(),
            build_id: sources.build_id().to_owned(),
        };
        let theirs = Theirs {
            kernel: Some(kernel),
            lines: Some(Lines::new(sources)),
        };
        Ok(Made {
            definitions,
            theirs,
        })
    }

    /// `definitions`, those as perf has them made into what they stand for.
    fn expand(&self, definitions: Vec<String>, sources: &Sources) -> anyhow::Result<Vec<String>> {
        let mut all = Vec::new();
        for text in definitions {
            if !is_perf_probe(&text) {
                all.push(text);
                continue;
            }
            let probe =
                PerfProbe::parse(&text).map_err(|error| bad("definition", &text, &error))?;
            let made = sources
                .definitions(&probe, self.source.as_deref())
                .map_err(|error| match error {
                    SourcesError::Definition(error) => bad("definition", &text, &error).into(),
                    error => anyhow::Error::from(error),
                })?;
            for left_out in &made.left_out {
                output::tell(format_args!("{text}: left out: {left_out}"));
            }
            for line in &made.lines {
                info!(definition = line, "made of a probe as perf has it");
            }
            all.extend(made.lines);
        }
        Ok(all)
    }
}

/// Definitions, and what they were made with.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) definitions: Vec<String>,
    pub(crate) theirs: Theirs,
}

/// What is known of a machine's kernel from a file, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Theirs {
    kernel: Option<TheirKernel>,
    lines: Option<Lines>,
}

impl Theirs {
    /// Has stacks of `machine` shown with lines, if it has that kernel; otherwise it is refused.
    pub(crate) async fn give(self, client: &mut Client, machine: &str) -> anyhow::Result<()> {
        if let Some(kernel) = self.kernel {
            kernel.check(client, machine).await?;
        }
        client.lines = self.lines.map(Arc::new);
        Ok(())
    }
}

/// The kernel that debug information is of.
#[derive(Debug)]
struct TheirKernel {
    file: PathBuf,
    build_id: Vec<u8>,
}

impl TheirKernel {
    /// Refuses a machine that has another one.
    async fn check(&self, client: &mut Client, machine: &str) -> anyhow::Result<()> {
        let shown = client.get_machine(machine.to_owned()).await?;
        match shown.kernel_build_id {
            Some(own) if own == self.build_id => Ok(()),
            Some(own) => bail!(
                "cannot use {}: its build id is {}, that of {machine}'s kernel {}",
                self.file.display(),
                hex(&self.build_id),
                hex(&own)
            ),
            None => bail!(
                "cannot use {}: {machine} tells no build id of its kernel",
                self.file.display()
            ),
        }
    }
}

/// The kernel in the file at `path`.
pub(crate) fn open_kernel(path: &Path) -> anyhow::Result<Kernel> {
    Kernel::open(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The debug information in `file`, for `kernel`.
pub(crate) fn open(kernel: &Kernel, file: &Path) -> anyhow::Result<Sources> {
    Sources::open(kernel, file).with_context(|| format!("cannot use {}", file.display()))
}
