//! Translates the location of a variable into a form that a fetch argument can express.
//!
//! Invariants: an expression is evaluated operation by operation; jumps in it are not supported. Its value is a
//! constant plus at most one register, or a constant plus the word in memory at such a value. Anything else is
//! reported as unsupported, never as a wrong location.

use std::fmt;

use gimli::{Encoding, Expression, Operation, Register};
use hvprobe_arch::Gva;
use hvprobe_arch::regs::Gpr;
use hvprobe_spec::language::text;

use super::info::Reader;

/// Maximum number of values on the stack of an expression.
const MOST_VALUES: usize = 16;
/// Maximum number of offsets in a [`Sum`].
const MOST_POINTERS: usize = 8;

/// Registers by their DWARF numbers (System V ABI for x86-64, figure 3.36).
const REGISTERS: [Gpr; 16] = [
    Gpr::Rax,
    Gpr::Rdx,
    Gpr::Rcx,
    Gpr::Rbx,
    Gpr::Rsi,
    Gpr::Rdi,
    Gpr::Rbp,
    Gpr::Rsp,
    Gpr::R8,
    Gpr::R9,
    Gpr::R10,
    Gpr::R11,
    Gpr::R12,
    Gpr::R13,
    Gpr::R14,
    Gpr::R15,
];

/// Location of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// In a register, or in memory that a register leads to. A fetch argument can read it.
    Fetch(Fetch),
    /// In static memory, at this address as linked.
    Static(Gva),
    /// Not in memory or a register: the value is always this constant.
    Constant(i64),
    /// Not readable, for this reason.
    Nowhere(&'static str),
}

impl Location {
    /// Adds `more` to the address of the variable, if it has one.
    pub(super) fn plus(mut self, more: i64) -> Self {
        match &mut self {
            Self::Fetch(fetch) => {
                if let Some(last) = fetch.offsets.last_mut() {
                    *last = last.wrapping_add(more);
                }
            }
            Self::Static(at) => at.0 = at.0.wrapping_add(more.cast_unsigned()),
            Self::Constant(_) | Self::Nowhere(_) => {}
        }
        self
    }
}

/// A register, and the pointers to follow from it to a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// The register.
    pub register: Gpr,
    /// One offset for each read from memory; the last read gives the variable. The first offset is added to the
    /// register, each further one to the word just read; the sum is the address of the next read. Empty if the
    /// register holds the variable itself.
    pub offsets: Vec<i64>,
}

impl fmt::Display for Fetch {
    /// Writes the fetch argument as in a probe definition.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for offset in self.offsets.iter().rev() {
            write!(f, "{offset:+}(")?;
        }
        f.write_str(&text::register(self.register))?;
        (0..self.offsets.len()).try_for_each(|_| f.write_str(")"))
    }
}

/// Values of the function's frame that an expression can refer to.
pub(super) struct Frame<'e> {
    /// The function's frame base, if known.
    pub(super) base: &'e dyn Fn() -> Option<Sum>,
    /// The canonical frame address, if known.
    pub(super) cfa: &'e dyn Fn() -> Option<Sum>,
    /// Whether the expression is evaluated for the address of the function's first instruction.
    pub(super) is_entry: bool,
}

/// A constant plus at most one register. The first offset is that constant. Each further offset stands for a step:
/// read the word in memory at the value so far, and add the offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    register: Option<Gpr>,
    offsets: Vec<i64>,
}

impl Sum {
    pub(super) fn new(register: Register, offset: i64) -> Option<Self> {
        Some(Self {
            register: Some(*REGISTERS.get(usize::from(register.0))?),
            offsets: vec![offset],
        })
    }

    fn constant(value: i64) -> Self {
        Self {
            register: None,
            offsets: vec![value],
        }
    }

    fn add(mut self, more: i64) -> Self {
        if let Some(last) = self.offsets.last_mut() {
            *last = last.wrapping_add(more);
        }
        self
    }

    /// Returns the value if it is a constant, without a register or a read.
    fn known(&self) -> Option<i64> {
        match (self.register, self.offsets.as_slice()) {
            (None, [value]) => Some(*value),
            _ => None,
        }
    }

    /// Returns the location of the variable whose address this sum is.
    fn memory(self) -> Location {
        match (self.register, self.offsets.as_slice()) {
            (Some(register), _) => Location::Fetch(Fetch {
                register,
                offsets: self.offsets,
            }),
            (None, [at]) => Location::Static(Gva(at.cast_unsigned())),
            (None, _) => Location::Nowhere("behind a pointer in memory of its own"),
        }
    }

    /// Returns the location of the variable whose value this sum is.
    fn value(mut self) -> Location {
        match (self.register, self.offsets.pop(), self.offsets.as_slice()) {
            (Some(register), Some(0), _) => Location::Fetch(Fetch {
                register,
                offsets: self.offsets,
            }),
            (None, Some(value), []) => Location::Constant(value),
            _ => Location::Nowhere("computed, and kept nowhere"),
        }
    }
}

