//! The value at the end of a chain: how it is shown, and where it is in an event.
//!
//! Invariant: a value that the event contains anyway, as in registers, is shown from there and costs nothing at a
//! hit. Every other value is captured. Texts share the room in an event that all other items leave.

use hvprobe_arch::regs::Gpr;
use hvprobe_linux::types::{Returned, Types};
use hvprobe_spec::fetch::{Element, Shown, TypeName, words};
use hvprobe_spec::shape::{Shape, ShapeKind};
use hvprobe_spec::{
    Base, Bits, CAPTURE_MAX, Common, Fetched, Item, Memory, ParseError, Pointer, Read, Source,
    SpecError, TextHeader,
};

use super::chain::{Chain, Start};
use super::refused::refused;
use super::types::{self, Characters};

/// A value and its source.
pub(super) struct Value {
    pub(super) from: From,
    pub(super) bits: Option<Bits>,
    pub(super) shape: Shape,
}

/// Source of a value.
pub(super) enum From {
    /// The event already contains it.
    Event(Source),
    /// Captured at the hit; for a return probe, at the return.
    Hit(Item),
    /// Captured at the entry of a return probe's function.
    Entry(Item),
}

/// Returns the value of `chain`, with the type `ty` if the definition names one.
pub(super) fn value(
    column: usize,
    mut chain: Chain,
    ty: Option<&TypeName>,
    types: Option<&Types>,
    returns: bool,
) -> Result<Value, ParseError> {
    if matches!(chain.start, Start::Text(_) | Start::Common(Common::Comm)) {
        let source = match chain.start {
            Start::Text(text) => Source::Constant(text.into_bytes()),
            _ => Source::Common(Common::Comm),
        };
        return Ok(Value {
            from: From::Event(source),
            bits: None,
            shape: types::text(),
        });
    }
    let Some(ty) = ty else {
        return untyped(column, chain, types, returns);
    };
    let at = ty.column.0;
    match ty.element {
        Element::String | Element::UserString => {
            if ty.count.is_some() {
                let why = "arrays of texts are not supported: fetch each by itself, as in +0(+8(%si)):string";
                return Err(refused(at, why));
            }
            let known = types.and_then(|types| types::characters(types, chain.ty?));
            let behind = known == Some(Characters::Behind) || chain.characters;
            if behind || chain.pointers.is_empty() {
                chain = chain.at(0, Memory::Either);
            }
            return text(at, chain, ty.element == Element::UserString);
        }
        Element::DentryName | Element::FileName => {
            let types = types.ok_or_else(|| refused(at, words::NOSUP_BTFARG))?;
            let member = |of, path| {
                let of = types::structure(types, at, of)?;
                types::offset(types, at, of, path)
            };
            if ty.element == Element::FileName {
                chain = after(chain, member("file", "f_path.dentry")?);
            }
            chain = after(chain, member("dentry", "d_name.name")?).at(0, Memory::Kernel);
            return text(at, chain, false);
        }
        _ => {}
    }
    let mut shape = match ty.element {
        Element::Own { shown } => own(&chain, shown, types),
        element => types::element(element, ty.to_string()),
    };
    chain.bits = match ty.element {
        Element::Bitfield { width, offset, .. } => Some((offset.into(), width)),
        // A bit field keeps its width.
        Element::Own { .. } => chain.bits,
        _ => None,
    };
    if let Some(count) = ty.count {
        if chain.pointers.is_empty() {
            return Err(refused(at, words::BAD_STRING));
        }
        shape = Shape {
            name: shape.name.clone(),
            size: shape.size * u32::from(count),
            kind: ShapeKind::Array {
                element: Box::new(shape),
                count: count.into(),
            },
        };
    }
    plain(column, chain, shape, returns)
}

