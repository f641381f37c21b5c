//! Decoding one instruction.

use crate::Gva;
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction};

/// The length in bytes of the longest instruction (SDM vol. 2, 2.3.11).
pub const MAX_LEN: usize = 15;

/// Why bytes are no instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeFailure {
    /// The bytes are no instruction on any processor.
    Invalid,
    /// The instruction continues past the bytes given.
    Truncated,
}

/// Decodes the first instruction of `code`, which is at `at`.
pub(crate) fn decode(
    code: &[u8],
    at: Gva,
) -> Result<(Instruction, iced_x86::ConstantOffsets), DecodeFailure> {
    let code = &code[..code.len().min(MAX_LEN)];
    let mut decoder = Decoder::with_ip(64, code, at.0, DecoderOptions::NONE);
    let instruction = decoder.decode();
    match decoder.last_error() {
        DecoderError::None if !instruction.is_invalid() => {
            Ok((instruction, decoder.get_constant_offsets(&instruction)))
        }
        // If there are already `MAX_LEN` bytes, more would not help.
        DecoderError::NoMoreBytes if code.len() < MAX_LEN => Err(DecodeFailure::Truncated),
        _ => Err(DecodeFailure::Invalid),
    }
}

/// Iterates over the instructions of `code`, which is at `start`, each with its address. Ends after the first
/// bytes that are no instruction: nothing is known of the bytes after them.
pub(crate) fn instructions(
    code: &[u8],
    start: Gva,
) -> impl Iterator<Item = (Gva, Result<Instruction, DecodeFailure>)> + use<'_> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let rest = code.get(offset..).filter(|rest| !rest.is_empty())?;
        let at = start.wrapping_add(u64::try_from(offset).unwrap_or(u64::MAX));
        let found = decode(rest, at).map(|(instruction, _)| instruction);
        offset = found.map_or(code.len(), |instruction| offset + instruction.len());
        Some((at, found))
    })
}
