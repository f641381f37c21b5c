//! Positions in a text.

use std::hash::{Hash, Hasher};

/// Position in the text that something was read from, in characters from 0.
///
/// Two columns always compare as equal, so that values are equal regardless of their positions in their texts.
#[derive(Clone, Copy, Debug, Default, Eq)]
pub struct Column(pub usize);

impl PartialEq for Column {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Hash for Column {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}
