//! Helpers for the tests of all modules.

use proptest::prelude::ProptestConfig;

/// Returns a configuration for at least `cases` cases of each property. A long run may configure more.
pub(crate) fn at_least(cases: u32) -> ProptestConfig {
    let asked = ProptestConfig::default();
    ProptestConfig {
        cases: asked.cases.max(cases),
        ..asked
    }
}
