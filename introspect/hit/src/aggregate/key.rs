//! Keys of a histogram's entries.
//!
//! A key is stored as bytes, so an entry is looked up without an allocation. Each part begins with its kind, and
//! with its length if that varies, so different values are different bytes.

use hvprobe_arch::Gva;
use hvprobe_spec::FRAME;
use hvprobe_spec::aggregate::Part;
use hvprobe_spec::histogram::KeyForm;

/// A part of a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyValue {
    /// A value that could not be read.
    Unreadable,
    /// A number, extended to 64 bits, in the form that the key asks for.
    Number(u64),
    /// A text, without its NUL.
    Text(Box<[u8]>),
    /// A stack, the innermost address first.
    StackTrace(Box<[Gva]>),
}

const UNREADABLE: u8 = 0;
const NUMBER: u8 = 1;
const TEXT: u8 = 2;
const STACK_TRACE: u8 = 3;

/// Appends the mark of a value that could not be read.
pub(super) fn push_unreadable(key: &mut Vec<u8>) {
    key.push(UNREADABLE);
}

/// Appends `number` in the form that `part` asks for.
pub(super) fn push_number(key: &mut Vec<u8>, part: &Part, number: u64) {
    let made = match part.form {
        KeyForm::Plain
        | KeyForm::Hex
        | KeyForm::Symbol
        | KeyForm::SymbolOffset
        | KeyForm::ExecName => number,
        KeyForm::Log2 => match number {
            0 => 0,
            // The exponent of the least power of two that is not less, as in the kernel.
            _ => u64::from(u64::BITS - (number - 1).leading_zeros()),
        },
        KeyForm::Bits if part.of.is_signed() && number.cast_signed() < 0 => u64::MAX,
        KeyForm::Bits => u64::from(u64::BITS - number.leading_zeros()),
        KeyForm::Buckets(width) if part.of.is_signed() => bucket(number.cast_signed(), width),
        KeyForm::Buckets(width) => number - number.checked_rem(width).unwrap_or(0),
        KeyForm::Usecs => number / 1000,
    };
    key.push(NUMBER);
    key.extend_from_slice(&made.to_le_bytes());
}

/// Returns the start of the bucket that contains a signed `number`: a multiple of the width, but not less than
/// `i64::MIN`.
fn bucket(number: i64, width: u64) -> u64 {
    let wide = i128::from(number);
    let begins = wide - wide.checked_rem_euclid(width.into()).unwrap_or(0);
    i64::try_from(begins).unwrap_or(i64::MIN).cast_unsigned()
}

/// Appends a text, up to its NUL if it has one.
pub(super) fn push_text(key: &mut Vec<u8>, text: &[u8]) {
    let end = text.iter().position(|byte| *byte == 0);
    push_bytes(key, TEXT, &text[..end.unwrap_or(text.len())]);
}

/// Appends a stack, as it was captured.
pub(super) fn push_stack_trace(key: &mut Vec<u8>, captured: &[u8]) {
    push_bytes(key, STACK_TRACE, captured);
}

fn push_bytes(key: &mut Vec<u8>, kind: u8, bytes: &[u8]) {
    // No captured item is longer than that.
    let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
    key.push(kind);
    key.extend_from_slice(&len.to_le_bytes());
    key.extend_from_slice(&bytes[..usize::from(len)]);
}

/// Returns the parts of a key.
pub(super) fn parts(mut key: &[u8]) -> Vec<KeyValue> {
    let mut parts = Vec::new();
    while let Some((value, rest)) = first(key) {
        parts.push(value);
        key = rest;
    }
    parts
}

fn first(key: &[u8]) -> Option<(KeyValue, &[u8])> {
    let (kind, rest) = key.split_first()?;
    match *kind {
        UNREADABLE => Some((KeyValue::Unreadable, rest)),
        NUMBER => {
            let (number, rest) = rest.split_first_chunk()?;
            Some((KeyValue::Number(u64::from_le_bytes(*number)), rest))
        }
        _ => {
            let (len, rest) = rest.split_first_chunk()?;
            let (bytes, rest) = rest.split_at_checked(u16::from_le_bytes(*len).into())?;
            let value = match *kind {
                STACK_TRACE => KeyValue::StackTrace(addresses(bytes)),
                _ => KeyValue::Text(bytes.into()),
            };
            Some((value, rest))
        }
    }
}

/// Returns the addresses of a captured stack. `bytes` contains only their lower halves.
fn addresses(bytes: &[u8]) -> Box<[Gva]> {
    let (halves, _) = bytes.as_chunks::<FRAME>();
    let address = |half: &[u8; FRAME]| Gva(u64::from(u32::from_le_bytes(*half)) | HIGH);
    halves.iter().map(address).collect()
}

/// Upper half of every address of the kernel's text.
const HIGH: u64 = 0xffff_ffff_0000_0000;
