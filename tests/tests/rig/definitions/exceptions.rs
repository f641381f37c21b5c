//! Intended differences from the kernel's errors for definitions, with their reasons.

use crate::verdicts::{Case, Exception, Kernel};

/// First version in which arguments have names.
const NAMES: (u32, u32) = (6, 6);
/// First version with casts, `$current`, per-CPU variables and long expressions.
const CASTS: (u32, u32) = (7, 3);

/// Returns whether the kernel is older than `since` and reports `words` at a text that begins with one of
/// `beginnings`. We must have no error before that text.
fn is_newer(case: &Case<'_>, since: (u32, u32), words: &str, beginnings: &[&str]) -> bool {
    case.pointed_at().is_some_and(|(text, column, said)| {
        case.version < since
            && said == words
            && case.goes_on(column)
            && beginnings.iter().any(|&word| text.starts_with(word))
    })
}

/// Returns whether both errors have the same words, and `columns` accepts the kernel's column and ours.
fn same_words(case: &Case<'_>, columns: impl Fn(usize, usize) -> bool) -> bool {
    match (case.kernel_error(), case.our_error()) {
        (Some((kernel, said)), Some((ours, words))) => said == words && columns(kernel, ours),
        _ => false,
    }
}

/// Returns whether the kernel takes the line and we refuse it with the words `wanted`.
fn taken(case: &Case<'_>, wanted: &str) -> bool {
    case.kernel == Kernel::Accepts && case.our_error().is_some_and(|(_, words)| words == wanted)
}

/// Returns the part of the argument at `column` that is before `column`.
fn argument_before(text: &str, column: usize) -> &str {
    let before = &text[..column];
    &before[before.rfind(' ').map_or(0, |at| at + 1)..]
}

