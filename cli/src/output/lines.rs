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

/// The lines of a kernel and of modules, as far as they were asked for.
#[derive(Debug)]
pub(crate) struct Lines {
    kernel: Option<SourceLines>,
    modules: Vec<SourceLines>,
    told: Mutex<HashMap<u64, Option<SourceLine>>>,
}

impl Lines {
    /// Those that `kernel` and `modules` tell.
    pub(crate) fn new(kernel: Option<Sources>, modules: Vec<Sources>) -> Self {
        Self {
            kernel: kernel.map(SourceLines::new),
            modules: modules.into_iter().map(SourceLines::new).collect(),
            told: Mutex::default(),
        }
    }

    /// The line of what is at `address`, `offset` bytes into `symbol`, which is `MODULE:SYMBOL` in that build of a
    /// module.
    pub(super) fn at(
        &self,
        address: u64,
        symbol: &str,
        offset: u64,
        build_id: Option<&[u8]>,
    ) -> Option<SourceLine> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = told.get(&address) {
            return line.clone();
        }
        let (lines, name) = match symbol.split_once(':') {
            None => (self.kernel.as_ref(), symbol),
            Some((module, name)) => {
                let mut modules = self.modules.iter();
                let lines = modules.find(|lines| lines.is_of(module, build_id));
                (lines, name)
            }
        };
        let found = lines?.at(name, offset).unwrap_or_else(|error| {
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
