//! The setup header of a `bzImage` (boot.rst, "The Real-Mode Kernel Header"): the position of the packed kernel
//! in the file, and the bytes that the boot parameters take over.

use super::error::KernelError;

/// End of the header's room in the boot parameters.
const LIMIT: usize = 0x290;

const SECTOR: usize = 512;
const MAGIC: &[u8; 4] = b"HdrS";

/// Boot protocol 2.08, which introduced `payload_offset` and `payload_length`.
const OLDEST: u16 = 0x0208;

/// The setup header of a `bzImage`: its bytes in the file, from [`SetupHeader::START`] on, and the position of
/// the payload.
#[derive(Debug)]
pub struct SetupHeader {
    bytes: Vec<u8>,
    payload_start: usize,
    payload_len: usize,
}

impl SetupHeader {
    /// Offset of the header, in the file as in the boot parameters.
    pub const START: usize = 0x1f1;

    /// Returns the header of `image`, or `None` if it has none.
    pub(super) fn find(image: &[u8]) -> Result<Option<Self>, KernelError> {
        if image.get(0x202..0x206) != Some(MAGIC) {
            return Ok(None);
        }
        let damaged = |what: &str| KernelError::Damaged {
            what: what.to_owned(),
        };
        let truncated = || damaged("it ends inside the setup header");
        let version = u16::from_le_bytes(field(image, 0x206).ok_or_else(truncated)?);
        if version < OLDEST {
            return Err(KernelError::OldProtocol(version));
        }
        // The jump at 0x200 leads past the header, so its offset gives the header's end.
        let [jump] = field(image, 0x201).ok_or_else(truncated)?;
        let end = (0x202 + usize::from(jump)).min(LIMIT);
        let bytes = image.get(Self::START..end).ok_or_else(truncated)?.to_vec();
        if end < 0x250 {
            return Err(damaged("its setup header is too short"));
        }

        // Zero means four, for historical reasons.
        let [sectors] = field(image, Self::START).ok_or_else(truncated)?;
        let sectors = if sectors == 0 {
            4
        } else {
            usize::from(sectors)
        };
        let protected = (sectors + 1) * SECTOR;
        let word = |at| -> Result<usize, KernelError> {
            let word = u32::from_le_bytes(field(image, at).ok_or_else(truncated)?);
            usize::try_from(word).map_err(|_| truncated())
        };
        let payload_len = word(0x24c)?;
        let payload_start = protected
            .checked_add(word(0x248)?)
            .ok_or_else(|| damaged("its payload lies beyond any file"))?;
        Ok(Some(Self {
            bytes,
            payload_start,
            payload_len,
        }))
    }

    /// Returns the header's bytes, which belong at [`Self::START`] of the boot parameters.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the highest address at which the initramfs may have a byte.
    #[must_use]
    pub fn initrd_max(&self) -> u64 {
        // A limit below that of the earliest kernels is not plausible.
        self.word(0x22c).max(0x37ff_ffff)
    }

    /// Returns the maximum length of the command line in bytes, without the closing zero.
    #[must_use]
    pub fn cmdline_max(&self) -> usize {
        usize::try_from(self.word(0x238)).unwrap_or(usize::MAX)
    }

    /// Returns the alignment in bytes that the kernel needs for its addresses (`kernel_alignment`).
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.word(0x230)
    }

    /// Returns the number of bytes that the kernel needs from its start on, before it knows the memory map
    /// (`init_size`).
    #[must_use]
    pub fn init_size(&self) -> u64 {
        self.word(0x260)
    }

    /// Returns the 32-bit field at the offset `at`; 0 if the header is too short to have it.
    fn word(&self, at: usize) -> u64 {
        field(&self.bytes, at - Self::START)
            .map_or(0, u32::from_le_bytes)
            .into()
    }

    /// Returns the packed kernel in `image`, which must be the file of this header.
    pub(super) fn payload<'a>(&self, image: &'a [u8]) -> Result<&'a [u8], KernelError> {
        let end = self.payload_start.checked_add(self.payload_len);
        end.and_then(|end| image.get(self.payload_start..end))
            .ok_or_else(|| KernelError::Damaged {
                what: format!(
                    "its payload of {} bytes begins at {:#x}, but the file has {} bytes",
                    self.payload_len,
                    self.payload_start,
                    image.len()
                ),
            })
    }
}

fn field<const N: usize>(image: &[u8], at: usize) -> Option<[u8; N]> {
    image.get(at..)?.first_chunk().copied()
}
