//! The probe table that matches the text, made after each change.
//!
//! Invariant: the table has exactly the armed sites, with only their enabled members.

use std::sync::Arc;

use hvprobe_hit::Counters;
use hvprobe_hit::calls::Pool;
use hvprobe_hit::table::{Following, Internal, Member, Parts, ProbeTable, Returning, Role, Site};
use hvprobe_spec::ProbeId;

use crate::code::ours::OurCode;
use crate::guest::kernel::GuestKernel;
use crate::registry::optimize::Rules;
use crate::registry::recorders::stubs;
use crate::registry::state::Shared;
use crate::sites::site::SiteState;

/// Returns the table of the sites and probes in `rules`, whose jumps lead to `code`.
pub(crate) fn table(
    rules: &Rules<'_>,
    code: &OurCode,
    kernel: &GuestKernel,
    shared: &Shared,
) -> ProbeTable {
    let sites = rules
        .sites
        .values()
        .filter(|site| site.is_armed())
        .map(|site| {
            let members = members(site, rules, code);
            let has_post = |member: &Member| match &member.role {
                Role::Probe(actions) => actions.post,
                Role::Return { .. } | Role::Internal(_) => false,
            };
            Site {
                displaced: site.point.displaced,
                slot: site.slot,
                detour: site.jump().map(|jump| Arc::clone(&jump.detour)),
                after_sti: site.point.after_sti,
                posts: members.iter().any(has_post),
                members,
            }
        })
        .collect();
    let returning = rules
        .probes
        .staying()
        .filter(|(_, probe)| probe.pool.is_some())
        .map(|(id, probe)| {
            let returning = Returning {
                counters: Arc::clone(&probe.counters),
                actions: Arc::clone(&probe.actions),
                disabled: probe.spec.disabled || !rules.switches.armed,
            };
            (id, returning)
        })
        .collect();
    ProbeTable::new(Parts {
        sites,
        past_int3s: Arc::clone(&shared.past_int3s),
        fixtures: code.region.fixtures(),
        returning,
        returns: Arc::clone(&shared.returns),
        restored_frames: Arc::clone(&shared.restored_frames),
        followed: code
            .sources
            .iter()
            .filter(|source| source.followed().is_some())
            .collect(),
        ask_all: kernel.ask_all(),
        unwinder: kernel.unwinder(),
        ghosts: code
            .ghost_jumps
            .values()
            .flatten()
            .filter_map(|jump| Some((jump.detour.escape()?, jump.detour.tail())))
            .collect(),
    })
}

fn members(site: &SiteState, rules: &Rules<'_>, code: &OurCode) -> Box<[Member]> {
    let stubs = stubs(site, rules.probes, rules.switches, &code.sources);
    let following = |id: ProbeId, pool: &Arc<Pool>| match stubs.get(&id) {
        Some(source) => Following::Stubs(Arc::clone(source)),
        None => Following::Trampoline(Arc::clone(pool)),
    };
    let own = rules.probes.enabled(&site.members).map(|(id, probe)| {
        let actions = Arc::clone(&probe.actions);
        Member {
            id,
            counters: Arc::clone(&probe.counters),
            role: match &probe.pool {
                None => Role::Probe(actions),
                Some(pool) => Role::Return {
                    actions,
                    calls: following(id, pool),
                },
            },
        }
    });
    let internal = site.internal.map(|internal| Member {
        id: Internal::ID,
        counters: Arc::new(Counters::new(0)),
        role: Role::Internal(internal),
    });
    internal.into_iter().chain(own).collect()
}
