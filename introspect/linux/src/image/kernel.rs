//! Reads the whole kernel image into one value.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use hvprobe_arch::{Gpa, Gva};
use memchr::memmem;

use super::elf::Elf;
use super::error::ImageError;
use super::forbidden::{Forbidden, Lists, Unknown};
use super::kallsyms::Kallsyms;
use super::lists;
use super::syscalls::{CallParameter, Syscalls};
use super::tasks::{self, TaskClues, TaskLayout};
use super::unwind;
use crate::symbols::Symbols;
use crate::types::{BtfError, Member, Types};
use crate::unwind::{Orc, OrcError};

/// A range of text, with its bytes in the file.
pub(super) struct Text {
    pub(super) at: Range<u64>,
    pub(super) bytes: Box<[u8]>,
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.at.start, self.at.end)
    }
}

/// A parsed kernel image.
#[derive(Debug)]
pub struct KernelImage {
    symbols: Symbols,
    release: Option<String>,
    build_id: Option<Box<[u8]>>,
    pub(super) text: Text,
    init_text: Option<Text>,
    pub(super) lists: Lists,
    types: Result<Arc<Types>, BtfError>,
    task_layout: Result<TaskLayout, BtfError>,
    task_clues: Option<TaskClues>,
    cpu_number: Option<u64>,
    syscalls: Syscalls,
    extent: Range<u64>,
    virt_to_phys_offset: u64,
    init_top_pgt: Option<Gpa>,
    orc: Result<Arc<Orc>, OrcError>,
    offset: Option<u64>,
}

impl KernelImage {
    /// Parses an uncompressed ELF `vmlinux`, stripped or not.
    ///
    /// # Errors
    /// If it is not an x86-64 ELF kernel, or has no readable symbols or text.
    pub fn parse(elf: &[u8]) -> Result<Self, ImageError> {
        Self::parse_moved(elf, None)
    }

