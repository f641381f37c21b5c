//! Stopping all virtual CPUs, and letting them go on.

use std::sync::atomic;

mod attention;
mod barrier;
pub(crate) mod control;
