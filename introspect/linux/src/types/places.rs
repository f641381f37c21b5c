//! Where a function's parameters are at its entry, and where its return value is at its return. Follows the System
//! V calling convention for AMD64 (section 3.2.3), as far as kernels use it.
//!
//! Invariant: a place is returned only where the convention leaves no doubt. Kernels pass no floating-point
//! numbers; if the types claim one, the places of that parameter and of all later ones are unknown.

use hvprobe_arch::regs::Gpr;

use super::functions::Prototype;
use super::kinds::{Field, Kind};
use super::table::{DEEPEST, TypeId, Types};

/// The registers for parameters, in order.
const REGISTERS: [Gpr; 6] = [Gpr::Rdi, Gpr::Rsi, Gpr::Rdx, Gpr::Rcx, Gpr::R8, Gpr::R9];
/// Maximum number of members and array elements examined for each value; no value that fits into registers has as
/// many.
const MOST_PARTS: u32 = 256;
/// Maximum size of a value, in bytes; no parameter is larger.
const MOST_BYTES: u64 = 1 << 20;

/// Where a parameter is before the function's first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a register. Bits beyond the size of the parameter mean nothing.
    Register(Gpr),
    /// In two registers; the first one has the first eight bytes.
    Registers(Gpr, Gpr),
    /// On the stack, from this word on. Word 0 is the one at RSP, the return address.
    Stack(u16),
    /// Unknown.
    Unknown,
}

/// Where a function leaves its return value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Returned {
    /// In RAX. Bits beyond the size of the value mean nothing.
    Register,
    /// In RAX and RDX. RAX has the first eight bytes.
    Registers,
    /// In memory. RAX has the address.
    Memory,
    /// Unknown.
    Unknown,
}

/// How a value is passed or returned.
enum Class {
    /// In this number of registers, 1 or 2.
    Integer(usize),
    /// On the stack.
    Memory,
    /// Neither of these, or unknown. It is unknown if the type has no bytes: pahole describes some unions with
    /// `__attribute__((transparent_union))` as types without bytes, although a parameter of such a type is passed.
    Other,
}

/// Properties of the parts of a value.
#[derive(Default)]
struct Parts {
    /// For each of the first two words of the value, whether a part that is passed like an integer is in it.
    words: [bool; 2],
    /// Whether a part is not aligned to its size.
    unaligned: bool,
    /// Whether a part is a floating-point number, or unknown.
    other: bool,
    /// Whether a part needs 16 bytes of alignment.
    wide: bool,
    /// Number of parts that may still be examined.
    left: u32,
}

impl Types {
    /// Returns where each parameter of a function is at its entry.
    #[must_use]
    pub fn places(&self, prototype: &Prototype) -> Vec<Place> {
        let mut registers = REGISTERS.as_slice();
        let mut word = 1_u16;
        let mut lost = false;
        if let Some(returns) = prototype.returns {
            match self.class(returns).0 {
                // The caller passes the address for the return value in the first register, before all other
                // parameters.
                Class::Memory => registers = &REGISTERS[1..],
                // No function of a kernel returns a value in registers of another kind.
                Class::Integer(_) | Class::Other => {}
            }
        }
        let mut places = Vec::with_capacity(prototype.parameters.len());
        for parameter in &prototype.parameters {
            let (class, wide) = self.class(parameter.ty);
            let place = match (class, registers) {
                _ if lost => Place::Unknown,
                (Class::Integer(1), [first, rest @ ..]) => {
                    registers = rest;
                    Place::Register(*first)
                }
                (Class::Integer(2), [first, second, rest @ ..]) => {
                    registers = rest;
                    Place::Registers(*first, *second)
                }
                (Class::Integer(_) | Class::Memory, _) => self
                    .on_stack(parameter.ty, wide, &mut word)
                    .unwrap_or_else(|| {
                        lost = true;
                        Place::Unknown
                    }),
                (Class::Other, _) => {
                    lost = true;
                    Place::Unknown
                }
            };
            places.push(place);
        }
        places
    }

    /// Returns where a function that returns a value of this type leaves that value.
    #[must_use]
    pub fn returned(&self, id: TypeId) -> Returned {
        match self.class(id).0 {
            Class::Integer(1) => Returned::Register,
            Class::Integer(_) => Returned::Registers,
            Class::Memory => Returned::Memory,
            Class::Other => Returned::Unknown,
        }
    }

    /// Places a parameter in the next words of the stack. If it is `wide`, it begins at a multiple of 16 bytes.
    /// `word` is the first free word.
    fn on_stack(&self, id: TypeId, wide: bool, word: &mut u16) -> Option<Place> {
        let words = u16::try_from(self.size(id)?.div_ceil(8)).ok()?;
        if wide && (*word).is_multiple_of(2) {
            *word = word.checked_add(1)?;
        }
        let place = Place::Stack(*word);
        *word = word.checked_add(words)?;
        Some(place)
    }

    /// Returns how a value is passed, and whether it is aligned to 16 bytes when it is in memory.
    fn class(&self, id: TypeId) -> (Class, bool) {
        let Some(size) = self.size(id) else {
            return (Class::Other, false);
        };
        let mut parts = Parts {
            left: MOST_PARTS,
            ..Parts::default()
        };
        self.classify(id, 0, DEEPEST, &mut parts);
        let class = match parts {
            Parts { other: true, .. } => Class::Other,
            _ if size == 0 => Class::Other,
            _ if size > 16 || parts.unaligned => Class::Memory,
            Parts {
                words: [true, true],
                ..
            } => Class::Integer(2),
            Parts {
                words: [true, false],
                ..
            } => Class::Integer(1),
            _ => Class::Other,
        };
        (class, parts.wide)
    }

    /// Records the parts of a value of type `id` that begins at bit `at` of the parameter.
    fn classify(&self, id: TypeId, at: u64, depth: u32, parts: &mut Parts) {
        let size = self.size(id).filter(|size| *size <= MOST_BYTES);
        let (Some(left), Some(size)) = (parts.left.checked_sub(1), size) else {
            parts.other = true;
            return;
        };
        parts.left = left;
        let kind = self.resolve(id).and_then(|id| self.kind(id));
        match (kind, depth.checked_sub(1)) {
            (Some(Kind::Int(_) | Kind::Pointer(_) | Kind::Enum { .. }), _) => {
                parts.unaligned |= size == 0 || !at.is_multiple_of(size * 8);
                parts.wide |= size == 16;
                parts.note(at, size * 8);
            }
            (Some(Kind::Struct { members, .. }), Some(depth)) => {
                for Field {
                    bit_offset,
                    width,
                    ty,
                    ..
                } in members
                {
                    match width {
                        Some(width) => parts.note(at + bit_offset, width.into()),
                        None => self.classify(ty, at + bit_offset, depth, parts),
                    }
                    if parts.other {
                        return;
                    }
                }
            }
            (Some(Kind::Array { element, count }), Some(depth)) => {
                // Examines only the first elements. An array with more of them does not fit into registers, so the
                // value is on the stack in any case.
                let Some(stride) = self.size(element) else {
                    parts.other = true;
                    return;
                };
                let elements = if stride == 0 { 0 } else { count.min(17) };
                for n in 0..u64::from(elements) {
                    self.classify(element, at + n * stride * 8, depth, parts);
                    if parts.other {
                        return;
                    }
                }
            }
            _ => parts.other = true,
        }
    }
}

impl Parts {
    fn note(&mut self, at: u64, bits: u64) {
        let end = at.saturating_add(bits);
        self.words[0] |= bits > 0 && at < 64;
        self.words[1] |= bits > 0 && end > 64;
    }
}