/// Returns the shape of a number: with the width of its own type if that is known, otherwise with 64 bits.
fn own(chain: &Chain, shown: Option<Shown>, types: Option<&Types>) -> Shape {
    let known = types.and_then(|types| types::integer(types, chain.ty?));
    let (shown, bits) = match (shown, known) {
        (Some(shown), Some((bits, _))) => (shown, bits),
        (Some(shown), None) => (shown, 64),
        (None, Some((bits, true))) => (Shown::Signed, bits),
        (None, Some((bits, false))) if !chain.pointers.is_empty() => (Shown::Unsigned, bits),
        // A register: it may hold an error code, even if its type is unsigned.
        (None, _) => (Shown::Signed, 64),
    };
    types::element(Element::Integer { shown, bits }, format!("{shown}{bits}"))
}

/// Returns the value of `chain` with the shape of its own type or, if that is not known, of a 64-bit number.
fn untyped(
    column: usize,
    chain: Chain,
    types: Option<&Types>,
    returns: bool,
) -> Result<Value, ParseError> {
    let (Some(types), Some(ty)) = (types, chain.ty) else {
        return plain(column, chain, types::word(), returns);
    };
    let shape = types::shape(types, ty).ok_or_else(|| {
        let why = "the size of the value is unknown: name a type, as in :x64";
        refused(column, why)
    })?;
    let chain = match chain.start {
        Start::Common(Common::Retval) => result(column, chain, shape.size, types.returned(ty))?,
        _ => chain,
    };
    plain(column, chain, shape, returns)
}

/// Returns the chain of the whole return value. `chain` leads to the first eight bytes of the value, or to its
/// address.
fn result(column: usize, chain: Chain, size: u32, place: Returned) -> Result<Chain, ParseError> {
    match place {
        Returned::Register if size <= 8 => Ok(chain),
        // A type may exceed eight bytes only because of its alignment. RDX then holds padding, which no member
        // shows.
        Returned::Register | Returned::Registers => Ok(Chain::of(Start::Result, chain.ty)),
        Returned::Memory => {
            let address = Chain::of(Start::Base(Base::Register(Gpr::Rax)), None);
            Ok(address.at(0, Memory::Kernel))
        }
        Returned::Unknown if size <= 8 => Ok(chain),
        Returned::Unknown => {
            let why = format!("it is not known where the {size} bytes of the result are");
            Err(refused(column, why))
        }
    }
}

/// Returns a value of a fixed size, shown as `shape`.
pub(super) fn plain(
    column: usize,
    chain: Chain,
    shape: Shape,
    returns: bool,
) -> Result<Value, ParseError> {
    let bits = chain
        .bits
        .and_then(|(offset, width)| Some((u8::try_from(offset).ok()?, width)));
    let bits = bits.map(|(offset, width)| Bits { offset, width });
    let from = place(column, chain, shape.size, returns)?;
    Ok(Value { from, bits, shape })
}

fn place(column: usize, chain: Chain, size: u32, returns: bool) -> Result<From, ParseError> {
    let registers = |registers, entry| From::Event(Source::Registers { registers, entry });
    let len = || {
        let len = u16::try_from(size).ok();
        let len = len.filter(|len| (1..=CAPTURE_MAX).contains(&usize::from(*len)));
        len.ok_or_else(|| {
            let why =
                format!("its {size} bytes are no value of an event, which has 1 to {CAPTURE_MAX}");
            refused(column, why)
        })
    };
    Ok(match (chain.start, chain.pointers.is_empty()) {
        (Start::Base(base), true) => match base {
            Base::Register(gpr) => registers(vec![gpr], false),
            Base::Entry(gpr) => registers(vec![gpr], true),
            Base::Constant(value) => From::Event(Source::Constant(value.to_le_bytes().to_vec())),
            Base::Task => From::Hit(fetched(base, Vec::new(), Read::Bytes(8))),
        },
        (Start::Base(base), false) => From::Hit(fetched(base, chain.pointers, Read::Bytes(len()?))),
        (Start::Two(first, second), true) => registers(vec![first, second], returns),
        (Start::Result, true) => registers(vec![Gpr::Rax, Gpr::Rdx], false),
        (Start::Parameter(word), true) => {
            let item = match len()? {
                ..=8 => Item::Stack(word),
                len => Item::Memory {
                    base: Gpr::Rsp,
                    offset: i64::from(word) * 8,
                    len,
                },
            };
            match returns {
                true => From::Entry(item),
                false => From::Hit(item),
            }
        }
        (Start::Common(common), true) => From::Event(Source::Common(common)),
        (Start::Two(..) | Start::Result | Start::Parameter(_) | Start::Common(_), false)
        | (Start::Text(_), _) => {
            return Err(refused(column, words::BAD_FETCH_ARG));
        }
    })
}

