//! Conversion of the options that describe a guest into the request that boots it.

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

/// Request to boot a guest, with data that stays with the client.
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

/// Returns the kernel that was `given`, or the one of the guest that `cargo lab setup` fetched.
pub(crate) fn kernel(given: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    given.or_else(|| cached("kernel")).context(
        "there is no guest kernel yet: run `cargo lab setup` to fetch one, or give --kernel",
    )
}

/// Returns the file `name` of the guest that `cargo lab setup` fetched, if it exists.
fn cached(name: &str) -> Option<PathBuf> {
    Some(cache()?.join("guest").join(name)).filter(|file| file.exists())
}

/// Returns the cache folder: `$HVPROBE_CACHE`, else `$XDG_CACHE_HOME/hvprobe`, else `~/.cache/hvprobe`.
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
