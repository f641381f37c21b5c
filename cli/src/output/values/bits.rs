//! Numbers in a range of the bits of a byte string.
//!
//! Invariant: for all offsets and widths, only bits of the byte string are read.

/// Maximum number of bits of a number.
const WIDEST: u32 = 128;

/// Returns the number in `width` bits of `bytes`, little-endian, from bit `offset` on; `None` if some of these
/// bits are missing.
pub(crate) fn unsigned(bytes: &[u8], offset: u32, width: u32) -> Option<u128> {
    if width == 0 || width > WIDEST {
        return None;
    }
    let first = usize::try_from(offset / 8).ok()?;
    let shift = offset % 8;
    let bytes = bytes.get(first..)?;
    let wanted = usize::try_from((shift + width).div_ceil(8)).ok()?;
    let bytes = bytes.get(..wanted)?;
    // Up to 17 bytes are read. If the shift leaves room at the top of the 128 bits, the last byte fills it.
    let number = bytes.iter().enumerate().fold(0_u128, |number, (at, byte)| {
        let byte = u128::from(*byte);
        match u32::try_from(at * 8) {
            Ok(at) if at >= shift => number | byte.checked_shl(at - shift).unwrap_or(0),
            _ => number | byte >> shift,
        }
    });
    Some(number & (u128::MAX >> (WIDEST - width)))
}

/// Returns the lowest `width` bits of `number` as a two's complement number.
pub(crate) fn signed(number: u128, width: u32) -> i128 {
    let above = WIDEST.saturating_sub(width.clamp(1, WIDEST));
    (number << above).cast_signed() >> above
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_counted_from_the_lowest_of_the_first_byte() {
        let bytes = 0x8899_aabb_ccdd_eeff_u64.to_le_bytes();
        assert_eq!(unsigned(&bytes, 0, 8), Some(0xff));
        assert_eq!(unsigned(&bytes, 4, 8), Some(0xef));
        assert_eq!(unsigned(&bytes, 8, 16), Some(0xddee));
        assert_eq!(unsigned(&bytes, 0, 64), Some(0x8899_aabb_ccdd_eeff));
        assert_eq!(unsigned(&bytes, 63, 1), Some(1));
        assert_eq!(unsigned(&bytes, 62, 1), Some(0));
        let long: Vec<u8> = (1..=17).collect();
        let all = u128::from_le_bytes(long[..16].try_into().unwrap());
        assert_eq!(unsigned(&long, 0, 128), Some(all));
        assert_eq!(unsigned(&long, 1, 128), Some(all >> 1 | 1 << 127));
    }

    #[test]
    fn bits_that_are_not_there_are_no_number() {
        for (offset, width) in [
            (0, 0),
            (0, 9),
            (1, 8),
            (8, 1),
            (u32::MAX, 1),
            (u32::MAX, u32::MAX),
            (0, 129),
        ] {
            assert_eq!(unsigned(&[0xff], offset, width), None, "{offset} {width}");
        }
        assert_eq!(unsigned(&[], 0, 1), None);
    }

    #[test]
    fn the_highest_bit_is_the_sign() {
        assert_eq!(signed(0b101, 3), -3);
        assert_eq!(signed(0b101, 4), 5);
        assert_eq!(signed(0xffff_ff9c, 32), -100);
        assert_eq!(signed(u128::MAX, 128), -1);
        assert_eq!(signed(1, 1), -1);
        assert_eq!((signed(1, 0), signed(1, 1000)), (-1, 1));
    }
}
