//! Why debug information does not answer.

use std::fmt;

/// Why debug information does not answer.
#[derive(Debug, thiserror::Error)]
pub enum DebugError {
    /// The file cannot be read.
    #[error("the file cannot be read")]
    Read(#[source] std::io::Error),
    /// The bytes are no 64-bit little-endian ELF file, or a damaged one.
    #[error("not a usable ELF file; expected a vmlinux with debug information")]
    NotElf(#[source] object::Error),
    /// An ELF file for another processor.
    #[error("the file is for ELF machine {0}, not x86-64 (62)")]
    Machine(u16),
    /// An object file that is no module, whose addresses are known only once it is linked.
    #[error("the file is not linked: a vmlinux or a module is wanted, not an object file")]
    Unlinked,
    /// A relocation that leads out of its section, or that debug information of modules has no use for.
    #[error("section {section} has a relocation of its byte {at:#x} that makes no sense")]
    Relocation {
        /// The section that it is for.
        section: &'static str,
        /// Where it begins there.
        at: u64,
    },
    /// Thousands of sections, or sections that share bytes of the file.
    #[error("the file's sections overlap")]
    Overlap,
    /// A section beyond the end of the file.
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
    /// Debug information that is in other files.
    #[error(
        "the debug information of the unit at {0:#x} is in a file of its own (CONFIG_DEBUG_INFO_SPLIT), which is not read"
    )]
    Split(usize),
    /// A file that does not say which build it is of.
    #[error("the file has no build id, so which build it is of cannot be told")]
    NoBuildId,
    /// Debug information of another kernel.
    #[error(
        "the debug information is of another kernel: its build id is {file}, the kernel's {kernel}"
    )]
    OtherKernel {
        /// The build id of the file.
        file: BuildId,
        /// That of the kernel.
        kernel: BuildId,
    },
    /// Something in the file makes no sense.
    #[error("the debug information is damaged: section {section}, unit at {unit:#x}")]
    Damaged {
        /// The section that was being read.
        section: &'static str,
        /// Where the unit begins in .debug_info that it was read for; where it should begin, if it is its
        /// header that is wrong.
        unit: usize,
        /// What is wrong.
        source: gimli::Error,
    },
    /// An answer would take more work than a file of that size is worth.
    #[error("the debug information is damaged: it refers to the same things over and over again")]
    TooMuch,
    /// Who asked is gone.
    #[error("nobody waits for the answer")]
    Abandoned,
    /// No such function.
    #[error("no function {name} in the debug information{}", Suggested(.near))]
    NoFunction {
        /// Its name.
        name: String,
        /// Where functions of that name are instead, if it was asked for in a file.
        near: Vec<String>,
    },
    /// No such source file.
    #[error("no source file {0} in the debug information")]
    NoFile(String),
    /// A line without code.
    #[error("no code of line {line} of {of}{}", Suggested(.near))]
    NoLine {
        /// The function or file.
        of: String,
        /// The line, as it was asked for.
        line: u64,
        /// The nearest ones that have code.
        near: Vec<String>,
    },
    /// A function that has no code of its own.
    #[error("{0} is inlined wherever it is used: it has no {1}")]
    OnlyInlined(String, &'static str),
    /// An offset beyond the function.
    #[error("{name} has {size} bytes only")]
    Offset {
        /// The function.
        name: String,
        /// Its size.
        size: u64,
    },
    /// A way into a variable that there is not.
    #[error("`{at}` {why}{}", Suggested(.near))]
    Member {
        /// The variable, as far as the way leads.
        at: String,
        /// Why it leads no further.
        why: String,
        /// What there is instead.
        near: Vec<String>,
    },
    /// A pattern for lines.
    #[error("`;` looks for a text in the sources, which are not read: name the line instead")]
    Pattern,
}

/// A build id, or that there is none.
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

/// What there is instead, behind a message.
struct Suggested<'a>(&'a [String]);

impl fmt::Display for Suggested<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            names => write!(f, "; there is {}", names.join(", ")),
        }
    }
}
