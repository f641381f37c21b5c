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
    /// Waits until the text of the kernel, or of the probe's module, is final.
    Pending,
    /// Has a probepoint. Is armed if it is enabled and the global switch is on.
    Placed,
    /// Was pending, and was refused when its text became final; with the reason.
    Refused(String),
    /// Does not fire any more: the guest rewrote the text there, unloaded the module or started another kernel.
    Gone,
}

/// What events of a probe show, besides what its definition captures explicitly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Registers that are shown as such. Events may carry further registers, which hold arguments.
    pub registers: RegisterSet,
    /// Arguments that are shown.
    pub arguments: Vec<Argument>,
    /// Whether the arguments are exactly those of the function, in the order of its declaration; for a return
    /// probe, followed by the return value unless the function returns nothing.
    pub call: bool,
}

/// Actions and shown values that are known only once the probe's module is loaded. They are set before the probe's
/// first hit, and never if the probe is refused when its module is loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Awaited(Arc<OnceLock<(Arc<Actions>, Arc<Shown>)>>);

impl Awaited {
    pub(crate) fn resolve(&self, actions: &Arc<Actions>, shown: &Arc<Shown>) {
        let resolved = (Arc::clone(actions), Arc::clone(shown));
        // This cannot fail: a probe's values are resolved once.
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
    /// Whether the probe is disabled: registered, but not armed.
    pub disabled: bool,
    /// Whether the probe has exceeded its budget. It is then disabled, or is about to be.
    pub turned_off: bool,
    /// Budget of the probe's hits.
    pub budget: Option<Budget>,
    /// How the displaced instruction takes effect, once the probepoint is known.
    pub mechanism: Option<Mechanism>,
    /// Why the probe is armed with an int3 instead of a jump; `None` if it is not armed with an int3.
    pub unoptimized: Option<Unoptimized>,
    /// For a return probe: the present maximum number of calls in flight.
    pub maxactive: Option<u32>,
    /// The probe's counters.
    pub counts: Counts,
    /// Actions at the probe's hits.
    pub actions: Arc<Actions>,
    /// What the probe's events show.
    pub shown: Arc<Shown>,
    /// Receives the actions and the shown values, if these are known only once the probe's module is loaded.
    pub awaited: Option<Awaited>,
}

impl ProbeInfo {
    /// Returns the description with the actions and shown values that depend on the probe's module; `None` while
    /// they are awaited.
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
    /// Whether the probe has been turned off because it exceeded its budget.
    pub disabled: bool,
}
