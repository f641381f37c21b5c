//! Descriptions of registered probes.

use std::sync::{Arc, OnceLock};

use hvprobe_arch::Gva;
use hvprobe_hit::Counts;
use hvprobe_spec::definition::Kind;
use hvprobe_spec::{Actions, Argument, Budget, Mechanism, ProbeId, RegisterSet};

use crate::unoptimized::Unoptimized;

/// State of a registered probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeState {
    /// Waits for the kernel's text to be final.
    Pending,
    /// Has a probepoint; armed unless disabled.
    Placed,
    /// Was pending, and cannot be planted: found when the text was final.
    Refused(String),
    /// The guest rewrote the patched byte; the probe no longer fires.
    Gone,
}

/// What events of a probe show, besides what its definition captures explicitly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Registers that are shown as registers. Events may carry more, for arguments.
    pub registers: RegisterSet,
    /// Arguments that are shown.
    pub arguments: Vec<Argument>,
    /// Whether the arguments are exactly those of the function, in the order of its declaration; for a return
    /// probe, followed by the return value unless the function returns nothing.
    pub call: bool,
}

/// Actions and shown values that are known once the probe's module is loaded. Set before the probe's first hit;
/// never set if the probe is refused then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Awaited(Arc<OnceLock<(Arc<Actions>, Arc<Shown>)>>);

impl Awaited {
    pub(crate) fn resolve(&self, actions: &Arc<Actions>, shown: &Arc<Shown>) {
        let resolved = (Arc::clone(actions), Arc::clone(shown));
        // They are resolved once.
        let _ = self.0.set(resolved);
    }
}

/// A probe in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeInfo {
    /// Id of the probe.
    pub id: ProbeId,
    /// Name of the event: as given, or made from the definition as ftrace does (`p_vfs_read_0`).
    pub name: String,
    /// Definition, in the syntax of the definition language.
    pub definition: String,
    /// Kind of the probe.
    pub kind: Kind,
    /// The probepoint, once known.
    pub addr: Option<Gva>,
    /// Symbol and offset of the probepoint.
    pub symbol: Option<(String, u64)>,
    /// State of the probe.
    pub state: ProbeState,
    /// Whether it is registered but not armed.
    pub disabled: bool,
    /// Whether it has exceeded its budget, and is disabled for that or about to be.
    pub turned_off: bool,
    /// Budget of its hits.
    pub budget: Option<Budget>,
    /// How the displaced instruction takes effect, once planned.
    pub mechanism: Option<Mechanism>,
    /// Why it is armed with an int3 instead of a jump.
    pub unoptimized: Option<Unoptimized>,
    /// For a placed return probe: the present maximum of calls in flight.
    pub maxactive: Option<u32>,
    /// Its counters.
    pub counts: Counts,
    /// Actions at its hits.
    pub actions: Arc<Actions>,
    /// What its events show.
    pub shown: Arc<Shown>,
    /// Receives the actions and the shown values if they are known only once the probe's module is loaded.
    pub awaited: Option<Awaited>,
}

impl ProbeInfo {
    /// Returns the description with the values from the probe's module; `None` while they are awaited.
    #[must_use]
    pub fn resolved(&self) -> Option<Self> {
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

/// Notice of throttled hits of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Throttled {
    /// The probe.
    pub probe: ProbeId,
    /// Name of the probe's events.
    pub name: String,
    /// Throttled hits since the last notice about this probe.
    pub count: u64,
    /// Whether the probe has been turned off because of them.
    pub disabled: bool,
}
