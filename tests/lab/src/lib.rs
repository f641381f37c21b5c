//! Measuring for the benchmarks that run inside a rig ([`measure`]), and reading documents for the tests that
//! compare them with programs ([`documented`]).

pub mod documented;
pub mod measure;
