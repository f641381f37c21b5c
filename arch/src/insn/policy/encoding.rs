//! Parts of an instruction's encoding that the decoder does not keep.

/// Prefixes and opcode as they were encoded.
pub(super) struct Encoding<'a> {
    pub(super) operand_size: bool,
    pub(super) repne: bool,
    pub(super) rep: bool,
    /// The bytes from the opcode on.
    pub(super) opcode: &'a [u8],
}

impl<'a> Encoding<'a> {
    pub(super) fn of(bytes: &'a [u8]) -> Self {
        // A REX prefix counts only just before the opcode, but is allowed, without effect, earlier.
        let is_prefix = |byte: &u8| {
            matches!(
                byte,
                0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3
            )
        };
        let count = bytes.iter().take_while(|byte| is_prefix(byte)).count();
        let (prefixes, opcode) = bytes.split_at(count);
        Self {
            operand_size: prefixes.contains(&0x66),
            repne: prefixes.contains(&0xf2),
            rep: prefixes.contains(&0xf3),
            opcode,
        }
    }
}
