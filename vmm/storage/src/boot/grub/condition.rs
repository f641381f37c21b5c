//! The command `[` or `test` (`grub-core/commands/test.c`).

use super::expand::Argument;
use super::state::State;
use super::world::{World, split};
use crate::filesystem::tree::{Kind, Stat};

/// Maximum number of words of a condition.
const MAX_WORDS: usize = 128;

/// Evaluates a condition. Returns `None` if it is unknown, or not one that is understood.
pub(super) fn test(arguments: &[Argument], state: &State, world: &dyn World) -> Option<bool> {
    if arguments.len() > MAX_WORDS {
        return None;
    }
    // `-o` binds less than `-a`.
    let alternatives = arguments.split(|it| it.known() == Some("-o"));
    let any = |results: &[Option<bool>]| match results {
        results if results.contains(&Some(true)) => Some(true),
        results if results.contains(&None) => None,
        _ => Some(false),
    };
    let all = |results: &[Option<bool>]| match results {
        results if results.contains(&Some(false)) => Some(false),
        results if results.contains(&None) => None,
        _ => Some(true),
    };
    let alternatives: Vec<_> = alternatives
        .map(|alternative| {
            let terms = alternative.split(|it| it.known() == Some("-a"));
            let terms: Vec<_> = terms.map(|term| single(term, state, world)).collect();
            all(&terms)
        })
        .collect();
    any(&alternatives)
}

/// Evaluates one term: with `!`, of one operand, or of two.
fn single(term: &[Argument], state: &State, world: &dyn World) -> Option<bool> {
    match term {
        [] => Some(false),
        [not, rest @ ..] if not.known() == Some("!") && !rest.is_empty() => {
            single(rest, state, world).map(|holds| !holds)
        }
        [text] => text.known().map(|text| !text.is_empty()),
        [operator, operand] => {
            let operand = operand.known()?;
            match operator.known()? {
                "-z" => Some(operand.is_empty()),
                "-n" => Some(!operand.is_empty()),
                operator => of_file(operator, operand, state, world),
            }
        }
        [one, operator, other] => compare(one.known()?, operator.known()?, other.known()?),
        _ => None,
    }
}

fn of_file(operator: &str, path: &str, state: &State, world: &dyn World) -> Option<bool> {
    let (device, path) = split(path);
    let device = device.or_else(|| state.get("root"))?;
    if !world.is_seen(device) {
        return None;
    }
    let found = world.stat(device, path);
    let holds = |check: fn(&Stat) -> bool| Some(found.as_ref().is_some_and(check));
    match operator {
        "-e" => holds(|_| true),
        "-f" => holds(|it| it.kind != Kind::Folder),
        "-d" => holds(|it| it.kind == Kind::Folder),
        "-s" => holds(|it| it.kind != Kind::Folder && it.size > 0),
        _ => None,
    }
}

fn compare(one: &str, operator: &str, other: &str) -> Option<bool> {
    let numbers = || Some((one.parse::<i64>().ok()?, other.parse::<i64>().ok()?));
    match operator {
        "=" | "==" => Some(one == other),
        "!=" => Some(one != other),
        "-eq" => numbers().map(|(a, b)| a == b),
        "-ne" => numbers().map(|(a, b)| a != b),
        "-lt" => numbers().map(|(a, b)| a < b),
        "-le" => numbers().map(|(a, b)| a <= b),
        "-gt" => numbers().map(|(a, b)| a > b),
        "-ge" => numbers().map(|(a, b)| a >= b),
        _ => None,
    }
}