/// Evaluates a variable's location expression. Returns the location, and the number of operations evaluated.
pub(super) fn location(
    expression: Expression<Reader<'_>>,
    encoding: Encoding,
    frame: &Frame<'_>,
) -> (Location, usize) {
    let mut steps = 0;
    let found = followed(expression, encoding, frame, &mut steps);
    (found.unwrap_or_else(Location::Nowhere), steps)
}

/// Evaluates an expression that gives an address rather than a variable's location, such as a frame base.
pub(super) fn sum(
    expression: Expression<Reader<'_>>,
    encoding: Encoding,
    frame: &Frame<'_>,
) -> Option<Sum> {
    match location(expression, encoding, frame).0 {
        // If the expression names a register, the register holds the address. If it gives a location in memory, the
        // address is that of the location.
        Location::Fetch(Fetch { register, offsets }) => Some(Sum {
            register: Some(register),
            offsets: if offsets.is_empty() { vec![0] } else { offsets },
        }),
        _ => None,
    }
}

fn followed(
    expression: Expression<Reader<'_>>,
    encoding: Encoding,
    frame: &Frame<'_>,
    steps: &mut usize,
) -> Result<Location, &'static str> {
    const DAMAGED: &str = "at a location that makes no sense";
    const OTHER: &str = "computed in a way that cannot be followed";

    let mut stack: Vec<Sum> = Vec::new();
    // Set by an operation that must be the last one of the expression, unless it is a part of a variable in pieces.
    let mut ended = None;
    let mut operations = expression.operations(encoding);
    while let Some(operation) = operations.next().map_err(|_| DAMAGED)? {
        *steps += 1;
        if matches!(operation, Operation::Piece { .. }) {
            return Err("in pieces");
        }
        if ended.is_some() {
            return Err(DAMAGED);
        }
        let pushed = match operation {
            Operation::Nop => continue,
            Operation::Register { register } => {
                let value = Sum::new(register, 0).ok_or("in a register that is not saved")?;
                ended = Some(value.value());
                continue;
            }
            Operation::StackValue => {
                ended = Some(stack.pop().ok_or(DAMAGED)?.value());
                continue;
            }
            Operation::ImplicitValue { data } => {
                ended = Some(constant(data.slice()));
                continue;
            }
            Operation::ImplicitPointer { .. } => {
                return Err("a pointer to something that was optimised out");
            }
            Operation::RegisterOffset {
                register, offset, ..
            } => Sum::new(register, offset).ok_or("behind a register that is not saved")?,
            Operation::FrameOffset { offset } => {
                let base = (frame.base)().ok_or("in a frame that nobody describes")?;
                base.add(offset)
            }
            Operation::CallFrameCFA => (frame.cfa)().ok_or("in a frame that nobody describes")?,
            Operation::Address { address } => Sum::constant(address.cast_signed()),
            Operation::UnsignedConstant { value } => Sum::constant(value.cast_signed()),
            Operation::SignedConstant { value } => Sum::constant(value),
            Operation::PlusConstant { value } => {
                stack.pop().ok_or(DAMAGED)?.add(value.cast_signed())
            }
            Operation::Plus | Operation::Minus => {
                let more = stack.pop().ok_or(DAMAGED)?;
                let to = stack.pop().ok_or(DAMAGED)?;
                match (more.known(), to.known(), operation) {
                    (Some(more), _, Operation::Minus) => to.add(more.wrapping_neg()),
                    (Some(value), _, _) => to.add(value),
                    (_, Some(value), Operation::Plus) => more.add(value),
                    _ => return Err(OTHER),
                }
            }
            Operation::Deref {
                size: 8,
                space: false,
                ..
            } => {
                let mut pointer = stack.pop().ok_or(DAMAGED)?;
                if pointer.offsets.len() == MOST_POINTERS {
                    return Err(OTHER);
                }
                pointer.offsets.push(0);
                pointer
            }
            Operation::EntryValue { expression } => {
                let mut inner = Expression(expression).operations(encoding);
                match inner.next() {
                    Ok(Some(Operation::Register { register })) if frame.is_entry => {
                        Sum::new(register, 0).ok_or(OTHER)?
                    }
                    _ => return Err("only known where the function begins"),
                }
            }
            _ => return Err(OTHER),
        };
        if stack.len() == MOST_VALUES {
            return Err(OTHER);
        }
        stack.push(pushed);
    }
    match (ended, stack.pop()) {
        (Some(ended), _) => Ok(ended),
        (None, Some(address)) => Ok(address.memory()),
        (None, None) => Err("optimised out"),
    }
}

/// Returns the constant whose little-endian bytes are `bytes`.
pub(super) fn constant(bytes: &[u8]) -> Location {
    let mut word = [0; 8];
    match word.get_mut(..bytes.len()) {
        Some(low) if !bytes.is_empty() => {
            low.copy_from_slice(bytes);
            Location::Constant(i64::from_le_bytes(word))
        }
        _ => Location::Nowhere("a constant longer than 8 bytes"),
    }
}
