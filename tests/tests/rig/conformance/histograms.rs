//! Intended differences from the kernel's errors for histograms, with their reasons.

use hvprobe_spec::ParseError;

use super::filters;
use crate::verdicts::{Case, Exception, Kernel};

/// Separator before a filter.
const IF: &str = " if ";

/// Returns whether we refuse the case with a message that contains `part`.
fn says(case: &Case<'_>, part: &str) -> bool {
    case.ours
        .as_ref()
        .is_err_and(|error| error.message.contains(part))
}

/// Returns whether the kernel's error has these words.
fn kernel_says(case: &Case<'_>, words: &str) -> bool {
    case.kernel_error().is_some_and(|(_, said)| said == words)
}

/// Returns the case for the filter alone. Returns `None` if there is no filter, or if an error points before it.
fn of_filter<'a>(case: &Case<'a>) -> Option<Case<'a>> {
    let at = case.text.find(IF)? + IF.len();
    let kernel = match &case.kernel {
        Kernel::Refuses(Some((column, words))) => {
            Kernel::Refuses(Some((column.checked_sub(at)?, words.clone())))
        }
        other => other.clone(),
    };
    let ours = match &case.ours {
        Ok(()) => Ok(()),
        Err(error) => Err(ParseError {
            column: error.column.checked_sub(at)?,
            message: error.message.clone(),
        }),
    };
    Some(Case {
        text: &case.text[at..],
        kernel,
        ours,
        ..*case
    })
}

/// Returns the letters and digits at the beginning of `text`.
fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric());
    &text[..end.unwrap_or(text.len())]
}

/// All exceptions. If several hold, the first counts.
pub(crate) const EXCEPTIONS: &[Exception] = &[
    Exception {
        reason: "there are neither variables, actions nor names, of calculating only `/`, and each entry shows its hits",
        holds: |case| {
            says(case, "is not known here") || says(case, "write keys=, vals=, sort= or size=")
        },
    },
    Exception {
        reason: "a histogram is paused and cleared by whoever reads it",
        holds: |case| says(case, "pausing and clearing"),
    },
    Exception {
        reason: "fields are looked up when a histogram is asked for; 6.1 says nothing of its filter",
        holds: |case| {
            let is_unsaid = case.kernel == Kernel::Refuses(None) && case.text.contains(IF);
            case.ours.is_ok() && is_unsaid
                || case.kernel_error().is_some_and(|(column, words)| {
                    words == "Couldn't find field" && case.goes_on(column)
                })
        },
    },
    Exception {
        reason: "its filter differs as filters do",
        holds: |case| {
            of_filter(case).is_some_and(|filter| {
                let mut exceptions = filters::EXCEPTIONS.iter();
                exceptions.any(|exception| (exception.holds)(&filter))
            })
        },
    },
    Exception {
        reason: "the kernel points at a clause with nothing in it, we where something is missing",
        holds: |case| {
            case.ours.is_err()
                && (kernel_says(case, "Empty assignment") || kernel_says(case, "Empty sort field"))
        },
    },
    Exception {
        reason: "the kernel takes the last of two clauses of one name",
        holds: |case| case.kernel == Kernel::Accepts && says(case, "is given twice"),
    },
    Exception {
        reason: "the kernel sorts by two fields at most",
        holds: |case| case.ours.is_ok() && kernel_says(case, "Too many sort fields (Max = 2)"),
    },
    Exception {
        reason: "the kernel points at the first place that has the same letters",
        holds: |case| match (case.pointed_at(), case.our_error()) {
            (Some((text, column, _)), Some((ours, _))) => {
                let same = case
                    .text
                    .get(ours..)
                    .is_some_and(|it| word(it) == word(text));
                column < ours && same && !word(text).is_empty()
            }
            _ => false,
        },
    },
    Exception {
        reason: "the kernel points at a value's name, we at the form behind it that it has not",
        holds: |case| {
            kernel_says(case, "Invalid field modifier")
                && case.pointed_at().is_some_and(|(text, column, _)| {
                    let behind = text.find('.').map(|dot| column + dot + 1);
                    case.our_error().map(|(ours, _)| ours) == behind
                })
        },
    },
    Exception {
        reason: "some kernels take `hitcount` for a key",
        holds: |case| case.kernel == Kernel::Accepts && says(case, "hitcount cannot be a key"),
    },
];
