//! Compares how hvprobe and the guest's own kernel judge definitions with fetch arguments. hvprobe must accept what
//! the kernel's `kprobe_events` accepts, and refuse each syntax error with the kernel's words, at the kernel's
//! column.
//!
//! Intended differences are listed in `exceptions`, with their reasons.

mod beginnings;
mod exceptions;
mod generate;
mod values;

use hvprobe_spec::definition;
use hvprobe_tests::names;
use hvprobe_tests::rig::{rig, rounds};

use crate::verdicts::{self, Case, Tally};

pub(crate) use exceptions::EXCEPTIONS;

#[test]
fn definitions_are_taken_and_refused_as_by_the_guests_kernel() {
    if rig("definitions held against the kernel's").is_none() {
        return;
    }
    let function = "vfs_read";
    let definitions = generate::definitions(
        function,
        names::behind_entry(function),
        rounds(generate::MADE_UP),
    );
    let lines: Vec<_> = definitions
        .iter()
        .map(|text| format!("kprobe_events {text}"))
        .collect();
    let guest = verdicts::ask(&lines);
    let mut tally = Tally::new(EXCEPTIONS);
    for (text, kernel) in definitions.iter().zip(guest.answers) {
        tally.add(&Case {
            text,
            kernel,
            ours: definition::parse(text).map(drop),
            version: guest.version,
            has_words: true,
        });
    }
    let (both_take, both_refuse) = (tally.both_take, tally.both_refuse);
    eprintln!("both take {both_take}, both refuse {both_refuse}, with the same words and caret");
    eprint!("{}", tally.differences(false));
    assert!(tally.unnamed.is_empty(), "{}", tally.unnamed.join("\n"));
    assert!(both_take >= 100 && both_refuse >= 100);
}
