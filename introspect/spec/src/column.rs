//! Where something stands in a text.

use std::hash::{Hash, Hasher};

/// Where something stands in the text it was read from, in characters from 0.
///
/// It takes no part in comparisons: what was read is the same wherever it stood.
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
