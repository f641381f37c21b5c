//! What tests of all modules share.

use proptest::prelude::ProptestConfig;

/// So many cases of a property, or as many as a long run asks for if these are more.
pub(crate) fn at_least(cases: u32) -> ProptestConfig {
    let asked = ProptestConfig::default();
    ProptestConfig {
        cases: asked.cases.max(cases),
        ..asked
    }
}
