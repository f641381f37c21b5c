//! Kernel text without our patches.

use hvprobe_arch::Gva;
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::symbols::Symbol;

/// Kernel text in its present state, without our own patches.
pub(crate) trait PristineText {
    /// Reads text from `at` into `into` as far as it is readable; returns the number of bytes.
    fn read(&self, at: Gva, into: &mut [u8]) -> usize;

    /// Returns whether boot-time patching is over.
    fn is_final(&self) -> bool;
}

/// The image's own bytes, for checks before the guest has final text.
pub(crate) struct ImageText<'a>(pub(crate) &'a KernelImage);

impl PristineText for ImageText<'_> {
    fn read(&self, at: Gva, into: &mut [u8]) -> usize {
        // The last function of a section may be shorter than the requested length.
        for len in (1..=into.len()).rev() {
            if let Some(bytes) = self.0.bytes_at(at, len) {
                into[..len].copy_from_slice(bytes);
                return len;
            }
        }
        0
    }

    fn is_final(&self) -> bool {
        false
    }
}

/// Maximum size of a function. The functions of a stock kernel are far smaller; a larger "function" is a hole
/// in the symbol table.
pub(crate) const MAX_FUNCTION: u64 = 1 << 20;

/// Returns the code of a function, as far as it is readable.
pub(crate) fn function(symbol: Symbol<'_>, text: &dyn PristineText) -> Vec<u8> {
    let size = usize::try_from(symbol.size.min(MAX_FUNCTION)).unwrap_or(0);
    let mut code = vec![0; size];
    let got = text.read(symbol.addr, &mut code);
    code.truncate(got);
    code
}
