//! Finds the source lines of addresses in a kernel or a module, for stacks. Needs no machine.

use hvprobe_linux::debug_info::SourceLine;

use super::sources::{Sources, SourcesError};

/// Source lines of the text of a kernel or of a module.
#[derive(Debug)]
pub struct SourceLines(Sources);

impl SourceLines {
    /// Creates the source lines from the debug information of `sources`.
    #[must_use]
    pub fn new(sources: Sources) -> Self {
        Self(sources)
    }

    /// Returns whether the lines belong to the build `build_id` of the module called `name`. In names, `-` and `_`
    /// are the same, as for `modprobe`.
    #[must_use]
    pub fn is_of(&self, name: &str, build_id: Option<&[u8]>) -> bool {
        let own = self.0.module().map(|own| own.replace('-', "_"));
        own == Some(name.replace('-', "_")) && build_id == Some(self.0.build_id())
    }

    /// Returns the source line of the address `offset` bytes into `symbol`. Where the kernel or module was loaded
    /// does not matter. `None` if the line is unknown, or if the name `symbol` is unknown or not unique.
    ///
    /// # Errors
    /// When the debug information is damaged.
    pub fn at(&self, symbol: &str, offset: u64) -> Result<Option<SourceLine>, SourcesError> {
        let Ok(symbol) = self.0.symbols().lookup(symbol) else {
            return Ok(None);
        };
        let at = symbol.addr.wrapping_add(offset);
        Ok(self.0.info()?.line_at(self.0.linked(at))?)
    }
}
