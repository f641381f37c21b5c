//! Targets for the measured costs.

use crate::options::Options;
use crate::ours::{EMULATED, OPTIMIZED, WITH_STACK};
use crate::slowdown::Slower;
use crate::subjects::{
    BUSY_FUNCTION, DEEP, EXIT, FETCHES, GDB, OWN_BOTH, OWN_DEEP, OWN_FTRACE, OWN_INT3,
    OWN_OPTIMIZED, OWN_RETURN, OWN_STACK, SAME_PLACE,
};
use crate::table::{self, Row};
use crate::targets::{self, Ratio, Runs, Target};

/// Limit for a hit with a stack of sixteen frames, in instructions.
const DEEP_TICKS: f64 = 400.0;
const RATIOS: [Ratio; 14] = [
    ratio(EMULATED.name, EXIT, 1.25),
    ratio("return probe", EMULATED.name, 1.75),
    ratio("kprobe + return probe", "return probe", 1.25),
    ratio(OPTIMIZED.name, OWN_FTRACE, 0.25),
    ratio(OPTIMIZED.name, OWN_INT3, 0.25),
    ratio(SAME_PLACE, OWN_OPTIMIZED, 1.0),
    ratio(WITH_STACK.name, OWN_STACK, 0.25),
    ratio(DEEP, OWN_DEEP, 0.25),
    ratio("return probe, optimized", OWN_RETURN, 0.35),
    ratio("kprobe + return probe, optimized", OWN_BOTH, 0.35),
    ratio(FETCHES[0].name, FETCHES[0].own, 0.25),
    ratio(FETCHES[1].name, FETCHES[1].own, 0.25),
    ratio(FETCHES[2].name, FETCHES[2].own, 0.25),
    ratio(EMULATED.name, GDB, 0.1),
];
const RUNS: [Runs; 12] = [
    runs(EMULATED.name, 1),
    runs("kprobe, boosted", 1),
    runs("kprobe, stepped", 2),
    runs("return probe", 1),
    runs("return probe, exit at the return", 2),
    runs(OPTIMIZED.name, 0),
    runs(WITH_STACK.name, 0),
    runs(DEEP, 0),
    runs("return probe, optimized", 0),
    runs(FETCHES[0].name, 0),
    runs(FETCHES[1].name, 0),
    runs(FETCHES[2].name, 0),
];
/// Limit for the number of instructions that the engine executes for an emulated hit.
const INSTRUCTIONS: f64 = 1000.0;
/// Limit for the slowdown of a program by an optimized probe on its path, in percent.
const SLOWER: f64 = 5.0;

const fn ratio(of: &'static str, to: &'static str, at_most: f64) -> Ratio {
    Ratio { of, to, at_most }
}

const fn runs(of: &'static str, at_most: u32) -> Runs {
    Runs { of, at_most }
}

/// Returns all targets with their measured values.
pub(crate) fn all(options: &Options, rows: &[Row], ways: &[Slower]) -> Vec<Target> {
    let slower = ways.iter().find(|way| way.name == OPTIMIZED.name);
    let mut targets = vec![Target {
        what: format!(
            "{} on {BUSY_FUNCTION}: copying slower by percent",
            OPTIMIZED.name
        ),
        at_most: SLOWER,
        measured: slower.map(|way| way.percent),
    }];
    targets.extend(RATIOS.iter().map(|ratio| ratio.target(rows)));
    targets.push(Target {
        what: format!("{}: instructions of the engine", EMULATED.name),
        at_most: INSTRUCTIONS,
        measured: options.counted_as("emulated").map(f64::from),
    });
    if options.ticks_are_instructions {
        targets.push(Target {
            what: format!("{DEEP}: instructions"),
            at_most: DEEP_TICKS,
            measured: table::named(rows, DEEP).map(|row| row.fastest),
        });
    }
    targets.extend(RUNS.iter().map(|runs| runs.target(rows)));
    targets.push(targets::ioctls(rows));
    targets
}
