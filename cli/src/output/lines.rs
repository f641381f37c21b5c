//! Lines of sources beside the addresses of stacks.
//!
//! Invariant: no more than [`MOST`] lines are kept, whatever stacks a guest has.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use hvprobe_server::{SourceLine, SourceLines, Sources};
use tracing::warn;

use super::harmless;

/// The most addresses whose lines are kept.
const MOST: usize = 16_384;

/// The lines of one kernel, as far as they were asked for.
#[derive(Debug)]
pub(crate) struct Lines {
    sources: SourceLines,
    told: Mutex<HashMap<u64, Option<SourceLine>>>,
}

impl Lines {
    /// Those that `sources` tell.
    pub(crate) fn new(sources: Sources) -> Self {
        Self {
            sources: SourceLines::new(sources),
            told: Mutex::default(),
        }
    }

    /// The line of what is at `address`, `offset` bytes into `symbol`.
    pub(super) fn at(&self, address: u64, symbol: &str, offset: u64) -> Option<SourceLine> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = told.get(&address) {
            return line.clone();
        }
        let found = self.sources.at(symbol, offset).unwrap_or_else(|error| {
            warn!(symbol, offset, error = %error, "its line cannot be told");
            None
        });
        let line = found.map(|it| SourceLine {
            file: harmless(it.file.as_bytes()),
            ..it
        });
        if told.len() >= MOST {
            told.clear();
        }
        told.insert(address, line.clone());
        line
    }
}
