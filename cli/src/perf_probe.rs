//! Uses of debug information: probes in the syntax of `perf probe`, which are converted to definitions before
//! anything else reads them, and source lines in stacks.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use hvprobe_server::{Indexes, Kernel, Sources, SourcesError};
use hvprobe_spec::ParseError;
use hvprobe_spec::language::text::hex;
use hvprobe_spec::perf_probe::{PerfProbe, is_perf_probe};
use tracing::info;

use crate::client::Client;
use crate::definition::Definitions;
use crate::failure::WrongUsage;
use crate::guest;
use crate::output;
use crate::output::lines::Lines;
use crate::typed::bad;

/// Sources of line numbers and variables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct DebugArgs {
    /// vmlinux with the debug information (DWARF) of the guest's kernel, or the file of a module with its own;
    /// repeatable. Stacks then show source lines of the kernel, and probes can also be defined as for `perf
    /// probe`: `[EVENT=]FUNC[@SRC][:LINE|+OFFSET|%return|;TEXT] [ARGUMENT...]`, `[EVENT=]SRC(:LINE|;TEXT) ...`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    debug_info: Vec<PathBuf>,

    /// Folder with the sources of that kernel, in which `;TEXT` looks for lines
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "debug_info")]
    source: Option<PathBuf>,
}

/// Debug information in the opened files.
#[derive(Debug, Default)]
struct Opened<'a> {
    kernel: Option<(&'a Path, Sources)>,
    modules: Vec<(&'a Path, Sources)>,
}

impl DebugArgs {
    /// Converts `definitions` for the kernel at the path that `kernel` returns, and also returns the source
    /// lines. `kernel` is called only if there is debug information of a kernel.
    pub(crate) fn of_kernel(
        &self,
        definitions: Vec<String>,
        kernel: impl Fn() -> anyhow::Result<PathBuf>,
    ) -> anyhow::Result<(Definitions, Option<Lines>)> {
        let opened = self.open(|_| open_kernel(&kernel()?))?;
        let definitions = self.expand(definitions, &opened)?;
        Ok((definitions, opened.lines()))
    }

    /// Converts `definitions` for the kernel of the debug information, which the machine must run then.
    pub(crate) fn of_any(&self, definitions: Vec<String>) -> anyhow::Result<Made> {
        // The file also serves as the kernel image: it contains everything that was stripped from the image.
        let opened = self.open(open_kernel)?;
        let definitions = self.expand(definitions, &opened)?;
        let kernel = opened.kernel.as_ref().map(|(file, sources)| TheirKernel {
            file: (*file).to_owned(),
            build_id: sources.build_id().to_owned(),
        });
        let lines = opened.lines();
        Ok(Made {
            definitions,
            theirs: Theirs { kernel, lines },
        })
    }

    /// Opens the files. A file with a kernel's debug information is for the kernel that `kernel` returns.
    fn open(&self, kernel: impl Fn(&Path) -> anyhow::Result<Kernel>) -> anyhow::Result<Opened<'_>> {
        let mut opened = Opened::default();
        for file in &self.debug_info {
            if let Some(module) = open_module(file)? {
                opened.modules.push((file, module));
                continue;
            }
            if let Some((other, _)) = &opened.kernel {
                let (other, file) = (other.display(), file.display());
                let message = format!("--debug-info: {other} and {file} are both of a kernel");
                return Err(WrongUsage(message).into());
            }
            opened.kernel = Some((file, open(&kernel(file)?, file)?));
        }
        Ok(opened)
    }

    /// Converts definitions in the syntax of `perf probe`; keeps the others.
    fn expand(&self, texts: Vec<String>, opened: &Opened<'_>) -> anyhow::Result<Definitions> {
        let mut all = Definitions::default();
        for text in texts {
            // Without debug information the parser of definitions refuses them later.
            if self.debug_info.is_empty() || !is_perf_probe(&text) {
                all.texts.push(text);
                continue;
            }
            let probe =
                PerfProbe::parse(&text).map_err(|error| bad("definition", &text, &error))?;
            let sources = opened.that_knows(&text, &probe)?;
            let made = sources
                .definitions(&probe, self.source.as_deref())
                .map_err(|error| match error {
                    SourcesError::Definition(error) => bad("definition", &text, &error).into(),
                    error => anyhow::Error::from(error),
                })?;
            for left_out in &made.left_out {
                output::notice(format_args!("{text}: left out: {left_out}"));
            }
            for line in &made.lines {
                info!(definition = line, "made of a probe as perf has it");
                if sources.module().is_some() {
                    let build_id = sources.build_id().to_owned();
                    all.builds.insert(line.clone(), build_id);
                }
                all.origins.add(line.clone(), text.clone());
            }
            all.texts.extend(made.lines);
        }
        Ok(all)
    }
}

