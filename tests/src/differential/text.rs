//! The probeable instructions of a kernel's text.
//!
//! Invariant: every [`Site`] is an instruction of a function, decoded from that function's start, in text that
//! is kept after boot, and not in a place that the kernel itself rules out ([`KernelImage::forbidden`]). The
//! compiler's padding after a function is not part of it.

use std::fmt;
use std::path::{Path, PathBuf};

use hvprobe_arch::Gva;
use hvprobe_arch::insn::MAX_LEN;
use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_linux::symbols::SymbolKind;
use hvprobe_spec::chain;
use hvprobe_vmlinux::{Kernel, KernelError};
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use crate::rig;

/// Environment variable with the path of the stock kernel's image (`cargo lab test` sets it).
const VMLINUZ: &str = "HVPROBE_TEST_VMLINUZ";

/// Reason why there is no kernel to take instructions from.
#[derive(Debug)]
pub enum TextError {
    /// The file cannot be read or unpacked.
    Load(KernelError),
    /// The kernel image cannot be parsed.
    Image(ImageError),
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(error) => f.write_str(&chain(error)),
            Self::Image(error) => f.write_str(&chain(error)),
        }
    }
}

impl std::error::Error for TextError {}

/// Returns the image of the stock kernel that the tests boot, if this machine has one.
#[must_use]
pub fn stock_kernel() -> Option<PathBuf> {
    let named = std::env::var_os(VMLINUZ).map(PathBuf::from);
    named
        .into_iter()
        .chain([rig::guest(1, &[]).kernel])
        .find(|path| path.is_file())
}

/// An instruction of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Site {
    /// Address of the instruction.
    pub at: Gva,
    /// The decoded instruction.
    pub instruction: Instruction,
}

/// A kernel's text.
#[derive(Debug)]
pub struct Text {
    image: KernelImage,
    start: Gva,
    end: Gva,
}

/// Text left out of the probeable instructions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Apart {
    /// Instructions of functions or places that the kernel rules out.
    pub forbidden: u64,
    /// Addresses of bytes that do not decode. From there on, the rest of the function is left out.
    pub undecodable: Vec<Gva>,
}

impl Text {
    /// Reads a kernel: an ELF `vmlinux` or a `bzImage`.
    ///
    /// # Errors
    /// When it cannot be read or is not such a kernel.
    pub fn open(path: &Path) -> Result<Self, TextError> {
        let kernel = Kernel::open(path).map_err(TextError::Load)?;
        let image = KernelImage::parse(kernel.elf()).map_err(TextError::Image)?;
        let bound = |name| image.symbols().address_of(name);
        // Without these symbols `parse` finds no text.
        let missing = || TextError::Image(ImageError::NoText);
        let start = bound("_stext").ok_or_else(missing)?;
        let end = bound("_etext").ok_or_else(missing)?;
        Ok(Self { image, start, end })
    }

    /// Returns the image that contains the text.
    #[must_use]
    pub fn image(&self) -> &KernelImage {
        &self.image
    }

    /// Returns the first address of the text, and the one after its last.
    #[must_use]
    pub fn bounds(&self) -> (Gva, Gva) {
        (self.start, self.end)
    }

    /// Returns the bytes from `at` on, up to the maximum length of an instruction.
    #[must_use]
    pub fn code(&self, at: Gva) -> &[u8] {
        let left = self.end.offset_from(at).unwrap_or(0);
        let len = usize::try_from(left).map_or(MAX_LEN, |left| left.min(MAX_LEN));
        self.image.bytes_at(at, len).unwrap_or_default()
    }

    /// Passes every probeable instruction to `each`, in the order of addresses. Returns the text that is left out.
    pub fn for_each(&self, each: impl FnMut(&Site)) -> Apart {
        self.for_each_in(|_| true, each)
    }

    /// Does the same as [`Self::for_each`], but only for functions whose start `is_wanted` accepts.
    pub fn for_each_in(
        &self,
        is_wanted: impl Fn(Gva) -> bool,
        mut each: impl FnMut(&Site),
    ) -> Apart {
        let mut apart = Apart::default();
        let mut starts: Vec<u64> = self
            .image
            .symbols()
            .iter()
            .filter(|symbol| symbol.kind == SymbolKind::Text)
            .map(|symbol| symbol.addr.0)
            .filter(|at| (self.start.0..self.end.0).contains(at))
            .collect();
        starts.dedup();
        let ends = starts.iter().skip(1).copied().chain([self.end.0]);
        for (start, end) in starts.iter().copied().zip(ends) {
            if is_wanted(Gva(start)) {
                self.function(start, end, &mut apart, &mut each);
            }
        }
        apart
    }

