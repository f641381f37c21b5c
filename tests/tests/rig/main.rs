//! Tests with stock Linux guests. The lab runs the tests of each module in one process, one after another, because
//! most of them share guests (`Running::shared`).

mod actions;
mod api;
mod boot;
mod churn;
mod cli;
mod cli_vm;
mod clock;
mod coexist;
mod conformance;
mod control;
mod definitions;
mod events_files;
mod explain;
mod features;
mod hist;
mod kernels;
mod kexec;
mod modules;
mod nmi;
mod oops;
mod optimized;
mod pause;
mod probes;
mod reads;
mod returns;
mod scale;
mod script;
mod soak;
mod stacks;
mod stress;
mod stripped;
mod stuck;
mod syscalls;
mod verdicts;
