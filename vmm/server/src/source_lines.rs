//! The lines that addresses of a kernel or of a module are of, for stacks. No machine is needed.

use hvprobe_arch::Gva;
use hvprobe_linux::debug_info::SourceLine;

use crate::sources::{Sources, SourcesError};

/// The lines of the text of a kernel or of a module.
#[derive(Debug)]
pub struct SourceLines(Sources);

impl SourceLines {
    /// Those of which `sources` tell.
    #[must_use]
    pub fn new(sources: Sources) -> Self {
        Self(sources)
    }

    /// Whether they are of that build of the module called `name`; as for `modprobe`, `-` and `_` are the same.
    #[must_use]
    pub fn is_of(&self, name: &str, build_id: Option<&[u8]>) -> bool {
        let own = self.0.module().map(|own| own.replace('-', "_"));
        own == Some(name.replace('-', "_")) && build_id == Some(self.0.build_id())
    }

    /// The line of what is `offset` bytes into `symbol`, wherever that was loaded to; none, if that cannot be
    /// told, or if there are several symbols of that name.
    ///
    /// # Errors
    /// When the debug information is damaged.
    pub fn at(&self, symbol: &str, offset: u64) -> Result<Option<SourceLine>, SourcesError> {
        let Ok(symbol) = self.0.symbols().lookup(symbol) else {
            return Ok(None);
        };
        let at = Gva(symbol.addr.0.wrapping_add(offset));
        Ok(self.0.info()?.line_at(at)?)
    }
}
