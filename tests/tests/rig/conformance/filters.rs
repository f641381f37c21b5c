//! Intended differences from the kernel's errors for filters, with their reasons.

use crate::verdicts::{Case, Exception, Kernel};

/// Errors of the kernel that depend on an event's fields.
const OF_FIELDS: [&str; 5] = [
    "Field not found",
    "Expecting string field",
    "Expecting numeric field",
    "Illegal operation for field type",
    "Function not found",
];

/// Returns whether both errors have the same words, and the kernel's column is `wanted` of our column.
fn same_words(case: &Case<'_>, wanted: impl Fn(usize) -> usize) -> bool {
    match (case.kernel_error(), case.our_error()) {
        (Some((kernel, said)), Some((ours, words))) => said == words && kernel == wanted(ours),
        _ => false,
    }
}

/// Returns whether both errors have the same words but point at different places: the kernel's at the opening sign,
/// one of `signs`, and ours at the place where the closing sign is missing.
fn opened_at(case: &Case<'_>, signs: &[char]) -> bool {
    let Some((text, column, said)) = case.pointed_at() else {
        return false;
    };
    case.our_error()
        .is_some_and(|(ours, words)| said == words && column < ours && text.starts_with(signs))
}

/// All exceptions. If several hold, the first counts.
pub(crate) const EXCEPTIONS: &[Exception] = &[
    Exception {
        reason: "the kernel counts columns inside of a comparison from 1",
        holds: |case| same_words(case, |ours| ours + 1),
    },
    Exception {
        reason: "the kernel points at the quote or parenthesis that is not closed, we where it should be",
        holds: |case| opened_at(case, &['"', '\'', '(']),
    },
    Exception {
        reason: "the kernel points at the value that does not suit the operator, we at the operator",
        holds: |case| match (case.kernel_error(), case.our_error()) {
            (Some((kernel, said)), Some((ours, words))) => {
                said == words && words == "Illegal operation for field type" && ours < kernel
            }
            _ => false,
        },
    },
    Exception {
        reason: "the kernel says `Error`, and points at the beginning, where it knows no better",
        holds: |case| case.ours.is_err() && case.kernel_error() == Some((0, "Error")),
    },
    Exception {
        reason: "fields, and what they can be compared with, are looked up when a probe is registered",
        holds: |case| {
            case.kernel_error().is_some_and(|(column, words)| {
                OF_FIELDS.contains(&words) && case.goes_on(column.saturating_sub(1))
            })
        },
    },
    Exception {
        reason: "a value can have a name: an enumerator, a flag, an error",
        holds: |case| {
            case.kernel_error().is_some_and(|(column, words)| {
                let value = column.checked_sub(1).and_then(|it| case.text.get(it..));
                let begins = |c: char| c == '_' || c.is_ascii_alphabetic();
                words == "Invalid value (did you forget quotes)?"
                    && value.is_some_and(|value| value.starts_with(begins))
                    && case.goes_on(column)
            })
        },
    },
    Exception {
        reason: "a blank can follow a `!`",
        holds: |case| {
            case.ours.is_ok() && case.text.contains("! ") && case.kernel != Kernel::Accepts
        },
    },
    Exception {
        reason: "the kernel takes `&&` and `||` with nothing behind them",
        holds: |case| {
            let is_open = case.text.ends_with("&&") || case.text.ends_with("||");
            case.kernel == Kernel::Accepts && case.ours.is_err() && is_open
        },
    },
    Exception {
        reason: "a set may have CPUs that there are not",
        holds: |case| {
            let is_refused = case
                .kernel_error()
                .is_some_and(|(_, words)| words == "Invalid cpulist");
            case.ours.is_ok() && is_refused
        },
    },
];