    fn function(&self, start: u64, end: u64, apart: &mut Apart, each: &mut impl FnMut(&Site)) {
        let code = usize::try_from(end - start)
            .ok()
            .and_then(|len| self.image.bytes_at(Gva(start), len))
            .unwrap_or_default();
        let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
        let mut instructions = Vec::new();
        while decoder.can_decode() {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                apart.undecodable.push(Gva(instruction.ip()));
                break;
            }
            instructions.push(instruction);
        }
        while instructions.last().is_some_and(is_padding) && instructions.len() > 1 {
            instructions.pop();
        }
        for instruction in instructions {
            let at = Gva(instruction.ip());
            if self.image.forbidden(at).is_some() {
                apart.forbidden += 1;
            } else {
                each(&Site { at, instruction });
            }
        }
    }
}

/// Returns whether compilers and linkers use the instruction as padding after functions.
fn is_padding(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Nop || instruction.code() == Code::Int3
}

/// Properties that decide how an instruction is executed: the encoding, the way memory is addressed, and the
/// prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Form {
    code: u16,
    addressing: Addressing,
    prefixes: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Addressing {
    None,
    Rip,
    Absolute,
    Stack,
    Base,
    Index,
    BaseIndex,
}

impl Form {
    /// Returns the form of `instruction`.
    #[must_use]
    pub fn of(instruction: &Instruction) -> Self {
        let memory = (0..instruction.op_count())
            .any(|operand| instruction.op_kind(operand) == OpKind::Memory);
        let (base, index) = (instruction.memory_base(), instruction.memory_index());
        let addressing = match (base, index) {
            _ if !memory => Addressing::None,
            (Register::RIP | Register::EIP, _) => Addressing::Rip,
            (Register::RSP, _) => Addressing::Stack,
            (Register::None, Register::None) => Addressing::Absolute,
            (_, Register::None) => Addressing::Base,
            (Register::None, _) => Addressing::Index,
            (..) => Addressing::BaseIndex,
        };
        let prefixes = [
            instruction.has_lock_prefix(),
            instruction.has_rep_prefix(),
            instruction.has_repne_prefix(),
            instruction.segment_prefix() == Register::GS,
            instruction.segment_prefix() == Register::FS,
            // Only an address-size prefix makes these registers 32 bits wide.
            base.is_gpr32() || index.is_gpr32(),
        ];
        Self {
            code: instruction.code() as u16,
            addressing,
            prefixes: (0..)
                .zip(prefixes)
                .map(|(bit, is_set)| u8::from(is_set) << bit)
                .sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(code: &[u8]) -> Form {
        Form::of(&Decoder::with_ip(64, code, 0x1000, DecoderOptions::NONE).decode())
    }

    #[test]
    fn registers_and_constants_do_not_make_a_form() {
        // mov [rbx+8], rcx and mov [rdi+0x10], rdx
        let alike = [[0x48, 0x89, 0x4b, 8], [0x48, 0x89, 0x57, 0x10]];
        assert_eq!(form(&alike[0]), form(&alike[1]));
    }

    #[test]
    fn addressing_and_prefixes_make_a_form() {
        let different: [&[u8]; 7] = [
            &[0x48, 0x89, 0x4b, 8],                   // mov [rbx+8], rcx
            &[0x48, 0x89, 0x4c, 0x24, 8],             // mov [rsp+8], rcx
            &[0x48, 0x89, 0x4c, 0x13, 8],             // mov [rbx+rdx+8], rcx
            &[0x48, 0x89, 0x0d, 8, 0, 0, 0],          // mov [rip+8], rcx
            &[0x65, 0x48, 0x89, 0x4b, 8],             // mov gs:[rbx+8], rcx
            &[0x67, 0x48, 0x89, 0x4b, 8],             // mov [ebx+8], rcx
            &[0x48, 0x89, 0x0c, 0x25, 8, 0, 0, 0x80], // mov [0xffffffff80000008], rcx
        ];
        for (index, one) in different.iter().enumerate() {
            for other in &different[index + 1..] {
                assert_ne!(form(one), form(other), "{one:02x?} {other:02x?}");
            }
        }
    }
}
