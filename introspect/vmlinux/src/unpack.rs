//! Unpacks the payload of a `bzImage`, to at most [`MAX_KERNEL`] bytes.
//!
//! The payload is one stream, whose first bytes identify the format, followed by the unpacked size as a
//! little-endian 32-bit word. (A gzip stream itself ends with that word.) The word only sizes the buffer; the
//! stream itself determines the length. Besides its output, a stream gets a window of at most 128 MiB, however much
//! it requests.

use std::error::Error;
use std::io::{self, Read};
use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use flate2::read::GzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::StreamingDecoder;

use super::error::{KernelError, MAX_KERNEL};
use super::{elf, xz};

/// Largest window that a zstd stream may request. Linux packs with at most 128 MiB.
const MAX_ZSTD_WINDOW: u64 = 128 << 20;

/// Size of an unpacked block of a legacy lz4 stream (lz4_Frame_format.md, "Legacy frame").
const LZ4_BLOCK: usize = 8 << 20;
const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];

/// Formats of packed kernels that are not supported, by their first bytes.
const UNSUPPORTED: [(&[u8], &str); 3] = [
    (b"BZh", "bzip2"),
    (&[0x5d, 0, 0], "lzma"),
    (&[0x89, b'L', b'Z', b'O', 0], "lzo"),
];

/// Returns the kernel packed in `payload`.
pub(super) fn unpack(payload: &[u8]) -> Result<Vec<u8>, KernelError> {
    if payload.starts_with(elf::MAGIC) {
        return Ok(payload.to_vec());
    }
    let size = expected_size(payload);
    if payload.starts_with(&[0x1f, 0x8b]) {
        read("gzip", GzDecoder::new(payload), size)
    } else if payload.starts_with(&[0xfd, b'7', b'z', b'X', b'Z', 0]) {
        xz::check(payload).map_err(|source| failed("xz", source))?;
        read("xz", XzReader::new(payload, false), size)
    } else if payload.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let stream = StreamingDecoder::new_with_max_window_size(payload, MAX_ZSTD_WINDOW)
            .map_err(|source| failed("zstd", source))?;
        read("zstd", stream, size)
    } else if let Some(blocks) = payload.strip_prefix(&LZ4_MAGIC) {
        lz4(blocks)
    } else {
        let known = UNSUPPORTED
            .iter()
            .find(|(magic, _)| payload.starts_with(magic));
        Err(KernelError::Compression(
            known.map_or("an unknown format", |(_, name)| name),
        ))
    }
}

/// Estimates the size of the kernel in `payload`, in bytes.
fn expected_size(payload: &[u8]) -> usize {
    // Packed kernels have a third to a sixth of the unpacked size. A claim of much more is not trusted before
    // the stream has produced it.
    let believable = (payload.len() as u64).saturating_mul(16).min(MAX_KERNEL);
    let promised = payload
        .last_chunk()
        .map_or(0, |word| u64::from(u32::from_le_bytes(*word)));
    usize::try_from(promised.min(believable)).unwrap_or(0)
}

fn read(format: &'static str, stream: impl Read, size: usize) -> Result<Vec<u8>, KernelError> {
    // The spare byte lets the reader find the end without growing the buffer.
    let mut kernel = Vec::with_capacity(size + 1);
    stream
        .take(MAX_KERNEL + 1)
        .read_to_end(&mut kernel)
        .map_err(|source| failed(format, source))?;
    if kernel.len() as u64 > MAX_KERNEL {
        return Err(KernelError::UnpackedTooLarge);
    }
    Ok(kernel)
}

fn lz4(payload: &[u8]) -> Result<Vec<u8>, KernelError> {
    let blocks = lz4_blocks(payload)?;
    if (blocks.len() * LZ4_BLOCK) as u64 > MAX_KERNEL {
        return Err(KernelError::UnpackedTooLarge);
    }
    // Zeroed as a whole, which costs nothing for fresh memory.
    let mut kernel = vec![0; blocks.len() * LZ4_BLOCK];
    let lengths: Vec<OnceLock<usize>> = blocks.iter().map(|_| OnceLock::new()).collect();
    let work = Mutex::new(
        blocks
            .into_iter()
            .zip(kernel.chunks_mut(LZ4_BLOCK))
            .zip(&lengths),
    );
    // Blocks are independent of each other, so every processor can unpack one.
    let unpack_some = || -> Result<(), KernelError> {
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(((block, place), length)) = next else {
                return Ok(());
            };
            let unpacked = lz4_flex::block::decompress_into(block, place)
                .map_err(|source| failed("lz4", source))?;
            let _ = length.set(unpacked);
        }
    };
    let helpers = thread::available_parallelism().map_or(1, NonZero::get) - 1;
    thread::scope(|scope| {
        let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(unpack_some)).collect();
        let own = unpack_some();
        let theirs = helpers
            .into_iter()
            .try_for_each(|helper| helper.join().unwrap_or_else(|panic| resume_unwind(panic)));
        own.and(theirs)
    })?;
    // All blocks but the last of a stream are full, so bytes move only where streams meet.
    let mut len = 0;
    for (n, unpacked) in lengths.iter().enumerate() {
        let unpacked = unpacked.get().copied().unwrap_or(0);
        let start = n * LZ4_BLOCK;
        if start != len {
            kernel.copy_within(start..start + unpacked, len);
        }
        len += unpacked;
    }
    kernel.truncate(len);
    Ok(kernel)
}

/// Returns the packed blocks of `payload`, where each block follows its packed size. The payload's closing word,
/// its unpacked size, is not marked as such; it is recognised by having no bytes after it.
fn lz4_blocks(mut payload: &[u8]) -> Result<Vec<&[u8]>, KernelError> {
    let cut_short = || failed("lz4", io::Error::from(io::ErrorKind::UnexpectedEof));
    let mut blocks = Vec::new();
    while let Some((head, rest)) = payload.split_first_chunk() {
        // Streams may be concatenated.
        if *head == LZ4_MAGIC {
            payload = rest;
            continue;
        }
        if rest.is_empty() {
            // This is the closing word, not a block.
            payload = rest;
            break;
        }
        let packed = usize::try_from(u32::from_le_bytes(*head)).unwrap_or(usize::MAX);
        let (block, rest) = rest.split_at_checked(packed).ok_or_else(cut_short)?;
        blocks.push(block);
        payload = rest;
    }
    if !payload.is_empty() {
        return Err(cut_short());
    }
    Ok(blocks)
}

fn failed(format: &'static str, source: impl Error + Send + Sync + 'static) -> KernelError {
    KernelError::Unpack {
        format,
        source: source.into(),
    }
}
