//! Stopping all vCPUs, and resuming them.

use std::sync::atomic;

mod attention;
mod barrier;
pub(crate) mod control;
