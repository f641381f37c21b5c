//! Contents of the rig's initramfs.

use std::os::unix::ffi::OsStrExt;

use anyhow::Result;

use crate::archive::Archive;
use crate::image::{programs, userland};
use crate::job::{Job, Stdio};
use crate::modules;
use crate::place::CACHE_VARIABLE;
use crate::setup::Ready;
use crate::shell;
use crate::terminal;

const RIG_INIT: &[u8] = include_bytes!("../../../guest/rig-init");

/// Builds the initramfs of the rig that runs `job`. The rig first loads `modules`, each with the parameters that
/// follow its name, and the modules that they depend on. `nonce` is part of the marks on the console.
pub(super) fn rig(ready: &Ready, job: &Job, modules: &[&str], nonce: &str) -> Result<Vec<u8>> {
    let mut archive = Archive::with_console()?;
    archive.file("init", 0o755, RIG_INIT)?;
    programs(
        &mut archive,
        job.programs
            .iter()
            .map(|(name, path)| (name.as_str(), path.as_path())),
    )?;
    userland(&mut archive)?;
    for (name, source) in &job.files {
        if !archive.contains(name) {
            archive.copy(name, source)?;
        }
    }
    archive.copy("guest/kernel", &ready.guest.kernel())?;
    archive.copy("guest/initrd.cpio", &ready.guest.initrd())?;

    let mut lines = String::new();
    for module in modules::in_order(modules, |file| ready.kernel.module(file))? {
        archive.file(&format!("lab/{}", module.file), 0o644, &module.bytes)?;
        lines.push_str(&format!("{} {}\n", module.file, module.parameters));
    }
    archive.file("lab/modules", 0o644, lines.as_bytes())?;
    archive.file("lab/environment", 0o644, &environment(job, nonce))?;
    archive.file("lab/steps", 0o644, &steps(job))?;
    archive.finish()
}

/// Returns the rig's `/lab/environment`, a script that sets the environment of its init and of the steps.
fn environment(job: &Job, nonce: &str) -> Vec<u8> {
    let mut script = Vec::new();
    let stdio = match job.stdio {
        Stdio::Plain => "plain",
        Stdio::Terminal => "terminal",
        Stdio::Interactive => "interactive",
    };
    for (name, value) in [("LAB_NONCE", nonce), ("LAB_STDIO", stdio)] {
        shell::export_into(&mut script, name, value.as_bytes());
    }
    if let Some(port) = job.forward {
        shell::export_into(&mut script, "LAB_FORWARD", port.to_string().as_bytes());
    }
    for (name, value) in &job.environment {
        shell::export_into(&mut script, name, value.as_bytes());
    }
    // With this cache folder, hvprobe's defaults are /guest/kernel and /guest/initrd.cpio.
    shell::export_into(&mut script, CACHE_VARIABLE, b"/");
    if job.stdio != Stdio::Plain
        && let Some((rows, columns)) = terminal::size()
    {
        script.extend_from_slice(format!("stty rows {rows} cols {columns}\n").as_bytes());
    }
    script
}

/// Returns the rig's `/lab/steps`, a script that calls the init's function `step` for each step.
fn steps(job: &Job) -> Vec<u8> {
    let mut script = Vec::new();
    for (number, step) in job.steps.iter().enumerate() {
        let number = number.to_string();
        let program = format!("/bin/{}", step.program);
        let words = [number.as_bytes(), program.as_bytes()]
            .into_iter()
            .chain(step.arguments.iter().map(|word| word.as_bytes()));
        shell::line_into(&mut script, "step", words);
    }
    script
}
