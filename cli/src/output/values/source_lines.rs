//! Source lines for the addresses of stacks.
//!
//! Invariant: lines are kept for at most [`MOST`] addresses.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use hvprobe_sources::{SourceLine, SourceLines, Sources};
use tracing::warn;

use crate::output::printable::harmless;

/// Maximum number of addresses whose lines are kept.
const MOST: usize = 16_384;

/// Source lines of a kernel and of modules. Lines that were looked up are kept.
#[derive(Debug)]
pub(crate) struct Lines {
    kernel: Option<SourceLines>,
    modules: Vec<SourceLines>,
    cache: Mutex<HashMap<u64, Option<SourceLine>>>,
}

impl Lines {
    /// Makes the source lines from the debug information of `kernel` and `modules`.
    pub(crate) fn new(kernel: Option<Sources>, modules: Vec<Sources>) -> Self {
        Self {
            kernel: kernel.map(SourceLines::new),
            modules: modules.into_iter().map(SourceLines::new).collect(),
            cache: Mutex::default(),
        }
    }

    /// Returns the source line for `address`, which is `offset` bytes into `symbol`. For an address in a module,
    /// `symbol` has the form `MODULE:SYMBOL`, and `build_id` is that of the module.
    pub(super) fn at(
        &self,
        address: u64,
        symbol: &str,
        offset: u64,
        build_id: Option<&[u8]>,
    ) -> Option<SourceLine> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = cache.get(&address) {
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
            warn!(symbol, offset, error = %error, "its line cannot be found");
            None
        });
        let line = found.map(|it| SourceLine {
            file: harmless(it.file.as_bytes()),
            ..it
        });
        if cache.len() >= MOST {
            cache.clear();
        }
        cache.insert(address, line.clone());
        line
    }
}
