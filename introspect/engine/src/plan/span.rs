//! What a jump at a probepoint would displace, and whether anything but the function's own branches
//! leads there.
//!
//! Invariant: a span that is found can be replaced, but for who was interrupted inside it
//! ([`crate::registry::quiescence`]) and who else is probed there ([`crate::registry::optimize`]). Where the guest
//! has patched the function itself, with a kprobe or while it rewrites its text, not all of its branches are to be
//! seen: nothing but a single instruction is replaced there.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{JUMP, Span};
use hvprobe_arch::insn::instruction_len;
use hvprobe_arch::trap::INT3;
use hvprobe_linux::image::{Forbidden, KernelImage};
use hvprobe_linux::symbols::Symbol;

use crate::plan::kernel::Owner;
use crate::plan::text::{ImageText, PristineText, function};
use crate::unoptimized::Unoptimized;

/// What a jump at `at` in the function `symbol` would displace. `forbidden_as_is` tells whether a
/// byte, being what it is, must stay.
///
/// # Errors
/// Why there can be no jump.
pub(crate) fn span(
    symbol: Symbol<'_>,
    at: Gva,
    owner: &Owner<'_>,
    text: &dyn PristineText,
    forbidden_as_is: &dyn Fn(Gva, u8) -> Option<Forbidden>,
) -> Result<Span, Unoptimized> {
    let code = function(symbol, text);
    let span = Span::find(&code, symbol.addr, at)?;
    // A site of the kernel's may begin before the span and reach into it.
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
        // Where a module's jump labels lead is not read.
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
    // The compiler moves unlikely parts of a function elsewhere, from where they jump back.
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

/// Where in `code`, which is that of the function `symbol`, an instruction of the image's is not to be seen.
///
/// At boot a kernel replaces whole instructions: it never puts an int3 where an instruction began, nor a jump over
/// several. Its kprobes do both, and `text_poke_bp` puts an int3 there for a moment.
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

/// The opcode of a near jump.
const JMP: u8 = 0xe9;
