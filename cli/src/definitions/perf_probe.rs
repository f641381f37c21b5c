//! Probes in the syntax of `perf probe`. With the debug information that they need, they are converted to
//! definitions before anything else reads them.

use std::path::{Path, PathBuf};

use hvprobe_sources::{Sources, SourcesError};
use hvprobe_spec::ParseError;
use hvprobe_spec::perf_probe::{PerfProbe, is_perf_probe};
use hvprobe_vmlinux::Kernel;
use tracing::info;

use super::debug_info::{self, TheirKernel, Theirs, open_kernel};
use super::probes::Definitions;
use crate::failure::WrongUsage;
use crate::failure::typed::bad;
use crate::options::probes::debug_info::DebugArgs;
use crate::output;
use crate::output::values::source_lines::Lines;

/// Debug information in the opened files.
#[derive(Debug, Default)]
struct Opened<'a> {
    kernel: Option<(&'a Path, Sources)>,
    modules: Vec<(&'a Path, Sources)>,
}

/// Converts `definitions` for the kernel at the path that `kernel` returns, and also returns the source
/// lines. `kernel` is called only if there is debug information of a kernel.
pub(crate) fn of_kernel(
    args: &DebugArgs,
    definitions: Vec<String>,
    kernel: impl Fn() -> anyhow::Result<PathBuf>,
) -> anyhow::Result<(Definitions, Option<Lines>)> {
    let opened = Opened::open(args, |_| open_kernel(&kernel()?))?;
    let definitions = expand(args, definitions, &opened)?;
    Ok((definitions, opened.lines()))
}

/// Converts `definitions` for the kernel that the debug information describes. The result is for machines with that
/// kernel only.
pub(crate) fn of_any(args: &DebugArgs, definitions: Vec<String>) -> anyhow::Result<Made> {
    // The file also serves as the kernel image: it contains everything that was stripped from the image.
    let opened = Opened::open(args, open_kernel)?;
    let definitions = expand(args, definitions, &opened)?;
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

/// Converts definitions in the syntax of `perf probe`; keeps the others.
fn expand(
    args: &DebugArgs,
    texts: Vec<String>,
    opened: &Opened<'_>,
) -> anyhow::Result<Definitions> {
    let mut all = Definitions::default();
    for text in texts {
        // Without debug information, the parser of definitions refuses such a text later.
        if args.debug_info.is_empty() || !is_perf_probe(&text) {
            all.texts.push(text);
            continue;
        }
        let probe = PerfProbe::parse(&text).map_err(|error| bad("definition", &text, &error))?;
        let sources = opened.that_knows(&text, &probe)?;
        let made = sources
            .definitions(&probe, args.source.as_deref())
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

impl<'a> Opened<'a> {
    /// Opens the files. For a file with a kernel's debug information, `kernel` returns the kernel that it
    /// describes.
    fn open(
        args: &'a DebugArgs,
        kernel: impl Fn(&Path) -> anyhow::Result<Kernel>,
    ) -> anyhow::Result<Self> {
        let mut opened = Self::default();
        for file in &args.debug_info {
            if let Some(module) = debug_info::open_module(file)? {
                opened.modules.push((file, module));
                continue;
            }
            if let Some((other, _)) = &opened.kernel {
                let (other, file) = (other.display(), file.display());
                let message = format!("--debug-info: {other} and {file} are both of a kernel");
                return Err(WrongUsage(message).into());
            }
            opened.kernel = Some((file, debug_info::open(&kernel(file)?, file)?));
        }
        Ok(opened)
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

    /// Returns the source lines of the kernel and of the modules, or `None` if no file was opened.
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

/// Converted definitions, with the debug information from which they were made.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) definitions: Definitions,
    pub(crate) theirs: Theirs,
}
