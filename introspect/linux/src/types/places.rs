//! Where the parameters of a function are when it begins, and what it returns when it has, by the System V calling
//! convention for AMD64 (its section 3.2.3), as far as kernels use it.
//!
//! What is kept true: a place is told only where the convention leaves no doubt. Kernels hand on no
//! floating-point numbers; where types claim it, nothing is told from there on.

use hvprobe_arch::regs::Gpr;

use super::functions::Prototype;
use super::kinds::{Field, Kind};
use super::table::{DEEPEST, TypeId, Types};

/// The registers that take parameters, in their order.
const REGISTERS: [Gpr; 6] = [Gpr::Rdi, Gpr::Rsi, Gpr::Rdx, Gpr::Rcx, Gpr::R8, Gpr::R9];
/// Members, and elements of arrays, looked at for one parameter that goes in registers.
const MOST_PARTS: u32 = 256;
/// More bytes than any parameter has.
const MOST_BYTES: u64 = 1 << 20;

/// Where a parameter is before the function's first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a register; bits beyond the size of the parameter mean nothing.
    Register(Gpr),
    /// In two registers, eight bytes in the first.
    Registers(Gpr, Gpr),
    /// On the stack, from this word above RSP on. Word 0 is the return address.
    Stack(u16),
    /// That cannot be told.
    Unknown,
}

/// Where a function leaves what it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Returned {
    /// In RAX. Bits beyond the size of the value mean nothing.
    Register,
    /// In RAX, and what is behind its first eight bytes in RDX.
    Registers,
    /// In memory, whose address is in RAX.
    Memory,
    /// That cannot be told.
    Unknown,
}

/// How a value of up to 16 bytes is handed on.
enum Class {
    /// In so many registers, 1 or 2.
    Integer(usize),
    /// On the stack.
    Memory,
    /// Elsewhere, or it has no bytes: pahole takes them from some unions that a parameter may be of
    /// (`__attribute__((transparent_union))`), so that the parameter has a place nevertheless.
    Other,
}

/// What is found in the parts of a value.
#[derive(Default)]
struct Parts {
    /// Whether there is an integer in each of the two words.
    words: [bool; 2],
    /// A part is not where its size would have it.
    unaligned: bool,
    /// A part is a floating-point number, or not known.
    other: bool,
    /// A part needs 16 bytes of alignment.
    wide: bool,
    left: u32,
}

impl Types {
    /// Where the parameters of a function are, in their order, when it begins.
    #[must_use]
    pub fn places(&self, prototype: &Prototype) -> Vec<Place> {
        let mut registers = REGISTERS.as_slice();
        let mut word = 1_u16;
        let mut lost = false;
        if let Some(returns) = prototype.returns {
            match self.class(returns).0 {
                // The caller says where it wants it, before all else.
                Class::Memory => registers = &REGISTERS[1..],
                // Nothing of a kernel returns what goes elsewhere than a register.
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

    /// Where a value of this type is when the function that returns it has returned.
    #[must_use]
    pub fn returned(&self, id: TypeId) -> Returned {
        match self.class(id).0 {
            Class::Integer(1) => Returned::Register,
            Class::Integer(_) => Returned::Registers,
            Class::Memory => Returned::Memory,
            Class::Other => Returned::Unknown,
        }
    }

    /// The next words of the stack that a parameter fits into. The first is at a multiple of 16 bytes.
    fn on_stack(&self, id: TypeId, wide: bool, word: &mut u16) -> Option<Place> {
        let words = u16::try_from(self.size(id)?.div_ceil(8)).ok()?;
        if wide && (*word).is_multiple_of(2) {
            *word = word.checked_add(1)?;
        }
        let place = Place::Stack(*word);
        *word = word.checked_add(words)?;
        Some(place)
    }

    /// How a value is handed on, and whether it is aligned to 16 bytes in memory.
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

    /// Notes the parts of a value that lies `at` that many bits into the parameter.
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
                // What does not fit into registers is on the stack, whatever else there is in it.
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
