//! The lines that addresses of a kernel or of a module are of, for stacks. No machine is needed.

use std::sync::OnceLock;

use hvprobe_arch::Gva;
use hvprobe_linux::debug_info::{SourceLine, TextUnits};

use crate::sources::{Sources, SourcesError};

/// The lines of the text of a kernel or of a module.
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

    /// Whether they are of that build of the module called `name`; as for `modprobe`, `-` and `_` are the same.
    #[must_use]
    pub fn is_of(&self, name: &str, build_id: Option<&[u8]>) -> bool {
        let own = self.sources.module().map(|own| own.replace('-', "_"));
        own == Some(name.replace('-', "_")) && build_id == Some(self.sources.build_id())
    }

    /// The line of what is `offset` bytes into `symbol`, wherever that was loaded to; none, if that cannot be
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
