//! Resolves a histogram against the events of an existing probe.

use hvprobe_spec::ParseError;
use hvprobe_spec::aggregate::Aggregate;
use hvprobe_spec::definition::Kind;
use hvprobe_spec::histogram::Histogram;

use crate::info::ProbeInfo;
use crate::plan::arguments::histogram::{Events, resolve};

impl ProbeInfo {
    /// Resolves `histogram` against the events of this probe.
    ///
    /// # Errors
    /// Names the column of a field that does not exist, or that has the wrong type for its use.
    pub fn aggregate(&self, histogram: &Histogram) -> Result<Aggregate, ParseError> {
        let (entry, then) = (&self.actions.capture, &self.actions.capture_at_return);
        let mut items = entry.iter().chain(then);
        let of = Events {
            probe: self.id,
            returns: matches!(self.kind, Kind::Return { .. }),
            arguments: &self.shown.arguments,
            stack_trace: items.position(|item| item.is_stack_trace()),
        };
        resolve(histogram, of)
    }
}
