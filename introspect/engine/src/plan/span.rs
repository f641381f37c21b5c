//! The span that a jump at a probepoint would displace, and the control flow into it.
//!
//! Invariant: a returned span can be replaced by a jump unless a task was interrupted inside it (checked by
//! [`crate::registry::quiescence`]) or another probe is in it (checked by [`crate::registry::optimize`]). Where the
//! guest has patched the function itself, with a kprobe or while it rewrites its text, some branches of the
//! function may be hidden. Then only spans of a single instruction are returned.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{JUMP, Span};
use hvprobe_arch::insn::instruction_len;
use hvprobe_arch::trap::INT3;
use hvprobe_linux::image::{Forbidden, KernelImage};
use hvprobe_linux::symbols::Symbol;

use crate::plan::kernel::Owner;
use crate::plan::text::{ImageText, PristineText, function};
use crate::unoptimized::Unoptimized;

/// Returns the span that a jump at `at` in the function `symbol` would displace. `forbidden_as_is` takes an address
/// and the byte that is there now, and returns why that byte must stay.
///
/// # Errors
/// Why no jump is possible.
pub(crate) fn span(
    symbol: Symbol<'_>,
    at: Gva,
    owner: &Owner<'_>,
    text: &dyn PristineText,
    forbidden_as_is: &dyn Fn(Gva, u8) -> Option<Forbidden>,
) -> Result<Span, Unoptimized> {
    let code = function(symbol, text);
    let span = Span::find(&code, symbol.addr, at)?;
    // A place that the kernel patches may begin before the span and reach into it.
    let mut byte = span.at();
    while byte < span.end() {
        let offset = byte.offset_from(symbol.addr).map(usize::try_from);
        let is = offset.and_then(|offset| code.get(offset.ok()?));
        let as_is = || forbidden_as_is(byte, *is?);
        if let Some(why) = owner.forbidden(byte).or_else(as_is) {
            return Err(Unoptimized::Forbidden { at: byte, why });
        }
        if owner.has_fixup(byte) {
            return Err(Unoptimized::Fixup { at: byte });
        }
        byte = byte.wrapping_add(1);
    }
    let inside = at.wrapping_add(1);
    if span.interior().next().is_none() {
        return Ok(span);
    }
    let Owner::Image(image) = owner else {
        // The targets of a module's jump labels are not read.
        let from = "a jump label of the module";
        return Err(Unoptimized::Landing { from });
    };
    if let Some(at) = hidden(symbol, &code, image) {
        return Err(Unoptimized::Hidden { at });
    }
    if image.has_landing(inside, span.end()) {
        let from = "a jump label or the exception table";
        return Err(Unoptimized::Landing { from });
    }
    // The compiler moves unlikely parts of a function elsewhere. These parts jump back into the function.
    for part in image.symbols().parts(symbol.name) {
        let code = function(part, text);
        let from = "the function's unlikely part";
        if let Some(at) = hidden(part, &code, image) {
            return Err(Unoptimized::Hidden { at });
        }
        if span.check_branches(&code, part.addr).is_err() {
            return Err(Unoptimized::Landing { from });
        }
    }
    Ok(span)
}

/// Returns an address in `code`, the code of the function `symbol`, at which a patch hides the image's instruction;
/// `None` if there is no such patch.
///
/// At boot a kernel replaces whole instructions: it never puts an int3 where an instruction began, or a jump over
/// several instructions. The guest's kprobes do both, and `text_poke_bp` temporarily puts an int3 where an
/// instruction began.
fn hidden(symbol: Symbol<'_>, code: &[u8], image: &KernelImage) -> Option<Gva> {
    let own = function(symbol, &ImageText(image));
    let mut offset = 0;
    loop {
        let at = symbol.addr.wrapping_add(offset as u64);
        let rest = own.get(offset..)?;
        let len = instruction_len(rest, at)?;
        let (now, was) = (code.get(offset)?, rest.first()?);
        let is_patched = match *now {
            INT3 => true,
            JMP => len != JUMP,
            _ => false,
        };
        if is_patched && now != was {
            return Some(at);
        }
        offset += len;
    }
}

/// Opcode of a near jump.
const JMP: u8 = 0xe9;
