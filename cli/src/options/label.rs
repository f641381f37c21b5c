//! `--label NAME=VALUE`.

use std::str::FromStr;

/// Label of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Label {
    pub(crate) name: String,
    pub(crate) value: String,
}

/// Syntax error in a label.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write NAME=VALUE, or NAME=")]
pub(crate) struct BadLabel;

impl FromStr for Label {
    type Err = BadLabel;

    fn from_str(text: &str) -> Result<Self, BadLabel> {
        let (name, value) = text.split_once('=').ok_or(BadLabel)?;
        Ok(Self {
            name: name.to_owned(),
            value: value.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_a_name_and_a_value() {
        let parsed = |text: &str| text.parse::<Label>().map(|it| (it.name, it.value));
        let label = |name: &str, value: &str| Ok((name.to_owned(), value.to_owned()));
        assert_eq!(parsed("team=kernel"), label("team", "kernel"));
        assert_eq!(parsed("ci="), label("ci", ""));
        assert_eq!(parsed("a=b=c"), label("a", "b=c"));
        assert_eq!(parsed("ci"), Err(BadLabel));
    }
}
