//! Exit statuses, and the error message at the end of the program.

use std::process::ExitCode;

use super::typed::WrongUsage;
use crate::output;

/// Status of success.
pub(crate) const DONE: ExitCode = ExitCode::SUCCESS;
/// Status of a failure.
pub(crate) const FAILED: u8 = 1;
/// Status of an invalid command line; clap uses the same.
const WRONG_USAGE: u8 = 2;
/// Status after Ctrl-C or SIGTERM.
pub(crate) const INTERRUPTED: u8 = 130;

/// Prints `error` with its causes and returns the exit status for it.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    // A reader such as `head` closes the pipe when it has read enough, which is no failure.
    if closed_output(error) {
        return DONE;
    }
    output::error(format_args!("{error:#}"));
    ExitCode::from(if error.is::<WrongUsage>() {
        WRONG_USAGE
    } else {
        FAILED
    })
}

/// Returns whether `error` means that the reader of our output is gone.
pub(crate) fn closed_output(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