fn fetched(base: Base, pointers: Vec<Pointer>, read: Read) -> Item {
    // Read it as a word of the stack, because detours can record such words.
    if let (Base::Register(Gpr::Rsp), [only], Read::Bytes(..=8)) = (base, &*pointers, read)
        && only.memory == Memory::Kernel
        && only.offset % 8 == 0
        && let Ok(word) = u16::try_from(only.offset / 8)
    {
        return Item::Stack(word);
    }
    Item::Fetched(Box::new(Fetched {
        base,
        pointers,
        read,
    }))
}

/// Returns the chain of the pointer at `offset` from the address in `chain`.
fn after(chain: Chain, offset: u64) -> Chain {
    chain.at(offset.cast_signed(), Memory::Kernel)
}

/// Returns a text. Its maximum length is set by [`share`], once all other items have their room.
fn text(column: usize, mut chain: Chain, user: bool) -> Result<Value, ParseError> {
    if let Some(last) = chain.pointers.last_mut() {
        last.memory = match last.memory {
            _ if user => Memory::User,
            Memory::User => Memory::User,
            // Like the kernel, decide by the address whether the text is in user memory.
            Memory::Kernel | Memory::Either => Memory::Either,
        };
    }
    let base = match chain.start {
        Start::Base(base) => base,
        Start::Common(Common::Retval) => Base::Register(Gpr::Rax),
        _ => return Err(refused(column, words::BAD_STRING)),
    };
    Ok(Value {
        from: From::Hit(fetched(base, chain.pointers, Read::Text(0))),
        bits: None,
        shape: types::text(),
    })
}

/// Sets the maximum lengths of the texts in `items`, which are all items that an event captures.
///
/// # Errors
/// When there is no room for a text.
pub(super) fn share<'a>(items: impl Iterator<Item = &'a mut Item>) -> Result<(), SpecError> {
    let mut texts = Vec::new();
    let mut taken = 0;
    for item in items {
        taken += item.len();
        if let Item::Fetched(fetched) = item
            && let Read::Text(most @ 0) = &mut fetched.read
        {
            texts.push(most);
        }
    }
    let Some(count) = std::num::NonZero::new(texts.len()) else {
        return Ok(());
    };
    let each = CAPTURE_MAX.saturating_sub(taken) / count;
    if each == 0 {
        let bytes = taken + count.get();
        return Err(SpecError::CaptureTooLong { bytes });
    }
    debug_assert!(each + TextHeader::SIZE <= CAPTURE_MAX);
    for most in texts {
        *most = u16::try_from(each).unwrap_or(u16::MAX);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_of_more_than_a_word_is_never_shorter_than_its_type() {
        let start = |size, place| {
            let chain = Chain::of(Start::Common(Common::Retval), None);
            result(0, chain, size, place).unwrap().start
        };
        assert_eq!(start(8, Returned::Register), Start::Common(Common::Retval));
        // Aligned to 16 bytes, with members in the first 8 only.
        assert_eq!(start(16, Returned::Register), Start::Result);
        assert_eq!(start(16, Returned::Registers), Start::Result);
    }
}
