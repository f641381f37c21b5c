//! Conversion of the options that describe a guest into the request that boots it.

use std::cell::OnceCell;
use std::path::{self, Path, PathBuf};

use anyhow::Context as _;
use hvprobe_proto::v1::BootRequest;

use super::cache::{cached, kernel};
use super::events_file::FileHistogram;
use super::{perf_probe, probes};
use crate::failure::Origins;
use crate::options::guest::Guest;
use crate::options::label::Label;
use crate::options::probes::hits::HoldArgs;
use crate::output::values::source_lines::Lines;

/// Request to boot a guest, and related data that the client keeps.
#[derive(Debug)]
pub(crate) struct Requested {
    pub(crate) request: BootRequest,
    /// Histograms from files of definitions.
    pub(crate) histograms: Vec<FileHistogram>,
    /// What the user typed for the guest's probes.
    pub(crate) origins: Origins,
    /// Source lines of the guest's kernel and modules, if there is debug information.
    pub(crate) lines: Option<Lines>,
}

/// Returns the request for `guest`. Makes paths absolute and checks definitions.
pub(crate) fn request(
    name: Option<String>,
    labels: Vec<Label>,
    guest: Guest,
    hold: &HoldArgs,
) -> anyhow::Result<Requested> {
    // Found only once: another kernel may be installed meanwhile.
    let found = OnceCell::new();
    let kernel = || -> anyhow::Result<PathBuf> {
        if let Some(found) = found.get() {
            return Ok(PathBuf::clone(found));
        }
        let kernel = kernel(guest.kernel.as_deref())?;
        Ok(found.get_or_init(|| kernel).clone())
    };
    let (definitions, lines) = perf_probe::of_kernel(&guest.debug, guest.probes, kernel)?;
    let (probes, histograms) = probes::specs(&definitions, &guest.events, false, &guest.hit, hold)?;
    let kernel = kernel()?;
    let initrd = guest.initrd.or_else(|| cached("initrd.cpio"));
    let request = BootRequest {
        name: name.unwrap_or_default(),
        kernel: absolute(&kernel)?,
        initrd: initrd
            .as_deref()
            .map(absolute)
            .transpose()?
            .unwrap_or_default(),
        cmdline: guest.cmdline,
        cpus: guest.cpus,
        memory: guest.memory.0,
        command: guest.command,
        probes,
        skip_refused: guest.skip_refused,
        labels: labels
            .into_iter()
            .map(|label| (label.name, label.value))
            .collect(),
        request_id: String::new(),
    };
    Ok(Requested {
        request,
        histograms,
        origins: definitions.origins,
        lines,
    })
}

fn absolute(file: &Path) -> anyhow::Result<String> {
    let file = path::absolute(file).with_context(|| format!("cannot find {}", file.display()))?;
    file.into_os_string()
        .into_string()
        .ok()
        .context("paths have to be UTF-8")
}