    /// As [`KernelImage::parse`], for a kernel that was moved by `offset` bytes from the addresses at which it was
    /// linked. `elf` has the addresses after that.
    ///
    /// # Errors
    /// As [`KernelImage::parse`].
    pub fn parse_moved(elf: &[u8], offset: Option<u64>) -> Result<Self, ImageError> {
        let elf = Elf::parse(elf)?;
        let symbols = read_symbols(&elf)?;
        let text = text(&elf, &symbols, "_stext", "_etext").ok_or(ImageError::NoText)?;
        let virt_to_phys_offset = elf
            .virt_to_phys_offset(Gva(text.at.start))
            .ok_or(ImageError::NoText)?;
        let lists = lists::read(&elf, &symbols);
        for list in lists.unknown() {
            tracing::warn!("the kernel's {list} cannot be found: what it might name is not probed");
        }
        let types = match elf.section(".BTF") {
            Some(section) => Types::parse(section.data).map(Arc::new),
            None => Err(BtfError::Missing),
        };
        Ok(Self {
            release: release(&elf),
            build_id: elf.build_id().map(Into::into),
            init_text: self::text(&elf, &symbols, "_sinittext", "_einittext"),
            init_top_pgt: symbols.address_of("init_top_pgt").and_then(|at| {
                let offset = elf.virt_to_phys_offset(at)?;
                Some(Gpa(at.0.wrapping_sub(offset)))
            }),
            task_layout: types
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|types| tasks::layout(types, &symbols)),
            task_clues: tasks::clues(&elf, &symbols),
            cpu_number: tasks::cpu_number(&elf, &symbols, types.as_deref().ok()),
            extent: elf.extent(),
            syscalls: types.as_deref().map_or_else(
                |_| Syscalls::default(),
                |types| Syscalls::read(&elf, &symbols, types),
            ),
            orc: unwind::read(&elf, &symbols, text.at.clone()).map(Arc::new),
            symbols,
            types,
            text,
            lists,
            virt_to_phys_offset,
            offset,
        })
    }

    /// Returns how far the kernel's virtual addresses are from those at which it was linked, in bytes; `None` if the
    /// kernel was not moved (no KASLR). Debug information has the addresses at which it was linked.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.offset
    }

    /// Returns the kernel's symbols.
    #[must_use]
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// Returns the release from the kernel's banner, such as `6.1.0-37-cloud-amd64`.
    #[must_use]
    pub fn release(&self) -> Option<&str> {
        self.release.as_deref()
    }

    /// Returns the GNU build id.
    #[must_use]
    pub fn build_id(&self) -> Option<&[u8]> {
        self.build_id.as_deref()
    }

    /// Returns whether `at` lies in text that the kernel keeps after boot, `_stext` to `_etext`.
    #[must_use]
    pub fn is_text(&self, at: Gva) -> bool {
        self.text.at.contains(&at.0)
    }

    /// Returns whether `at` lies in text that the kernel frees at the end of its boot, `_sinittext` to
    /// `_einittext`.
    #[must_use]
    pub fn is_init_text(&self, at: Gva) -> bool {
        self.init_text
            .as_ref()
            .is_some_and(|text| text.at.contains(&at.0))
    }

    /// Returns why `at` must not be probed; `None` if nothing forbids it. Does not check that `at` is text, nor
    /// that it is an instruction boundary.
    #[must_use]
    pub fn forbidden(&self, at: Gva) -> Option<Forbidden> {
        self.lists.find(at, &self.symbols).or_else(|| {
            let code = self.bytes_at(at, 2).unwrap_or_default();
            self.lists.doubt(at, code)
        })
    }

    /// Returns why `at` must not be probed while the byte there is `first`, even if [`Self::forbidden`] allows it.
    /// The only such reason is a lock prefix: the kernel booted with one processor, removed the instruction's lock
    /// prefix, and will restore it when a second processor comes up.
    #[must_use]
    pub fn forbidden_as_is(&self, at: Gva, first: u8) -> Option<Forbidden> {
        self.lists.lock_prefix(at, first)
    }

    /// Returns whether a jump label or a handled exception leads, or may lead, to an address from `start` up to,
    /// but not including, `end`.
    #[must_use]
    pub fn has_landing(&self, start: Gva, end: Gva) -> bool {
        self.lists.has_landing(&(start.0..end.0))
    }

    /// Returns whether the kernel's exception table has an entry for the instruction at `at`, or may have one if
    /// the table cannot be found. Such an instruction may fault by design, and the kernel finds its handler by the
    /// instruction's address.
    #[must_use]
    pub fn has_fixup(&self, at: Gva) -> bool {
        self.lists.has_fixup(at)
    }

    /// Returns whether the compiler put a call to `__fentry__` at `at`. The kernel makes it a nop at boot, and
    /// a call again while it traces the function.
    #[must_use]
    pub fn is_ftrace_site(&self, at: Gva) -> bool {
        self.lists
            .is_ftrace_site(at)
            .unwrap_or_else(|| self.looks_like_ftrace_site(at))
    }

    /// Implements [`Self::is_ftrace_site`] for an image without a list of these calls. Checks whether the bytes at
    /// `at` are those that a compiler or the build leaves for such a call.
    fn looks_like_ftrace_site(&self, at: Gva) -> bool {
        match self.bytes_at(at, 5) {
            Some(&[0x0f, 0x1f, 0x44, 0x00, 0x00]) => true,
            Some(&[0xe8, a, b, c, d]) => {
                let distance = i64::from(i32::from_le_bytes([a, b, c, d]));
                let target = at.wrapping_add(5).0.wrapping_add_signed(distance);
                self.symbols.address_of("__fentry__") == Some(Gva(target))
            }
            _ => false,
        }
    }

    /// Returns the lists used by [`Self::forbidden`] that the kernel should have, but that cannot be found. Text
    /// that such a list might name is treated as if the list named it.
    #[must_use]
    pub fn unknown_lists(&self) -> &[Unknown] {
        self.lists.unknown()
    }

    /// Returns the position of the pointer to the current task, and the offsets of the fields in a task.
    ///
    /// # Errors
    /// If the image's type information does not describe them.
    pub fn task_layout(&self) -> Result<TaskLayout, BtfError> {
        self.task_layout.clone()
    }

    /// Returns what the code and data of the image show about its tasks. Needs no type information.
    #[must_use]
    pub fn task_clues(&self) -> Option<TaskClues> {
        self.task_clues
    }

    /// Returns the offset, modulo 2^64, from a CPU's per-CPU base to the CPU's number, an `i32`. `None` if the
    /// image does not show it, as in a kernel for one processor.
    #[must_use]
    pub fn cpu_number(&self) -> Option<u64> {
        self.cpu_number
    }

    /// Returns the range from the lowest to the highest address of the image in memory, not counting per-CPU data.
    #[must_use]
    pub fn extent(&self) -> Range<Gva> {
        Gva(self.extent.start)..Gva(self.extent.end)
    }

    /// Returns the kernel's types.
    ///
    /// # Errors
    /// If the image has no readable type information.
    pub fn types(&self) -> Result<&Arc<Types>, BtfError> {
        self.types.as_ref().map_err(Clone::clone)
    }

    /// Returns the ORC tables, with which the kernel's stacks are unwound.
    ///
    /// # Errors
    /// If the image has no readable tables.
    pub fn orc(&self) -> Result<&Arc<Orc>, OrcError> {
        self.orc.as_ref().map_err(Clone::clone)
    }

    /// Returns the parameters of the system call whose entry in the kernel is `function`, such as
    /// `__x64_sys_openat`. The entry gets all of them in one `pt_regs`. `None` if `function` is not such an entry,
    /// or if the image does not describe its parameters.
    #[must_use]
    pub fn system_call(&self, function: &str) -> Option<&[CallParameter]> {
        self.syscalls.of_wrapper(function)
    }

    /// Returns the positions of members of structures; all questions together take one pass over the types. A
    /// question is a structure's name (without `struct`) and a path as in C: `list`, `core_layout.base`,
    /// `mem[4].size`. Members of anonymous members count as the structure's own; pointers are not followed. The
    /// answer is `None` if there is no such member, or if it is a bit field.
    ///
    /// # Errors
    /// If the image has no readable type information.
    pub fn members(&self, questions: &[(&str, &str)]) -> Result<Vec<Option<Member>>, BtfError> {
        Ok(self.types()?.members(questions))
    }

    /// Returns the offset in bytes of the member at `path` in the structure `of`. Both are written as in
    /// [`Self::members`], which is faster for more than one question.
    ///
    /// # Errors
    /// If the image has no readable type information, or if the structure has no such member.
    pub fn member_offset(&self, of: &str, path: &str) -> Result<u64, BtfError> {
        let found = self.types()?.structures(&[of]).member(of, path);
        let member = found.ok_or_else(|| BtfError::NoField {
            of: of.to_owned(),
            field: path.to_owned(),
        })?;
        Ok(member.offset)
    }

    /// Returns the virtual minus the physical address of the text, modulo 2^64.
    #[must_use]
    pub fn virt_to_phys_offset(&self) -> u64 {
        self.virt_to_phys_offset
    }

    /// Returns the physical address of the kernel's own top-level page table.
    #[must_use]
    pub fn init_top_pgt(&self) -> Option<Gpa> {
        self.init_top_pgt
    }

    /// Returns the `len` bytes at `at` as they are in the image, before the booting kernel rewrites them. `None`
    /// for bytes outside text and init text, because only these are kept.
    #[must_use]
    pub fn bytes_at(&self, at: Gva, len: usize) -> Option<&[u8]> {
        [Some(&self.text), self.init_text.as_ref()]
            .into_iter()
            .flatten()
            .find_map(|text| {
                let start = usize::try_from(at.0.checked_sub(text.at.start)?).ok()?;
                text.bytes.get(start..start.checked_add(len)?)
            })
    }

    /// Returns the kernel's entry for the breakpoint exception (`asm_exc_int3`; `int3` before 5.8).
    #[must_use]
    pub fn idt_bp_entry(&self) -> Option<Gva> {
        ["asm_exc_int3", "int3"]
            .iter()
            .find_map(|name| self.symbols.address_of(name))
            .filter(|at| self.is_text(*at))
    }
}

