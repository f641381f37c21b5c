//! Parts of a histogram's keys as text.

use hvprobe_proto::v1::{HistogramForm, HistogramKeyValue, histogram_key_value::What};
use hvprobe_spec::shape::ShapeKind;

use super::schema::Key;
use crate::output::printable::escaped;
use crate::output::values::names::Names;
use crate::output::values::stack_trace::StackTrace;
use crate::output::values::{Value, value_text};

/// Formats a part of a key.
pub(crate) fn shown(key: &Key, value: &HistogramKeyValue, comm: &[u8], names: &Names) -> String {
    let number = match &value.what {
        None => return "(fault)".to_owned(),
        Some(What::Text(text)) => return escaped(text),
        Some(What::StackTrace(stack)) => {
            return StackTrace::from(stack).innermost(names);
        }
        Some(What::Number(number)) => *number,
    };
    match key.form {
        HistogramForm::Hex => format!("{number:x}"),
        HistogramForm::Symbol => {
            let name = names.of(number);
            let symbol = name.split_once('+').map_or(&*name, |(symbol, _)| symbol);
            format!("[{number:x}] {symbol}")
        }
        HistogramForm::SymbolOffset => format!("[{number:x}] {}", names.of(number)),
        HistogramForm::Execname => {
            let comm = escaped(comm);
            format!("{comm:<16}[{:>10}]", number.cast_signed())
        }
        HistogramForm::Log2 => format!("~ 2^{number}"),
        HistogramForm::Bits => match number {
            0 => "0".to_owned(),
            1..=64 => format!("~ 2^{}", number - 1),
            _ => "< 0".to_owned(),
        },
        HistogramForm::Buckets => {
            let width = i128::from(key.width.saturating_sub(1));
            let kind = key.shape.as_ref().map(|shape| &shape.kind);
            let is_signed = kind == Some(&ShapeKind::Signed);
            let (first, most) = match is_signed {
                true => (i128::from(number.cast_signed()), i128::from(i64::MAX)),
                false => (i128::from(number), i128::from(u64::MAX)),
            };
            format!("~ {first}-{}", most.min(first + width))
        }
        HistogramForm::Usecs => number.to_string(),
        _ => value_text::text(&typed(key, number), names),
    }
}

/// Returns a number as a value of the key's type.
pub(super) fn typed(key: &Key, number: u64) -> Value<'_> {
    match &key.shape {
        Some(shape) => Value::read(shape, None, &number.to_le_bytes()),
        None => Value::Unsigned(number.into()),
    }
}
