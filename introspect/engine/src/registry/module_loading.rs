//! The guest loads and unloads modules: pending probes are planted when their module's text is final, and probes
//! in a module leave with it.
//!
//! Invariant: no probe is planted in a module before its text is final, or after it is about to be unloaded.

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_linux::image::KernelImage;
use hvprobe_spec::ProbeId;
use hvprobe_spec::definition::Target;
use tracing::info;

use crate::refusal::Refused;
use crate::registry::state::Registry;
use crate::sites::probes::Probes;
use crate::sites::site::Placement;
use crate::world::{StopError, World};

/// Returns whether any of the `probes` is, or is to be, in a module: not in the text of `image`.
pub(crate) fn has_module_probes(probes: &Probes, image: &KernelImage) -> bool {
    probes.staying().any(|(_, probe)| match &probe.placement {
        Placement::Pending => matches!(
            probe.spec.definition.target,
            Target::Symbol {
                module: Some(_),
                ..
            }
        ),
        Placement::At(at) => !image.is_text(*at),
        Placement::Refused(_) | Placement::Gone => false,
    })
}

impl Registry {
    /// Reads the guest's modules.
    pub(crate) fn read_modules(&mut self, mem: &dyn PhysMemory) {
        if let Some(live) = &self.live {
            self.kernel.read_modules(&live.view.tables, mem);
        }
    }

    /// Handles a change of the guest's modules, past or imminent: plants the probes that waited for a module that
    /// is loaded now, and detaches those of modules that are unloaded. `formed` is the address of the `struct
    /// module` of a module that has just got its final text. Returns the probes that cannot be planted.
    ///
    /// # Errors
    /// When the virtual CPUs cannot be stopped.
    pub fn modules_changed(
        &mut self,
        formed: Option<Gva>,
        world: &dyn World,
    ) -> Result<Vec<(ProbeId, Refused)>, StopError> {
        self.kernel.note_formed(formed);
        self.read_modules(world.memory());
        let leaving: Vec<(ProbeId, Gva)> = self
            .probes
            .iter()
            .filter_map(|(id, probe)| match probe.placement {
                Placement::At(at) if !self.kernel.image.is_text(at) => Some((id, at)),
                _ => None,
            })
            .filter(|(_, at)| self.kernel.is_unloaded(*at))
            .collect();
        for (id, at) in &leaving {
            if let Some(site) = self.sites.get_mut(at) {
                site.members.retain(|member| member != id);
            }
            if let Some(probe) = self.probes.get_mut(*id) {
                info!(probe = %id, %at, "the module under a probe is unloaded");
                probe.placement = Placement::Gone;
            }
        }
        self.settle_pending(world)
    }
}
