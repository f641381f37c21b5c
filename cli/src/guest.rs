//! From the options that describe a guest to the request that boots it.

use std::env;
use std::path::{self, Path, PathBuf};

use anyhow::Context as _;
use hvprobe_proto::v1::BootRequest;

use crate::args::Guest;
use crate::definition;
use crate::events_file::FileHistogram;
use crate::hit_args::HoldArgs;
use crate::label::Label;
use crate::origins::Origins;
use crate::output::lines::Lines;

/// What boots a guest, and what is known of it before.
#[derive(Debug)]
pub(crate) struct Requested {
    pub(crate) request: BootRequest,
    /// What files of definitions have counted.
    pub(crate) histograms: Vec<FileHistogram>,
    /// What was typed for its probes.
    pub(crate) origins: Origins,
    /// The lines of its kernel's and modules' sources, if there is debug information.
    pub(crate) lines: Option<Lines>,
}

/// The request for `guest`. Paths are made absolute and definitions are checked.
pub(crate) fn request(
    name: Option<String>,
    labels: Vec<Label>,
    guest: Guest,
    hold: &HoldArgs,
) -> anyhow::Result<Requested> {
    let given = guest.kernel.clone();
    let (definitions, lines) = guest
        .debug
        .of_kernel(guest.probes, || kernel(given.clone()))?;
    let (probes, histograms) =
        definition::specs(&definitions, &guest.events, false, &guest.hit, hold)?;
    let kernel = kernel(guest.kernel)?;
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

/// The kernel that was `given`, or the one of the guest that `cargo lab setup` made.
pub(crate) fn kernel(given: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    given.or_else(|| cached("kernel")).context(
        "there is no guest kernel yet: run `cargo lab setup` to fetch one, or give --kernel",
    )
}

/// The file `name` of the guest that `cargo lab setup` made, if it is there.
fn cached(name: &str) -> Option<PathBuf> {
    Some(cache()?.join("guest").join(name)).filter(|file| file.exists())
}

/// The folder of what can be had again: `$HVPROBE_CACHE`, else `$XDG_CACHE_HOME/hvprobe`, else `~/.cache/hvprobe`.
pub(crate) fn cache() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
    variable("HVPROBE_CACHE").map(PathBuf::from).or_else(|| {
        variable("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(Path::new(&variable("HOME")?).join(".cache")))
            .map(|caches| caches.join("hvprobe"))
    })
}

fn absolute(file: &Path) -> anyhow::Result<String> {
    let file = path::absolute(file).with_context(|| format!("cannot find {}", file.display()))?;
    file.into_os_string()
        .into_string()
        .ok()
        .context("paths have to be UTF-8")
}
