//! Resolves expressions to a first value and the pointers to follow from it.
//!
//! Invariant: a chain is what the kernel makes of the same expression (`FETCH_OP_*` in
//! kernel/trace/trace_probe.h): one first value, and an offset for each memory access after it.

use hvprobe_arch::regs::Gpr;
use hvprobe_linux::types::{Place, TypeId, Types};
use hvprobe_spec::fetch::{Access, Expr, ExprKind, Register, words};
use hvprobe_spec::{Base, Common, Memory, ParseError, Pointer};

use super::function::Function;
use super::refused::refused;
use super::syscall::{Call, CallArgument};
use super::types;
use crate::plan::kernel::Probeable;

/// A resolved expression.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    pub(super) start: Start,
    pub(super) pointers: Vec<Pointer>,
    /// Type of the value at the end of the chain, if it is known.
    pub(super) ty: Option<TypeId>,
    /// Range of bits of that value: the first bit and the number of bits.
    pub(super) bits: Option<(u64, u8)>,
    /// Whether that value is known to point to characters, although no type says so.
    pub(super) characters: bool,
}

/// The first value of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// A base that pointers can be followed from.
    Base(Base),
    /// A parameter in two registers.
    Two(Gpr, Gpr),
    /// A return value in RAX and RDX.
    Result,
    /// A parameter on the stack at the function's entry, beginning at this word.
    Parameter(u16),
    /// A field of every event.
    Common(Common),
    /// A text constant in the definition.
    Text(String),
}

/// Context in which expressions are resolved.
pub(super) struct Around<'a> {
    pub(super) function: &'a Function<'a>,
    pub(super) kernel: &'a Probeable<'a>,
    /// Whether the function's parameters are available.
    pub(super) is_entry: bool,
    /// Whether the probe is a return probe. Its parameters are those at the entry of the call.
    pub(super) returns: bool,
}

impl Chain {
    pub(super) fn of(start: Start, ty: Option<TypeId>) -> Self {
        Self {
            start,
            pointers: Vec::new(),
            ty,
            bits: None,
            characters: false,
        }
    }

    fn base(base: Base) -> Self {
        Self::of(Start::Base(base), None)
    }

    /// Returns the chain of the memory at `offset` from the address in `self`.
    pub(super) fn at(mut self, offset: i64, memory: Memory) -> Self {
        self.pointers.push(Pointer { offset, memory });
        self.ty = None;
        self.bits = None;
        self.characters = false;
        self
    }
}

