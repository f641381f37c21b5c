//! Errors of reading a kernel image.

/// Why a kernel image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Not a 64-bit little-endian ELF file, or a damaged one.
    #[error("not a usable ELF file; expected an uncompressed x86-64 vmlinux")]
    NotElf(#[source] object::Error),
    /// An ELF file for another processor.
    #[error("the kernel is for ELF machine {0}, not x86-64 (62)")]
    Machine(u16),
    /// More sections or segments than any kernel has, or sections or segments that together have more bytes than
    /// the file.
    #[error("the ELF file's sections or segments overlap")]
    Overlap,
    /// The kernel has neither an ELF symbol table nor a readable kallsyms table.
    #[error("the kernel has no symbols")]
    NoSymbols(#[source] KallsymsError),
    /// There is no text between `_stext` and `_etext`.
    #[error("the kernel has no text between `_stext` and `_etext`")]
    NoText,
}

/// Why the kallsyms table could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KallsymsError {
    /// No token table.
    #[error("no kallsyms token table: the kernel was built without CONFIG_KALLSYMS")]
    NoTokens,
    /// A token table, but no names that use it.
    #[error("kallsyms token table without a table of names before it")]
    NoNames,
    /// Names, but nothing that can be their addresses.
    #[error("kallsyms names without addresses in any known encoding")]
    NoAddresses,
}
