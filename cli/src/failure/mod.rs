//! Errors as the user sees them, in what was typed, from a server or of the program, and the exit statuses for
//! them. It knows neither options nor commands.

mod origins;
mod refused;
pub(crate) mod status;
pub(crate) mod typed;

pub(crate) use origins::Origins;
pub(crate) use refused::{Refused, Sent, answered, as_sent, done, mistake};
pub(crate) use status::{DONE, FAILED, INTERRUPTED, report};
pub(crate) use typed::WrongUsage;
