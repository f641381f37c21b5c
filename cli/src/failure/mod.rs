//! Errors as the user sees them (mistakes in what was typed, refusals by a server, failures of the program) and
//! their exit statuses. It knows neither options nor commands.

mod origins;
mod refused;
pub(crate) mod status;
pub(crate) mod typed;

pub(crate) use origins::Origins;
pub(crate) use refused::{Refused, Sent, answered, as_sent, done, mistake};
pub(crate) use status::{DONE, FAILED, INTERRUPTED, report};
pub(crate) use typed::WrongUsage;
