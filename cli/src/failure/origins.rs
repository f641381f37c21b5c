//! The text that the user typed for each generated definition, so that messages can show it.

use std::collections::HashMap;

use hvprobe_spec::ParseError;

/// The text that the user typed for each generated definition, by definition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origins(HashMap<String, String>);

impl Origins {
    /// Records that the definition `made` was generated from `typed`.
    pub(crate) fn add(&mut self, made: String, typed: String) {
        self.0.insert(made, typed);
    }

    /// Returns whether `definition` was generated.
    pub(crate) fn has(&self, definition: &str) -> bool {
        self.0.contains_key(definition)
    }

    /// Returns what the user typed for `definition`, with a caret under the mistake. For a generated definition the
    /// caret appears only if the text from the mistake to the end is the same in both, as with a mistake in a
    /// filter.
    pub(crate) fn render(&self, definition: &str, error: &ParseError) -> String {
        let Some(typed) = self.0.get(definition) else {
            return error.render(definition);
        };
        let length = |text: &str| text.chars().count();
        let behind = length(definition).saturating_sub(error.column);
        let column = length(typed).checked_sub(behind);
        let is_same = |column: &usize| {
            let of_made = definition.chars().skip(error.column);
            typed.chars().skip(*column).eq(of_made)
        };
        match column.filter(is_same) {
            Some(column) => {
                let message = error.message.clone();
                ParseError { column, message }.render(typed)
            }
            None => {
                let picture = error.render(typed);
                picture.lines().next().unwrap_or_default().to_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_typed_is_shown_and_pointed_at_where_it_is_the_same() {
        let made = "p:probe/vfs_read vfs_read count=%dx:x64 if cuont > 3";
        let mut origins = Origins::default();
        origins.add(made.to_owned(), "vfs_read count if cuont > 3".to_owned());
        let shown = |text: &str, column: usize| {
            let message = String::new();
            origins.render(text, &ParseError { column, message })
        };
        assert_eq!(
            shown(made, 43),
            "vfs_read count if cuont > 3\n                  ^"
        );
        assert_eq!(shown(made, 17), "vfs_read count if cuont > 3");
        assert_eq!(shown("p a b", 4), "p a b\n    ^");
    }
}
