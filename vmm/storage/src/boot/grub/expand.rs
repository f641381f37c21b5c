//! Expands words to arguments.

use super::lexer::{Part, Word};
use super::state::State;

/// An argument of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Argument {
    Known(String),
    /// It contains this variable, whose value is unknown.
    Unknown(String),
}

impl Argument {
    pub(super) fn known(&self) -> Option<&str> {
        match self {
            Self::Known(text) => Some(text),
            Self::Unknown(_) => None,
        }
    }

    pub(super) fn into_value(self) -> Option<String> {
        match self {
            Self::Known(text) => Some(text),
            Self::Unknown(_) => None,
        }
    }
}

/// Expands `words`. The value of a variable without quotes is split at spaces, and gives no argument if it is
/// empty.
pub(super) fn expand(words: &[Word], state: &State) -> Vec<Argument> {
    let mut arguments = Vec::new();
    for word in words {
        let mut argument: Option<Argument> = word.is_quoted.then(|| Argument::Known(String::new()));
        for part in &word.parts {
            match part {
                Part::Text(text) => add(&mut argument, text),
                Part::Variable { name, is_quoted } => match state.get(name) {
                    None => argument = Some(Argument::Unknown(name.clone())),
                    Some(value) if *is_quoted => add(&mut argument, value),
                    Some(value) => {
                        for (n, piece) in value.split([' ', '\t', '\n']).enumerate() {
                            if n > 0 {
                                arguments.extend(argument.take());
                            }
                            if !piece.is_empty() {
                                add(&mut argument, piece);
                            }
                        }
                    }
                },
            }
        }
        arguments.extend(argument);
    }
    arguments
}

fn add(argument: &mut Option<Argument>, text: &str) {
    match argument {
        Some(Argument::Known(known)) => known.push_str(text),
        Some(Argument::Unknown(_)) => {}
        None => *argument = Some(Argument::Known(text.to_owned())),
    }
}
