//! Code that the programs and tests of this package share: for the benchmarks that run inside a rig ([`measure`]),
//! for the tests that compare documents with programs ([`documented`]), and for the table of what was verified
//! where ([`verified`]).

pub mod documented;
pub mod measure;
pub mod verified;
