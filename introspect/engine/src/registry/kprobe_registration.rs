//! When the guest registers a kprobe of its own, our jumps at its place are removed first.
//!
//! Invariant: the guest copies no instruction under a jump of ours ([`super::guest_kprobes`]).

use hvprobe_arch::Gva;
use hvprobe_spec::{Decision, Then};
use tracing::{info, warn};

use super::commit::CommitError;
use crate::guest::kprobes::{Known, meets};
use crate::refusal::Obstacle;
use crate::registry::state::Registry;
use crate::sites::site::SiteState;
use crate::unoptimized::Unoptimized;
use crate::world::World;

/// Error that `arch_prepare_kprobe` returns when it must not copy (include/uapi/asm-generic/errno-base.h).
const EBUSY: u64 = 16;

impl Registry {
    /// Handles the guest's registration of a kprobe, whose `struct kprobe` is at `kprobe`: removes our jumps from
    /// its place. Returns how `arch_prepare_kprobe` continues: it fails if a jump may still be there.
    pub fn guest_registers(&mut self, kprobe: Gva, world: &dyn World) -> Decision {
        let then = match self.remove_jumps_near(kprobe, world) {
            Ok(()) => Then::Proceed,
            Err(why) => {
                warn!(%kprobe, why, "the guest must not register a kprobe");
                Then::Return(EBUSY.wrapping_neg())
            }
        };
        let changes = Vec::new();
        Decision { changes, then }
    }

    fn remove_jumps_near(&mut self, kprobe: Gva, world: &dyn World) -> Result<(), String> {
        let (Known::Table(layout), Some(live)) = (&self.kprobes.known, &self.live) else {
            return Ok(());
        };
        let field = kprobe.wrapping_add(layout.address);
        let address = live.view.tables.read_u64(world.memory(), field);
        let at =
            Gva(address.map_err(|error| format!("where it is to be cannot be read: {error}"))?);
        let here = |site: &SiteState| {
            let span = site.point.span.as_ref();
            site.jump().is_some() && span.is_ok_and(|span| meets(span, at))
        };
        let sites = self.sites.iter().filter(|(_, site)| here(site));
        let sites: Vec<Gva> = sites.map(|(at, _)| *at).collect();
        if sites.is_empty() {
            return Ok(());
        }
        info!(%at, "the guest registers a kprobe where a jump of ours is");
        self.kprobes.registering = Some(at);
        let changed = self.commit_at_hook(world);
        // No jump is written from here on until the kprobe is in the table, because the guest holds the mutex.
        self.kprobes.registering = None;
        changed.map_err(|error| match error {
            CommitError::Stop(error) => format!("a jump at {at} stays: {error}"),
            CommitError::Sites(obstacles) => {
                let Obstacle { at, why } = obstacles.first();
                format!("a jump stays, because of what is at {at}: {why}")
            }
        })?;
        for site in sites {
            if let Some(site) = self.sites.get_mut(&site) {
                site.unprepared = Some(Unoptimized::Kprobe { at });
            }
        }
        Ok(())
    }
}