/// All exceptions. If several hold, the first counts.
pub(crate) const EXCEPTIONS: &[Exception] = &[
    Exception {
        reason: "symbols are looked up when a probe is registered; the kernel then points at the probepoint",
        holds: |case| {
            let lookup = matches!(
                case.kernel_error(),
                Some((
                    _,
                    "Invalid probed address or symbol"
                        | "Failed to register probe event"
                        | "Probe point is not an instruction boundary"
                        | "The symbol is not unique"
                ))
            );
            let ours = case.our_error();
            lookup && ours.is_none_or(|(_, words)| words == "Invalid memory address")
        },
    },
    Exception {
        reason: "the function's arguments, and members of structures, are looked up with the types",
        holds: |case| {
            case.pointed_at().is_some_and(|(_, column, words)| {
                let lookup = [
                    "This variable is not found at this probe point",
                    "This field is not found.",
                    "This is not a pointer to union/structure.",
                    "This type does not fit for string.",
                    "This function returns 'void' type",
                ];
                lookup.contains(&words) && case.goes_on(column)
            })
        },
    },
    Exception {
        reason: "numbers can be as wide as their own types, as for `perf probe`",
        holds: |case| {
            case.pointed_at().is_some_and(|(text, column, words)| {
                // The kernel checks the type of an argument before its expression.
                let from = column - argument_before(case.text, column).len();
                words == "Unknown type is specified"
                    && matches!(text.split(' ').next(), Some("u" | "s" | "x" | "d"))
                    && case.goes_on(from)
            })
        },
    },
    Exception {
        reason: "before 6.6, no argument has a name",
        holds: |case| {
            let begins = |c: char| c == '_' || c.is_ascii_alphabetic();
            case.pointed_at()
                .is_some_and(|(text, ..)| text.starts_with(begins))
                && is_newer(case, NAMES, "Invalid fetch argument", &[""])
        },
    },
    Exception {
        reason: "before 6.6, return probes have no arguments, $retval no members, and there is no $arg*",
        holds: |case| {
            is_newer(
                case,
                NAMES,
                "Invalid $-variable specified",
                &["$arg", "$retval"],
            )
        },
    },
    Exception {
        reason: "before 6.6, what is no memory is no text; now it may be a pointer to one",
        holds: |case| {
            is_newer(
                case,
                NAMES,
                "String accepts only memory argument",
                &["string", "ustring"],
            ) && ["$arg", "$retval"]
                .iter()
                .any(|name| case.text.contains(name))
        },
    },
    Exception {
        reason: "5.10 has no type symstr",
        holds: |case| {
            let unknown = |(text, _, said): (&str, _, _)| {
                said == "Unknown type is specified" && text.starts_with("symstr")
            };
            case.version < (5, 11) && case.pointed_at().is_some_and(unknown)
        },
    },
    Exception {
        reason: "before 6.6, there is no type char; before 6.9, there are no %pd and %pD",
        holds: |case| {
            is_newer(
                case,
                (6, 9),
                "Unknown type is specified",
                &["char", "%pd", "%pD"],
            )
        },
    },
    Exception {
        reason: "before 6.6, nothing is said of a text with another type",
        holds: |case| {
            case.version < NAMES
                && case.kernel == Kernel::Refuses(None)
                && case.our_error().is_some_and(|(_, words)| {
                    words == "$comm and immediate-string only accepts string type"
                })
        },
    },
    Exception {
        reason: "before 6.14, nothing is said of a 129th argument",
        holds: |case| {
            case.version < (6, 14)
                && case.kernel_error().is_none()
                && case
                    .our_error()
                    .is_some_and(|(_, words)| words == "Too many arguments are specified")
        },
    },
    Exception {
        reason: "before 7.3, there are no casts, no $current and no this_cpu_read()",
        holds: |case| {
            is_newer(case, CASTS, "Invalid fetch argument", &["("])
                || is_newer(case, CASTS, "Typecasts are only for eprobe fields", &["("])
                || is_newer(case, CASTS, "Invalid $-variable specified", &["$current"])
        },
    },
    Exception {
        reason: "before 7.3, an expression has 63 characters at most; now 255",
        holds: |case| is_newer(case, CASTS, "Argument expression is too long", &[""]),
    },
    Exception {
        reason: "the kernel forgets the `u` of a dereference, or its second sign, when it counts columns",
        holds: |case| {
            same_words(case, |kernel, ours| {
                let argument = argument_before(case.text, ours);
                let forgotten = ["+u", "-u", "+-"].map(|sign| argument.matches(sign).count());
                (kernel + 1..=kernel + forgotten.iter().sum::<usize>()).contains(&ours)
            })
        },
    },
    Exception {
        reason: "since 6.6, the kernel counts a type's column from what is inside the dereference",
        holds: |case| {
            case.version >= NAMES
                && same_words(case, |kernel, ours| {
                    let argument = argument_before(case.text, ours);
                    kernel > ours && argument.ends_with("):")
                })
        },
    },
    Exception {
        reason: "since 6.6, the kernel counts columns in a text that has an argument's name for `$arg1`",
        holds: |case| {
            case.version >= NAMES
                && same_words(case, |kernel, ours| {
                    kernel < ours && argument_before(case.text, ours).starts_with("$arg")
                })
        },
    },
    Exception {
        reason: "the kernel drops what follows the last `)`",
        holds: |case| {
            case.ours
                .as_ref()
                .is_err_and(|error| error.message.ends_with("can follow the last `)`"))
        },
    },
    Exception {
        reason: "the kernel drops what follows `$arg*`",
        holds: |case| {
            taken(
                case,
                "$arg* must be an independent parameter without name etc.",
            )
        },
    },
    Exception {
        reason: "the kernel takes the quote that opens a text of nothing for the one that closes it",
        holds: |case| {
            taken(case, "String is not closed with '\"'")
                && case
                    .our_error()
                    .is_some_and(|(column, _)| case.text[..column].ends_with("\\\""))
        },
    },
    Exception {
        reason: "a `+` before an argument's number",
        holds: |case| taken(case, "Invalid $-variable specified") && case.text.contains("$arg+"),
    },
    Exception {
        reason: "what the kernel keeps of an argument until the return is no address of a symbol to it",
        holds: |case| {
            case.ours.is_ok()
                && case.pointed_at().is_some_and(|(_, column, words)| {
                    words == "Symbol String doesn't accept data/userdata"
                        && case.text.starts_with('r')
                        && argument_before(case.text, column).contains("$arg")
                })
        },
    },
    Exception {
        reason: "the kernel points at the beginning of a name, a place or a number, we at the character that cannot be there",
        holds: |case| {
            let of_heads = [
                "Event name is too long",
                "Event name must follow the same rules as C identifiers",
                "Failed to register probe event",
                "Group name is too long",
                "Group name must follow the same rules as C identifiers",
                "Invalid maxactive number",
                "Invalid probed address or symbol",
                "Retprobe address must be an function entry",
            ];
            case.pointed_at().is_some_and(|(text, column, words)| {
                let behind = case
                    .our_error()
                    .and_then(|(ours, _)| ours.checked_sub(column));
                let word = behind.and_then(|behind| text.get(..behind));
                of_heads.contains(&words) && word.is_some_and(|word| !word.contains(' '))
            })
        },
    },
    Exception {
        reason: "an event can be called as one of the kernel's own",
        holds: |case| {
            let used = "Given group/event name is already used by another event";
            case.ours.is_ok() && case.kernel_error().is_some_and(|(_, words)| words == used)
        },
    },
    Exception {
        reason: "the kernel takes `$retval` of an `f` that is not of returns",
        holds: |case| {
            taken(case, "$retval is not available on probe") && case.text.starts_with('f')
        },
    },
    Exception {
        reason: "an `f` has registers",
        holds: |case| {
            case.ours.is_ok()
                && case.text.starts_with('f')
                && case.pointed_at().is_some_and(|(text, _, words)| {
                    words == "Invalid fetch argument" && text.starts_with('%')
                })
        },
    },
    Exception {
        reason: "a place can be a pattern, which is no symbol to the kernel",
        holds: |case| {
            case.pointed_at().is_some_and(|(text, _, words)| {
                let place = text.split(' ').next().unwrap_or_default();
                words == "Invalid probed address or symbol" && place.contains(['*', '?'])
            })
        },
    },
];
