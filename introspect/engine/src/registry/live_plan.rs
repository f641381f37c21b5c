//! Finds probepoints in the guest as it is now: in its image while it boots, then in its text.
//!
//! Invariant: a probepoint is returned only if the guest has not rewritten the text there, and no kprobe of its
//! own is in the way.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_spec::ProbeSpec;
use hvprobe_spec::definition::Target;

use crate::guest::kernel::GuestKernel;
use crate::guest::kprobes::one_over;
use crate::plan::kernel::Probeable;
use crate::plan::probepoint::{Probepoint, plan};
use crate::plan::text::{ImageText, PristineText};
use crate::refusal::Refused;
use crate::registry::live::Live;
use crate::registry::optimize::Rules;
use crate::sites::text::{LiveText, Text, is_rewritten};

/// Finds and checks the probepoint of `spec`.
///
/// # Errors
/// Why the probe is refused.
pub(crate) fn find_probepoint(
    spec: &ProbeSpec,
    kernel: &GuestKernel,
    rules: &Rules<'_>,
    mem: &dyn PhysMemory,
) -> Result<Probepoint, Refused> {
    let probeable = kernel.probeable();
    let plan = |text: &dyn PristineText| match (plan(spec, &probeable, text), &kernel.module_reader)
    {
        // The probe would stay pending for ever.
        (Err(Refused::ModuleNotLoaded { module }), Err(why)) => {
            let why = why.clone();
            Err(Refused::ModulesHidden { module, why })
        }
        (planned, _) => planned,
    };
    let Some(live) = rules.live else {
        return plan(&ImageText(&kernel.image));
    };
    let tables = &live.view.tables;
    let text = LiveText {
        text: Text { tables, mem },
        sites: rules.sites,
    };
    check_build(spec, kernel, &probeable, live, mem)?;
    let point = plan(&text)?;
    let at = point.displaced.at();
    let wants_types = spec.default_arguments || !spec.definition.arguments.is_empty();
    if let Some(module) = probeable.module_at(at).filter(|_| wants_types) {
        kernel.read_types(module, tables, mem);
    }
    if spec.is_return()
        && let Err(why) = live.view.task
    {
        return Err(Refused::NoTasks(why));
    }
    let registered = &rules.kprobes.registered;
    match rules.sites.get(&at) {
        Some(site) if is_rewritten(site, rules.sites, &text.text) => Err(Refused::Rewritten { at }),
        _ if registered.contains(&at) => Err(Refused::Kprobe { at }),
        // The guest makes no jump over text in which it found an int3.
        Some(site) if site.is_armed() => Ok(point),
        _ => match one_over(at, registered) {
            Some(kprobe) => Err(Refused::UnderKprobe { at, kprobe }),
            None => Ok(point),
        },
    }
}

/// Refuses `spec` if the loaded build of its module is not the one that `spec` is for.
fn check_build(
    spec: &ProbeSpec,
    kernel: &GuestKernel,
    probeable: &Probeable<'_>,
    live: &Live,
    mem: &dyn PhysMemory,
) -> Result<(), Refused> {
    let Target::Symbol {
        module: Some(name), ..
    } = &spec.definition.target
    else {
        return Ok(());
    };
    let loaded = probeable.modules.and_then(|modules| modules.get(name));
    let loaded = loaded.filter(|module| probeable.is_loaded(module));
    let (Some(wanted), Some(module)) = (&spec.module_build_id, loaded) else {
        return Ok(());
    };
    match kernel.build_id(module, &live.view.tables, mem) {
        Some(id) if id == *wanted => Ok(()),
        loaded => Err(Refused::OtherBuild {
            module: module.name().to_owned(),
            loaded,
            wanted: wanted.clone(),
        }),
    }
}
