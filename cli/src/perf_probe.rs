//! Probes as `perf probe` defines them, made into definitions before anything else looks at those.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use hvprobe_server::{Kernel, Sources, SourcesError};
use hvprobe_spec::language::text::hex;
use hvprobe_spec::perf_probe::{PerfProbe, is_perf_probe};
use tracing::info;

use crate::client::Client;
use crate::output;
use crate::typed::bad;

/// Where lines of sources and their variables are known from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct DebugArgs {
    /// vmlinux with the debug information (DWARF) of the guest's kernel. Probes can then be defined as for
    /// `perf probe`, too: `[EVENT=]FUNC[@SRC][:LINE|+OFFSET|%return|;TEXT] [ARGUMENT...]`, `[EVENT=]SRC(:LINE|;TEXT) ...`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    debug_info: Option<PathBuf>,

    /// Folder with the sources of that kernel, in which `;TEXT` looks for lines
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "debug_info")]
    source: Option<PathBuf>,
}

impl DebugArgs {
    /// `definitions` for the kernel at the path that `kernel` tells, which is asked for only if it is needed.
    pub(crate) fn of_kernel(
        &self,
        definitions: Vec<String>,
        kernel: impl FnOnce() -> anyhow::Result<PathBuf>,
    ) -> anyhow::Result<Vec<String>> {
        let Some(file) = self.wanted(&definitions) else {
            return Ok(definitions);
        };
        let path = kernel()?;
        self.expand(definitions, &open(&open_kernel(&path)?, file)?)
    }

    /// `definitions` for whichever kernel the debug information is of, which a machine has to have then.
    pub(crate) fn of_any(&self, definitions: Vec<String>) -> anyhow::Result<Made> {
        let Some(file) = self.wanted(&definitions) else {
            return Ok(Made {
                definitions,
                kernel: None,
            });
        };
        // The file is the kernel, too, with everything that was stripped from the other one.
        let sources = open(&open_kernel(file)?, file)?;
        Ok(Made {
            definitions: self.expand(definitions, &sources)?,
            kernel: Some(TheirKernel {
                file: file.to_owned(),
                build_id: sources.build_id().to_owned(),
            }),
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

    /// The file, if one of `definitions` needs it.
    fn wanted(&self, definitions: &[String]) -> Option<&Path> {
        let file = self.debug_info.as_deref()?;
        definitions
            .iter()
            .any(|text| is_perf_probe(text))
            .then_some(file)
    }
}

/// Definitions, and the kernel that they are for, if they are for one only.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) definitions: Vec<String>,
    pub(crate) kernel: Option<TheirKernel>,
}

/// The kernel that definitions were made for.
#[derive(Debug)]
pub(crate) struct TheirKernel {
    file: PathBuf,
    build_id: Vec<u8>,
}

impl TheirKernel {
    /// Refuses a machine that has another one.
    pub(crate) async fn check(&self, client: &mut Client, machine: &str) -> anyhow::Result<()> {
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
