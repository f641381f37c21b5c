//! Why an image cannot be used.

use super::kallsyms::KallsymsError;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The bytes are no 64-bit little-endian ELF file, or a damaged one.
    #[error("not a usable ELF file; expected an uncompressed x86-64 vmlinux")]
    NotElf(#[source] object::Error),
    /// An ELF file for another processor.
    #[error("the kernel is for ELF machine {0}, not x86-64 (62)")]
    Machine(u16),
    /// Sections or segments that share bytes of the file, or thousands of them.
    #[error("the ELF file's sections or segments overlap")]
    Overlap,
    /// Neither an ELF symbol table nor one of the kernel's own.
    #[error("the kernel has no symbols")]
    NoSymbols(#[source] KallsymsError),
    /// No text where the symbols say it is.
    #[error("the kernel has no text between `_stext` and `_etext`")]
    NoText,
}