impl Opened<'_> {
    /// Returns the debug information that contains the place of `probe`, which was written as `text`.
    fn that_knows(&self, text: &str, probe: &PerfProbe) -> anyhow::Result<&Sources> {
        let all: Vec<_> = self.kernel.iter().chain(&self.modules).collect();
        let mut knowing = Vec::new();
        for (file, sources) in &all {
            if all.len() == 1 || sources.knows(&probe.point)? {
                knowing.push((file, sources));
            }
        }
        match (knowing.as_slice(), all.first()) {
            ([(_, sources)], _) => Ok(sources),
            // The first file produces the error about the missing place.
            ([], Some((_, first))) => Ok(first),
            (several, _) => {
                let files: Vec<_> = several
                    .iter()
                    .map(|(it, _)| it.display().to_string())
                    .collect();
                let message = format!("it is in {}: give only one of them", files.join(" and in "));
                let error = ParseError {
                    column: probe.column.0,
                    message,
                };
                Err(bad("definition", text, &error).into())
            }
        }
    }

    /// Returns the source lines of the kernel and of the modules, if there are any.
    fn lines(self) -> Option<Lines> {
        let kernel = self.kernel.map(|(_, sources)| sources);
        let modules: Vec<_> = self
            .modules
            .into_iter()
            .map(|(_, sources)| sources)
            .collect();
        let is_any = kernel.is_some() || !modules.is_empty();
        is_any.then(|| Lines::new(kernel, modules))
    }
}

/// Converted definitions, with the debug information that they were made from.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) definitions: Definitions,
    pub(crate) theirs: Theirs,
}

/// Debug information for a machine's kernel and modules, if any.
#[derive(Debug, Default)]
pub(crate) struct Theirs {
    kernel: Option<TheirKernel>,
    lines: Option<Lines>,
}

impl Theirs {
    /// Checks that `machine` runs the kernel of the debug information, then adds source lines to stacks.
    pub(crate) async fn give(self, client: &mut Client, machine: &str) -> anyhow::Result<()> {
        if let Some(kernel) = self.kernel {
            kernel.check(client, machine).await?;
        }
        client.lines = self.lines.map(Arc::new);
        Ok(())
    }
}

/// Kernel that the debug information describes.
#[derive(Debug)]
struct TheirKernel {
    file: PathBuf,
    build_id: Vec<u8>,
}

impl TheirKernel {
    /// Returns an error if the machine runs another kernel.
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
                "cannot use {}: {machine} does not report its kernel's build id",
                self.file.display()
            ),
        }
    }
}

/// Opens the kernel in the file at `path`.
pub(crate) fn open_kernel(path: &Path) -> anyhow::Result<Kernel> {
    Kernel::open(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the debug information in `file` if it is a module's.
pub(crate) fn open_module(file: &Path) -> anyhow::Result<Option<Sources>> {
    fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?;
    Sources::open_module(file).with_context(|| format!("cannot use {}", file.display()))
}

/// Returns the stored indexes of debug information.
pub(crate) fn indexes() -> Option<Indexes> {
    Some(Indexes::new(guest::cache()?.join("debug-info")))
}

/// Opens the debug information in `file`, for `kernel`.
pub(crate) fn open(kernel: &Kernel, file: &Path) -> anyhow::Result<Sources> {
    Sources::open(kernel, file, indexes().as_ref())
        .with_context(|| format!("cannot use {}", file.display()))
}
