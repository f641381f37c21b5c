//! Why an image cannot be used.

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

/// Why no symbols could be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KallsymsError {
    /// No table of name parts.
    #[error("no kallsyms token table: the kernel was built without CONFIG_KALLSYMS")]
    NoTokens,
    /// Name parts but no names that use them.
    #[error("kallsyms token table without a table of names before it")]
    NoNames,
    /// Names, but nothing that can be their addresses.
    #[error("kallsyms names without addresses in any known encoding")]
    NoAddresses,
}
