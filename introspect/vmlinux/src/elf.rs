//! The kernel's ELF file: checks that it is for x86-64, and finds its segments.

use hvprobe_arch::Gpa;
use object::LittleEndian as Le;
use object::elf::{
    DataEncoding, ELFCLASS64, ELFDATA2LSB, EM_X86_64, ET_EXEC, FileClass, FileHeader64, Machine,
    PT_LOAD,
};
use object::read::elf::{FileHeader, ProgramHeader};

use super::error::KernelError;

/// The first bytes of every ELF file.
pub(super) const MAGIC: &[u8] = b"\x7fELF";

/// Maximum number of segments. Kernels have about five; the pairwise check below is quadratic.
const MAX_SEGMENTS: usize = 64;

/// A part of the kernel in guest memory: `bytes` at `start`, then zeros up to `size`.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Physical address of the first byte.
    pub start: Gpa,
    /// Bytes in the file.
    pub bytes: &'a [u8],
    /// Size in memory, in bytes.
    pub size: u64,
}

impl Segment<'_> {
    /// Returns the address after the last byte.
    #[must_use]
    pub fn end(&self) -> u64 {
        // `segments` has checked that this does not overflow.
        self.start.0.saturating_add(self.size)
    }
}

/// Refuses a file that is not an executable for x86-64.
pub(super) fn check(elf: &[u8]) -> Result<(), KernelError> {
    // Identification and machine are at the same offsets in every ELF file.
    let (class, data) = elf
        .get(4..6)
        .and_then(|id| id.first_chunk())
        .map(|[class, data]| (FileClass(*class), DataEncoding(*data)))
        .ok_or_else(|| damaged("it ends inside the ELF header"))?;
    if !elf.starts_with(MAGIC) {
        return Err(damaged("its payload is no ELF file"));
    }
    let machine = elf
        .get(18..20)
        .and_then(|id| id.first_chunk())
        .ok_or_else(|| damaged("it ends inside the ELF header"))?;
    let machine = Machine(if data == ELFDATA2LSB {
        u16::from_le_bytes(*machine)
    } else {
        u16::from_be_bytes(*machine)
    });
    if machine != EM_X86_64 {
        let found = match machine {
            object::elf::EM_386 => "32-bit x86".to_owned(),
            object::elf::EM_AARCH64 => "arm64".to_owned(),
            object::elf::EM_ARM => "32-bit arm".to_owned(),
            object::elf::EM_RISCV => "riscv".to_owned(),
            object::elf::EM_PPC64 => "ppc64".to_owned(),
            object::elf::EM_S390 => "s390".to_owned(),
            object::elf::EM_LOONGARCH => "loongarch".to_owned(),
            other => format!("ELF machine {}", other.0),
        };
        return Err(KernelError::WrongMachine { found });
    }
    if class != ELFCLASS64 || data != ELFDATA2LSB {
        let found = "a 32-bit or big-endian machine".to_owned();
        return Err(KernelError::WrongMachine { found });
    }
    let header = header(elf)?;
    if header.e_type(Le) != ET_EXEC {
        return Err(KernelError::NotAKernel {
            found: "an ELF file that is not an executable at fixed addresses",
        });
    }
    segments(elf).map(|_| ())
}

/// Returns the physical address of the entry point.
pub(super) fn entry(elf: &[u8]) -> Result<Gpa, KernelError> {
    Ok(Gpa(header(elf)?.e_entry(Le)))
}

/// Returns the segments to load, in the file's order. There is at least one; none is empty, none overlaps
/// another, all end below 2^64, and one of them contains the entry point.
pub(super) fn segments(elf: &[u8]) -> Result<Vec<Segment<'_>>, KernelError> {
    let header = header(elf)?;
    let table = header
        .program_headers(Le, elf)
        .map_err(|_| damaged("its program headers lie outside the file"))?;
    let mut segments: Vec<Segment<'_>> = Vec::new();
    for (index, program) in table.iter().enumerate() {
        if program.p_type(Le) != PT_LOAD || program.p_memsz(Le) == 0 {
            continue;
        }
        let bytes = program
            .data(Le, elf)
            .map_err(|()| damaged(&format!("segment {index} lies outside the file")))?;
        let size = program.p_memsz(Le);
        if bytes.len() as u64 > size {
            return Err(damaged(&format!(
                "segment {index} is larger in the file than in memory"
            )));
        }
        let start = Gpa(program.p_paddr(Le));
        let Some(end) = start.checked_add(size) else {
            return Err(damaged(&format!(
                "segment {index} ends beyond all addresses"
            )));
        };
        if segments
            .iter()
            .any(|other| start.0 < other.end() && other.start < end)
        {
            return Err(damaged(&format!("segment {index} overlaps another one")));
        }
        if segments.len() == MAX_SEGMENTS {
            return Err(damaged(&format!(
                "it has more than {MAX_SEGMENTS} segments"
            )));
        }
        segments.push(Segment { start, bytes, size });
    }
    if segments.is_empty() {
        return Err(damaged("it has nothing to load"));
    }
    let entry = header.e_entry(Le);
    if !segments
        .iter()
        .any(|segment| (segment.start.0..segment.end()).contains(&entry))
    {
        return Err(damaged("its entry point is in none of its segments"));
    }
    Ok(segments)
}

pub(super) fn header(elf: &[u8]) -> Result<&FileHeader64<Le>, KernelError> {
    FileHeader64::<Le>::parse(elf).map_err(|_| damaged("its ELF header is invalid"))
}

pub(super) fn damaged(what: &str) -> KernelError {
    KernelError::Damaged {
        what: what.to_owned(),
    }
}
