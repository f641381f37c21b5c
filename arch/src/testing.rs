//! Helpers for the tests of all modules.

use proptest::prelude::ProptestConfig;

/// Returns a configuration with at least `cases` cases of a property; more if a long run asks for more.
pub(crate) fn at_least(cases: u32) -> ProptestConfig {
    let asked = ProptestConfig::default();
    ProptestConfig {
        cases: asked.cases.max(cases),
        ..asked
    }
}
