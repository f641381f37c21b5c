//! Errors of reading debug information.

use std::fmt;

/// Why debug information does not answer a question.
#[derive(Debug, thiserror::Error)]
pub enum DebugError {
    /// The file cannot be read.
    #[error("the file cannot be read")]
    Read(#[source] std::io::Error),
    /// Not a 64-bit little-endian ELF file, or a damaged one.
    #[error("not a usable ELF file; expected a vmlinux with debug information")]
    NotElf(#[source] object::Error),
    /// An ELF file for another processor.
    #[error("the file is for ELF machine {0}, not x86-64 (62)")]
    Machine(u16),
    /// An object file that is not a module: its addresses are known only after linking.
    #[error("the file is not linked: a vmlinux or a module is wanted, not an object file")]
    Unlinked,
    /// A relocation outside its section, or of a kind that debug information of modules does not use.
    #[error("section {section} has a relocation of its byte {at:#x} that makes no sense")]
    Relocation {
        /// The section to relocate.
        section: &'static str,
        /// Offset of the relocation in that section.
        at: u64,
    },
    /// There are more sections than any file has, sections or relocations do not fit into the file, or sections of
    /// a module do not fit into the address space of modules.
    #[error("the file's sections overlap")]
    Overlap,
    /// A section that extends beyond the end of the file, or a part that extends beyond the end of its section.
    #[error("section {0} ends behind the end of the file")]
    Cut(&'static str),
    /// A compressed section.
    #[error(
        "section {0} is compressed: uncompress the file with `objcopy --decompress-debug-sections`"
    )]
    Compressed(&'static str),
    /// A file without debug information.
    #[error("the file has no debug information (no section .debug_info)")]
    None,
    /// Debug information that is split into other files.
    #[error(
        "the debug information of the unit at {0:#x} is in a file of its own (CONFIG_DEBUG_INFO_SPLIT), which is not read"
    )]
    Split(usize),
    /// A file without a build id.
    #[error("the file has no build id, so it is not known which build it belongs to")]
    NoBuildId,
    /// Debug information of another kernel, or a build id missing on one of the two sides.
    #[error(
        "the debug information is of another kernel: its build id is {file}, the kernel's {kernel}"
    )]
    OtherKernel {
        /// The build id of the file.
        file: BuildId,
        /// The build id of the kernel.
        kernel: BuildId,
    },
    /// Something in the file makes no sense.
    #[error("the debug information is damaged: section {section}, unit at {unit:#x}")]
    Damaged {
        /// The section that was being read.
        section: &'static str,
        /// Offset in `.debug_info` of the unit for which the section was read. If the unit's header is wrong, the
        /// offset at which the unit should begin.
        unit: usize,
        /// What is wrong.
        source: gimli::Error,
    },
    /// The answer needs more steps than the budget for a file of this size, or the file exceeds a limit that is
    /// above what any kernel has.
    #[error("the debug information is damaged: it refers to the same things over and over again")]
    TooMuch,
    /// Nobody waits for the answer, as the client that asked is gone.
    #[error("nobody waits for the answer")]
    Abandoned,
    /// No function of that name.
    #[error("no function {name} in the debug information{}", Suggested(.near))]
    NoFunction {
        /// The name of the function.
        name: String,
        /// Functions of that name in other files, as `NAME@FILE`, if the question named a file.
        near: Vec<String>,
    },
    /// No such source file.
    #[error("no source file {0} in the debug information")]
    NoFile(String),
    /// A line that has no code.
    #[error("no code of line {line} of {of}{}", Suggested(.near))]
    NoLine {
        /// The function or file.
        of: String,
        /// The line that was asked for.
        line: u64,
        /// The nearest lines that have code.
        near: Vec<String>,
    },
    /// A function that has no code outside the functions into which it was inlined.
    #[error("{0} is inlined wherever it is used: it has no {1}")]
    OnlyInlined(String, &'static str),
    /// An offset beyond the end of the function.
    #[error("{name} has {size} bytes only")]
    Offset {
        /// The function.
        name: String,
        /// Size in bytes of the function's longest range of code.
        size: u64,
    },
    /// A member, element or pointer that the variable does not have.
    #[error("`{at}` {why}{}", Suggested(.near))]
    Member {
        /// The variable, and the path up to the step that fails.
        at: String,
        /// Why that step fails.
        why: String,
        /// Names of similar members that exist.
        near: Vec<String>,
    },
    /// A pattern to search for in source lines; not supported, because the sources are not read.
    #[error("`;` looks for a text in the sources, which are not read: name the line instead")]
    Pattern,
}

/// A build id, or its absence, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildId(pub(super) Option<Vec<u8>>);

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(bytes) = &self.0 else {
            return f.write_str("missing");
        };
        bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Suggestions appended to a message.
struct Suggested<'a>(&'a [String]);

impl fmt::Display for Suggested<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            names => write!(f, "; there is {}", names.join(", ")),
        }
    }
}
