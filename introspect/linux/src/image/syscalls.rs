//! Parameters of system calls, from the metadata that the kernel keeps for its own trace events.
//!
//! `SYSCALL_METADATA` (include/linux/syscalls.h) defines a `struct syscall_metadata` for each system call, with the
//! names and the types of its arguments as they are written in the source. Its symbol is `__syscall_meta__NAME`;
//! kernels without `CONFIG_FTRACE_SYSCALLS` have none. Invariants: an entry is used only if its own name matches
//! its symbol, and the number and the lengths of its strings are bounded.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;

use super::elf::Elf;
use crate::bytes::u64_at;
use crate::symbols::Symbols;
use crate::types::Types;

/// Maximum number of arguments: the number of registers in which a system call gets them.
const MOST: usize = 6;
/// Maximum number of system calls; a kernel has fewer.
const MOST_CALLS: usize = 4096;
/// Maximum length of a name or type, in bytes.
const LONGEST: usize = 128;

/// A parameter of a system call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallParameter {
    /// The name of the parameter.
    pub name: String,
    /// The type as written in the source, such as `const char *`.
    pub ty: String,
}

/// The system calls of a kernel, by name (`openat`).
#[derive(Debug, Default)]
pub(super) struct Syscalls(BTreeMap<Box<str>, Box<[CallParameter]>>);

impl Syscalls {
    /// Reads the system calls that have metadata in the image. Returns none if `types` do not describe the layout
    /// of the metadata.
    pub(super) fn read(elf: &Elf<'_>, symbols: &Symbols, types: &Types) -> Self {
        const OF: &str = "syscall_metadata";
        let members = ["name", "types", "args"].map(|member| (OF, member));
        let members = types.members(&members);
        // The number of arguments is a whole word up to 6.12, and a bit field on 7.2.
        let number = types.number(OF, "nb_args");
        let ([Some(name), Some(types), Some(names)], Some(number)) = (members.as_slice(), number)
        else {
            return Self::default();
        };
        let meta = symbols.iter().filter_map(|symbol| {
            let call = symbol.name.strip_prefix("__syscall_meta__")?;
            let pointer = |offset| pointer(elf, symbol.addr.wrapping_add(offset));
            let own = text(elf, pointer(name.offset)?)?;
            if own.strip_prefix("sys_") != Some(call) {
                return None;
            }
            let at = symbol.addr.wrapping_add(number.offset);
            let number = number.of(elf.read(at, number.bytes)?);
            let number = usize::try_from(number).ok().filter(|n| *n <= MOST)?;
            let parameters = (0..number).map(|at| {
                let at = 8 * at as u64;
                let of = |list: u64| {
                    let list = pointer(list)?;
                    text(elf, self::pointer(elf, list.wrapping_add(at))?)
                };
                Some(CallParameter {
                    name: of(names.offset)?.to_owned(),
                    ty: of(types.offset)?.to_owned(),
                })
            });
            Some((call.into(), parameters.collect::<Option<_>>()?))
        });
        Self(meta.take(MOST_CALLS).collect())
    }

    /// Returns the parameters of the system call whose kernel entry is `function` (`__x64_sys_openat`).
    pub(super) fn of_wrapper(&self, function: &str) -> Option<&[CallParameter]> {
        let call = function.strip_prefix("__x64_sys_")?;
        self.0.get(call).map(|parameters| &**parameters)
    }
}

fn pointer(elf: &Elf<'_>, at: Gva) -> Option<Gva> {
    u64_at(elf.read(at, 8)?, 0).map(Gva)
}

/// Returns the text at `at`, up to its NUL; `None` if it is empty, too long or not printable.
fn text<'a>(elf: &Elf<'a>, at: Gva) -> Option<&'a str> {
    let bytes = elf.read_up_to(at, LONGEST + 1);
    let end = bytes.iter().position(|byte| *byte == 0)?;
    let text = std::str::from_utf8(&bytes[..end]).ok()?;
    let printable = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    (!text.is_empty() && text.bytes().all(printable)).then_some(text)
}

#[cfg(test)]
mod tests;
