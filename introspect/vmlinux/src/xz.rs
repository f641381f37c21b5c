//! Checks how much memory an xz stream requests, before anything unpacks it.
//!
//! The decoder allocates memory for a block's dictionary and for the index as soon as it has read their sizes.
//! So the stream's structure is parsed first (xz-file-format.txt, and "LZMA2" in the sources of XZ Utils): each
//! block's filters, the sizes of its chunks, and the number of the index's records, which must equal the number
//! of blocks. The decoder reports any other error of the stream.

use std::io::{self, Read};

/// Largest dictionary of a block, in bytes. Linux packs with at most 128 MiB (scripts/xz_wrap.sh).
const MAX_DICTIONARY: u64 = 128 << 20;

/// Length of a stream header: magic, flags and their CRC32.
const STREAM_HEADER: usize = 12;
const LZMA2: u64 = 0x21;

/// Reason to refuse a stream.
#[derive(Debug, thiserror::Error)]
pub(super) enum XzError {
    #[error("a block asks for a dictionary of {0} bytes; at most {MAX_DICTIONARY} are given")]
    Dictionary(u64),
    #[error("its index promises {records} records for {blocks} blocks")]
    Index { records: u64, blocks: u64 },
    #[error("{0}")]
    Damaged(&'static str),
    #[error(transparent)]
    CutShort(#[from] io::Error),
}

/// Refuses a `stream` that requests too much memory. A stream that is cut short is left to the decoder.
pub(super) fn check(stream: &[u8]) -> Result<(), XzError> {
    match follow(stream) {
        Err(XzError::CutShort(_)) => Ok(()),
        result => result,
    }
}

fn follow(stream: &[u8]) -> Result<(), XzError> {
    let mut rest = stream;
    let header = take(&mut rest, STREAM_HEADER)?;
    let check = match header.get(7).map_or(0, |flags| flags & 0xf) {
        0 => 0,
        id => 4 << ((id - 1) / 3),
    };
    let mut blocks = 0;
    loop {
        let size = usize::from(byte(&mut rest)?);
        if size == 0 {
            break;
        }
        blocks += 1;
        // The size includes its own byte.
        follow_filters(take(&mut rest, size * 4 + 3)?)?;
        let before = rest.len();
        follow_chunks(&mut rest)?;
        let padding = (before - rest.len()).wrapping_neg() % 4;
        take(&mut rest, padding + check)?;
    }
    match number(&mut rest)? {
        records if records != blocks => Err(XzError::Index { records, blocks }),
        _ => Ok(()),
    }
}

/// Checks a block header, from its flags on.
fn follow_filters(mut header: &[u8]) -> Result<(), XzError> {
    let flags = byte(&mut header)?;
    for size in [0x40, 0x80] {
        if flags & size != 0 {
            number(&mut header)?;
        }
    }
    for _ in 0..=flags & 3 {
        let filter = number(&mut header)?;
        let len = usize::try_from(number(&mut header)?).unwrap_or(usize::MAX);
        let properties = take(&mut header, len)?;
        if filter == LZMA2 {
            let size = match *properties {
                [bits @ 0..40] => u64::from(2 | bits & 1) << (bits / 2 + 11),
                _ => u64::from(u32::MAX),
            };
            if size > MAX_DICTIONARY {
                return Err(XzError::Dictionary(size));
            }
        }
    }
    Ok(())
}

/// Skips a block's chunks. A block's last filter always reads LZMA2, whatever the others are.
fn follow_chunks(rest: &mut &[u8]) -> Result<(), XzError> {
    loop {
        let control = byte(rest)?;
        let len = match control {
            0 => return Ok(()),
            1 | 2 => usize::from(big_endian(rest)?) + 1,
            3..=0x7f => return Err(XzError::Damaged("a chunk is of no known kind")),
            _ => {
                // Low half of the unpacked size.
                big_endian(rest)?;
                let packed = usize::from(big_endian(rest)?) + 1;
                packed + usize::from(control >= 0xc0)
            }
        };
        take(rest, len)?;
    }
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], XzError> {
    let (taken, behind) = rest
        .split_at_checked(len)
        .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    *rest = behind;
    Ok(taken)
}

fn bytes<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], XzError> {
    let mut bytes = [0; N];
    rest.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn byte(rest: &mut &[u8]) -> Result<u8, XzError> {
    bytes::<1>(rest).map(|[byte]| byte)
}

fn big_endian(rest: &mut &[u8]) -> Result<u16, XzError> {
    bytes(rest).map(u16::from_be_bytes)
}

/// Reads a number of 1 to 9 bytes with 7 bits each, the lowest first.
fn number(rest: &mut &[u8]) -> Result<u64, XzError> {
    let mut number = 0;
    for shift in (0..63).step_by(7) {
        let byte = byte(rest)?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(XzError::Damaged("a number is longer than any can be"))
}
