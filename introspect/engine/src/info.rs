//! What is told of registered probes.

use std::sync::{Arc, OnceLock};

use hvprobe_arch::Gva;
use hvprobe_hit::Counts;
use hvprobe_spec::definition::Kind;
use hvprobe_spec::{Actions, Argument, Budget, Mechanism, ProbeId, RegisterSet};

use crate::unoptimized::Unoptimized;

/// Where a registered probe stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeState {
    /// Waits for the kernel's text to be final.
    Pending,
    /// Has a probepoint; armed unless disabled.
    Placed,
    /// Was pending and turned out to be impossible when the text was final.
    Refused(String),
    /// The guest rewrote the patched byte; the probe no longer fires.
    Gone,
}

/// What is shown of a probe's hits besides what it captures because it was asked to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// The registers that are shown as such. Events may have more, for arguments.
    pub registers: RegisterSet,
    /// The arguments.
    pub arguments: Vec<Argument>,
    /// Whether these are all those of the function in the order of its declaration, for a return probe
    /// with what it returns as the last unless that is nothing, and nothing else.
    pub call: bool,
}

/// What a probe does and shows that its module tells once it is loaded. Empty until then, and for ever if the
/// probe is refused then; told before the probe's first hit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Awaited(Arc<OnceLock<(Arc<Actions>, Arc<Shown>)>>);

impl Awaited {
    pub(crate) fn tell(&self, actions: &Arc<Actions>, shown: &Arc<Shown>) {
        let told = (Arc::clone(actions), Arc::clone(shown));
        // What a probe shows is found out once.
        let _ = self.0.set(told);
    }
}

/// One probe of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeInfo {
    /// Its id.
    pub id: ProbeId,
    /// The event's name: as given, or made from the definition as ftrace does (`p_vfs_read_0`).
    pub name: String,
    /// The definition, in the syntax it is given in.
    pub definition: String,
    /// Of which kind.
    pub kind: Kind,
    /// The probepoint, once known.
    pub addr: Option<Gva>,
    /// Symbol and offset of the probepoint.
    pub symbol: Option<(String, u64)>,
    /// Where it stands.
    pub state: ProbeState,
    /// Registered but not armed.
    pub disabled: bool,
    /// It has exceeded its budget, and is disabled for it or about to be.
    pub turned_off: bool,
    /// What its hits may take.
    pub budget: Option<Budget>,
    /// How the displaced instruction takes effect, once planned.
    pub mechanism: Option<Mechanism>,
    /// Why it is armed with an int3 and not optimized.
    pub unoptimized: Option<Unoptimized>,
    /// For a return probe that is placed: how many calls may be in flight now.
    pub maxactive: Option<u32>,
    /// What it has counted.
    pub counts: Counts,
    /// What happens at its hits.
    pub actions: Arc<Actions>,
    /// What is shown of them.
    pub shown: Arc<Shown>,
    /// Tells both anew, if they are not known before the probe's module is loaded.
    pub awaited: Option<Awaited>,
}

impl ProbeInfo {
    /// The same with what its module told of its hits; `None` as long as that is awaited.
    #[must_use]
    pub fn told(&self) -> Option<Self> {
        let Some(Awaited(awaited)) = &self.awaited else {
            return Some(self.clone());
        };
        let (actions, shown) = awaited.get()?;
        Some(Self {
            actions: Arc::clone(actions),
            shown: Arc::clone(shown),
            awaited: None,
            ..self.clone()
        })
    }
}

/// Hits of a probe that were throttled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Throttled {
    /// The probe.
    pub probe: ProbeId,
    /// The name of its events.
    pub name: String,
    /// How many, since the last notice about this probe.
    pub count: u64,
    /// Whether the probe has been turned off for it.
    pub disabled: bool,
}
