//! The parts of a histogram's keys as text.

use hvprobe_proto::v1::{
    HistogramForm, HistogramKey, HistogramKeyValue, histogram_key_value::What,
};

use super::harmless;
use super::names::Names;
use super::stack_trace::StackTrace;
use super::value_text;
use super::values::Value;

/// Whether the values of a key are addresses that are shown by their symbols.
pub(crate) fn is_symbol(key: &HistogramKey) -> bool {
    matches!(
        key.form(),
        HistogramForm::Symbol | HistogramForm::SymbolOffset
    )
}

/// A part of a key.
pub(crate) fn shown(
    key: &HistogramKey,
    value: &HistogramKeyValue,
    comm: &[u8],
    names: &Names,
) -> String {
    let number = match &value.what {
        None => return "(fault)".to_owned(),
        Some(What::Text(text)) => return harmless(text),
        Some(What::StackTrace(stack)) => {
            return StackTrace::from(stack).innermost(names);
        }
        Some(What::Number(number)) => *number,
    };
    match key.form() {
        HistogramForm::Hex => format!("{number:x}"),
        HistogramForm::Symbol => {
            let name = names.of(number);
            let symbol = name.split_once('+').map_or(&*name, |(symbol, _)| symbol);
            format!("[{number:x}] {symbol}")
        }
        HistogramForm::SymbolOffset => format!("[{number:x}] {}", names.of(number)),
        HistogramForm::Execname => {
            let comm = harmless(comm);
            format!("{comm:<16}[{:>10}]", number.cast_signed())
        }
        HistogramForm::Log2 => format!("~ 2^{number}"),
        HistogramForm::Bits => match number {
            0 => "0".to_owned(),
            1..=64 => format!("~ 2^{}", number - 1),
            _ => "< 0".to_owned(),
        },
        HistogramForm::Buckets => {
            let last = number.saturating_add(key.width.saturating_sub(1));
            format!("~ {number}-{last}")
        }
        HistogramForm::Usecs => number.to_string(),
        _ => value_text::text(&typed(key, number), names),
    }
}

/// A number as its type has it.
pub(super) fn typed(key: &HistogramKey, number: u64) -> Value<'_> {
    match &key.r#type {
        Some(ty) => Value::read(ty, None, &number.to_le_bytes()),
        None => Value::Unsigned(number.into()),
    }
}