/// Reads symbols from the ELF symbol table or, in a stripped file, from kallsyms.
fn read_symbols(elf: &Elf<'_>) -> Result<Symbols, ImageError> {
    let ranges: Vec<Range<u64>> = elf.parts().map(|part| part.at.clone()).collect();
    let symbols = Symbols::new(elf.symbols(), &ranges);
    if symbols.address_of("_stext").is_some() {
        return Ok(symbols);
    }
    let parts: Vec<_> = elf.parts().collect();
    let kallsyms = Kallsyms::find(&parts).map_err(ImageError::NoSymbols)?;
    tracing::debug!(encoding = ?kallsyms.encoding, "decoded kallsyms");
    Ok(Symbols::new(kallsyms.symbols(), &ranges))
}

fn text(elf: &Elf<'_>, symbols: &Symbols, start: &str, end: &str) -> Option<Text> {
    let at = symbols.between(start, end)?;
    let len = usize::try_from(at.end - at.start).ok()?;
    Some(Text {
        bytes: elf.read(Gva(at.start), len)?.into(),
        at,
    })
}

/// Returns the kernel release, as `linux_banner` gives it.
fn release(elf: &Elf<'_>) -> Option<String> {
    const BANNER: &[u8] = b"Linux version ";
    /// Length of the longest release: that of a field of `struct new_utsname`, without the NUL.
    const LONGEST: usize = 64;
    elf.parts().filter(|part| !part.exec).find_map(|part| {
        memmem::find_iter(part.data, BANNER).find_map(|at| {
            let rest = &part.data[at + BANNER.len()..];
            let len = rest
                .iter()
                .take(LONGEST + 1)
                .position(|byte| !byte.is_ascii_graphic())?;
            // `linux_proc_banner` has a `%s` here.
            rest[0].is_ascii_digit().then_some(())?;
            String::from_utf8(rest[..len].to_vec()).ok()
        })
    })
}
