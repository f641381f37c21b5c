//! The lines that addresses of a kernel are of, for stacks. No machine is needed.

use std::sync::OnceLock;

use hvprobe_arch::Gva;
use hvprobe_linux::debug_info::{SourceLine, TextUnits};

use crate::sources::{Sources, SourcesError};

/// The lines of a kernel's text.
#[derive(Debug)]
pub struct SourceLines {
    sources: Sources,
    /// When they are asked for first.
    units: OnceLock<TextUnits>,
}

impl SourceLines {
    /// Those of which `sources` tell.
    #[must_use]
    pub fn new(sources: Sources) -> Self {
        let units = OnceLock::new();
        Self { sources, units }
    }

    /// The line of what is `offset` bytes into `symbol`, wherever the kernel was loaded to; none, if that cannot be
    /// told, or if there are several symbols of that name.
    ///
    /// # Errors
    /// When the debug information is damaged.
    pub fn at(&self, symbol: &str, offset: u64) -> Result<Option<SourceLine>, SourcesError> {
        let Ok(symbol) = self.sources.symbols().lookup(symbol) else {
            return Ok(None);
        };
        let info = self.sources.info()?;
        let units = match self.units.get() {
            Some(units) => units,
            None => {
                let read = info.text_units()?;
                self.units.get_or_init(|| read)
            }
        };
        let at = Gva(symbol.addr.0.wrapping_add(offset));
        Ok(info.line_at(units, at)?)
    }
}