impl Around<'_> {
    /// Resolves `expr`.
    pub(super) fn chain(&self, expr: &Expr) -> Result<Chain, ParseError> {
        let column = expr.column.0;
        let registers = |gpr| Chain::base(Base::Register(gpr));
        Ok(match &expr.kind {
            ExprKind::Register(register) => match register {
                Register::General(gpr) => registers(*gpr),
                Register::Ip => Chain::of(Start::Common(Common::Ip), None),
                Register::Flags => Chain::of(Start::Common(Common::Flags), None),
                Register::Cs => Chain::base(Base::Constant(KERNEL_CS)),
                Register::Ss => Chain::base(Base::Constant(KERNEL_DS)),
                Register::OrigAx => Chain::base(Base::Constant(NO_CALL)),
            },
            ExprKind::Memory(address) => {
                Chain::base(Base::Constant(*address)).at(0, Memory::Kernel)
            }
            ExprKind::Symbol { name, offset } => {
                let symbols = self.kernel.image.symbols();
                let symbol = symbols
                    .lookup(name)
                    .map_err(|why| refused(column, why.to_string()))?;
                Chain::base(Base::Constant(symbol.addr.0)).at(*offset, Memory::Kernel)
            }
            ExprKind::Stack => registers(Gpr::Rsp),
            ExprKind::StackWord(word) => {
                registers(Gpr::Rsp).at(i64::from(*word) * 8, Memory::Kernel)
            }
            ExprKind::Argument(number) => {
                self.check_entry(column)?;
                let (known, place) = self.function.by_number(column, *number)?;
                self.parameter(column, place, known.map(|it| it.ty))?
            }
            ExprKind::Arguments => {
                return Err(refused(column, words::NO_BTFARG));
            }
            ExprKind::Return { path } => {
                let start = Start::Common(Common::Retval);
                let chain = Chain::of(start, self.function.returns(column)?);
                self.path(column, chain, path)?
            }
            ExprKind::Comm => Chain::of(Start::Common(Common::Comm), None),
            ExprKind::Current { path } if path.is_empty() => Chain::base(Base::Task),
            ExprKind::Current { path } => {
                let task = types::structure(self.types(column)?, column, "task_struct")?;
                self.members(column, Chain::base(Base::Task), Some(task), path)?
            }
            ExprKind::Immediate(value) => Chain::base(Base::Constant(*value)),
            ExprKind::Text(text) => Chain::of(Start::Text(text.clone()), None),
            ExprKind::Variable { name, path } => {
                self.check_entry(column)?;
                if let Some(argument) = self
                    .call_argument(column, name)?
                    .filter(|_| path.is_empty())
                {
                    return Ok(argument);
                }
                let parameter = self.function.by_name(column, name)?;
                let chain = self.parameter(column, parameter.place, Some(parameter.ty))?;
                self.path(column, chain, path)?
            }
            ExprKind::Dereference {
                user,
                offset,
                inner,
            } => {
                let memory = if *user { Memory::User } else { Memory::Kernel };
                let inner = self.chain(inner)?;
                self.followed(column, inner)?.at(*offset, memory)
            }
            ExprKind::PerCpu { .. } => {
                let why = "variables of one CPU are not supported: read %gs yourself";
                return Err(refused(column, why));
            }
            ExprKind::Cast {
                of,
                member,
                inner,
                path,
            } => self.cast(column, of, member.as_deref(), inner, path)?,
        })
    }

    /// Refuses parameters in a probe that is neither at a function's entry nor a return probe.
    pub(super) fn check_entry(&self, column: usize) -> Result<(), ParseError> {
        match self.is_entry {
            true => Ok(()),
            false => Err(refused(column, words::NOFENTRY_ARGS)),
        }
    }

    /// If the function is the entry of a system call, returns the call's argument `name`, unless a parameter of the
    /// function itself has that name.
    fn call_argument(&self, column: usize, name: &str) -> Result<Option<Chain>, ParseError> {
        let own = self.function.whole();
        let own = own.is_ok_and(|(own, _)| own.iter().any(|it| it.name == name));
        let call = self.function.call.as_ref().filter(|_| !own);
        let Some((call, argument)) = call.and_then(|call| Some((call, call.by_name(name)?))) else {
            return Ok(None);
        };
        if self.returns && call.replaces {
            let why = "the call replaces the registers that it was made with";
            return Err(refused(column, format!("{}; {why}", words::NO_BTFARG)));
        }
        Ok(Some(self.of_call(call, argument)))
    }

    /// Returns the chain of an argument of a system call.
    pub(super) fn of_call(&self, call: &Call, argument: &CallArgument) -> Chain {
        let registers = Chain::base(self.at_entry(call.registers));
        let mut chain = registers.at(argument.offset, Memory::Kernel);
        chain.ty = argument.ty;
        chain.characters = argument.characters;
        chain
    }

    /// Returns the value of `gpr` at the function's entry.
    fn at_entry(&self, gpr: Gpr) -> Base {
        match self.returns {
            true => Base::Entry(gpr),
            false => Base::Register(gpr),
        }
    }

    /// Returns the chain of a parameter at `place`.
    pub(super) fn parameter(
        &self,
        column: usize,
        place: Place,
        ty: Option<TypeId>,
    ) -> Result<Chain, ParseError> {
        let start = match place {
            Place::Register(gpr) => Start::Base(self.at_entry(gpr)),
            Place::Registers(first, second) => Start::Two(first, second),
            Place::Stack(word) => Start::Parameter(word),
            Place::Unknown => {
                let why = "it is not known where this argument is";
                return Err(refused(column, format!("{}; {why}", words::NO_BTFARG)));
            }
        };
        Ok(Chain::of(start, ty))
    }

    /// Converts `chain` to one that pointers can be followed from.
    fn followed(&self, column: usize, mut chain: Chain) -> Result<Chain, ParseError> {
        let start = match chain.start {
            Start::Common(Common::Retval) => Start::Base(Base::Register(Gpr::Rax)),
            // At the return, the stack words of the entry are no longer there.
            Start::Parameter(word) if !self.returns && chain.pointers.is_empty() => {
                chain.pointers.push(Pointer {
                    offset: i64::from(word) * 8,
                    memory: Memory::Kernel,
                });
                Start::Base(Base::Register(Gpr::Rsp))
            }
            Start::Base(base) => Start::Base(base),
            _ => {
                let why = "memory cannot be followed from here";
                return Err(refused(column, format!("{}; {why}", words::BAD_FETCH_ARG)));
            }
        };
        chain.start = start;
        Ok(chain)
    }

    fn path(&self, column: usize, chain: Chain, path: &[Access]) -> Result<Chain, ParseError> {
        let Some(first) = path.first() else {
            return Ok(chain);
        };
        let types = self.types(column)?;
        let Some(ty) = chain.ty else {
            self.function.note_unknown();
            return Err(refused(column, words::NO_BTF_ENTRY));
        };
        if !first.arrow {
            return Err(refused(first.column.0, words::NOSUP_DAT_ARG));
        }
        self.members(column, chain, types.pointee(ty), path)
    }

    /// Returns the chain of the member at `path`, given a `chain` that points to a value of type `of`.
    fn members(
        &self,
        column: usize,
        chain: Chain,
        of: Option<TypeId>,
        path: &[Access],
    ) -> Result<Chain, ParseError> {
        let types = self.types(column)?;
        let mut chain = self.followed(column, chain)?.at(0, Memory::Kernel);
        chain.ty = of;
        for (position, access) in path.iter().enumerate() {
            let at = access.column.0;
            if position > 0 && access.arrow {
                let target = chain.ty.and_then(|ty| types.pointee(ty));
                chain = chain.at(0, Memory::Kernel);
                chain.ty = target;
            }
            let Some(of) = chain.ty.filter(|ty| types::is_structure(types, *ty)) else {
                return Err(refused(at, words::NO_PTR_STRCT));
            };
            let found = types.member(of, &access.field).ok_or_else(|| {
                let of = types.name(of);
                refused(
                    at,
                    format!("{}; it is no member of {of}", words::NO_BTF_FIELD),
                )
            })?;
            let (bytes, bits) = types::within(types, &found);
            if let Some(last) = chain.pointers.last_mut() {
                last.offset = last.offset.wrapping_add_unsigned(bytes);
            }
            chain.ty = Some(found.ty);
            chain.bits = bits;
        }
        Ok(chain)
    }

    fn cast(
        &self,
        column: usize,
        of: &str,
        member: Option<&str>,
        inner: &Expr,
        path: &[Access],
    ) -> Result<Chain, ParseError> {
        let types = self.types(column)?;
        let of = types::structure(types, column, of);
        let of = of.inspect_err(|_| self.function.note_unknown())?;
        let inner = self.chain(inner)?;
        let mut chain = self.members(column, inner, Some(of), path)?;
        if let Some(member) = member {
            // The address is that of the member; the structure begins before it.
            let offset = types::offset(types, column, of, member)?;
            let before = chain.pointers.len().checked_sub(1 + arrows(path));
            if let Some(first) = before.and_then(|at| chain.pointers.get_mut(at)) {
                first.offset = first.offset.wrapping_sub_unsigned(offset);
            }
        }
        Ok(chain)
    }

    fn types(&self, column: usize) -> Result<&Types, ParseError> {
        let types = self.function.types();
        types.map_err(|why| refused(column, format!("{}; {why}", words::NOSUP_BTFARG)))
    }
}

/// Returns the number of pointers followed in `path` after its first step.
fn arrows(path: &[Access]) -> usize {
    path.iter().skip(1).filter(|access| access.arrow).count()
}

/// CS in `pt_regs` at every kprobe: the kernel's code selector (arch/x86/include/asm/segment.h).
const KERNEL_CS: u64 = 0x10;
/// SS in `pt_regs` at every kprobe: the kernel's data selector (arch/x86/include/asm/segment.h).
const KERNEL_DS: u64 = 0x18;
/// `orig_ax` in `pt_regs` at every kprobe: the mark that there was no system call.
const NO_CALL: u64 = u64::MAX;
