//! Seeds of the random inputs of tests.
//!
//! A run has one seed, which every test program gets in the variables that proptest and our own tests read. It
//! is printed, so that a failure can be repeated.

use std::ffi::OsString;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

/// Variables for the seed: that of proptest, and that for mutations of the fuzz targets' corpus.
const VARIABLES: [&str; 2] = ["PROPTEST_RNG_SEED", "HVPROBE_FUZZ_SEED"];
/// Variable for the seed of the differential test. It is set only if the user asked for a seed. Otherwise the test
/// chooses a seed and prints it, so that a try after a failure in an emulated machine has another seed.
const DIFFERENTIAL: &str = "HVPROBE_DIFFERENTIAL_SEED";
/// Variables that make a run long: the numbers of cases of each property, of cases that a property may reject, of
/// mutations of each input, and of clients that are killed.
const LONG: [(&str, &str); 4] = [
    ("PROPTEST_CASES", "50000"),
    ("PROPTEST_MAX_GLOBAL_REJECTS", "5000000"),
    ("HVPROBE_FUZZ_RUNS", "100000"),
    ("HVPROBE_CLIENTS", "1000"),
];

/// The seed of a run, and whether it is long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seeds {
    seed: u64,
    asked: bool,
    long: bool,
}

impl Seeds {
    /// Makes the seeds from the seed `asked`, or from a random one.
    pub(crate) fn new(asked: Option<u64>, long: bool) -> Self {
        // Shortened, so that it is easy to type.
        let any = || RandomState::new().hash_one("a seed") >> 32;
        Self {
            seed: asked.unwrap_or_else(any),
            asked: asked.is_some(),
            long,
        }
    }

    /// Returns the seeds of round `round`, counted from 1. The first round has the run's own seed.
    pub(crate) fn of_round(self, round: u32) -> Self {
        Self {
            seed: self.seed.wrapping_add(u64::from(round.saturating_sub(1))),
            ..self
        }
    }

    /// Returns the variables for a test program, except those that the user has set.
    pub(crate) fn environment(self) -> Vec<(String, OsString)> {
        let variables = self.variables().into_iter();
        variables
            .filter(|(name, _)| std::env::var_os(name).is_none())
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect()
    }

    fn variables(self) -> Vec<(&'static str, String)> {
        let asked = self.asked.then_some(DIFFERENTIAL);
        let seeds = VARIABLES.into_iter().chain(asked);
        let seeds = seeds.map(|name| (name, self.seed.to_string()));
        let long = LONG.map(|(name, value)| (name, value.to_owned()));
        let long = long.into_iter().filter(|_| self.long);
        seeds.chain(long).collect()
    }
}

impl fmt::Display for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let long = if self.long { "--long " } else { "" };
        write!(f, "again with: {long}--seed {}", self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_has_a_seed_that_can_be_asked_for() {
        let seeds = Seeds::new(Some(7), false);
        assert_eq!(seeds.of_round(1).to_string(), "again with: --seed 7");
        assert_eq!(seeds.of_round(3).to_string(), "again with: --seed 9");
        let variables = seeds.of_round(3).variables();
        let (name, value) = &variables[0];
        assert_eq!(variables.len(), 3);
        assert_eq!(*name, "PROPTEST_RNG_SEED");
        assert_eq!(value, "9");
        assert_eq!(Seeds::new(None, false).variables().len(), 2);
    }

    #[test]
    fn a_long_run_has_many_cases() {
        let variables = Seeds::new(None, true).variables();
        let cases = variables.iter().find(|(name, _)| *name == "PROPTEST_CASES");
        assert_eq!(cases.unwrap().1, "50000");
    }
}
