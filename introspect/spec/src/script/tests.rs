use expect_test::{Expect, expect};

use super::*;

mod missing;
mod mistakes;
mod programs;
mod round_trip;

/// Returns the compiled form of `text`, or the error with its caret.
fn outcome(text: &str) -> String {
    let program = read_script(text).and_then(|script| compile(text, &script));
    match program {
        Ok(program) => shown(&program),
        Err(error) => format!("{error}\n{}\n", error.render()),
    }
}

/// Checks the errors of `texts`, each with its caret.
fn refused(texts: &[&str], expect: Expect) {
    let all: Vec<_> = texts.iter().map(|text| outcome(text)).collect();
    expect.assert_eq(&all.join("\n"));
}

fn check(text: &str, expect: Expect) {
    expect.assert_eq(&outcome(text));
}

/// Returns the definitions and histograms of a program, and its other actions.
fn shown(program: &Program) -> String {
    let mut text = String::new();
    for planted in &program.probes {
        let stacks = if planted.stacks { " (stacks)" } else { "" };
        text.push_str(&format!("{}{stacks}\n", planted.written.text));
        for action in &planted.actions {
            text.push_str(&format!("  {action:?}\n"));
        }
    }
    for map in &program.maps {
        text.push_str(&format!("@{} {:?}\n", map.name, map.aggregate));
        for Counted {
            histogram,
            probes,
            keys,
        } in &map.counted
        {
            text.push_str(&format!("  {} of {probes:?}: {keys:?}\n", histogram.text));
        }
    }
    for (when, actions) in [("BEGIN", &program.begin), ("END", &program.end)] {
        for action in actions {
            text.push_str(&format!("{when}: {action:?}\n"));
        }
    }
    for (length, actions) in &program.intervals {
        text.push_str(&format!("every {length} ms: {actions:?}\n"));
    }
    text
}
