//! Parts of a histogram's keys as text.

use hvprobe_proto::v1::{
    HistogramForm, HistogramKey, HistogramKeyValue, TypeKind, histogram_key_value::What,
};
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::shape::Shape;

use crate::output::escaped;
use crate::output::values::names::Names;
use crate::output::values::stack_trace::StackTrace;
use crate::output::values::{Value, value_text};

/// Returns whether the values of a key are addresses that are shown as symbols.
pub(crate) fn is_symbol(key: &HistogramKey) -> bool {
    matches!(
        key.form(),
        HistogramForm::Symbol | HistogramForm::SymbolOffset
    )
}

/// Formats a part of a key.
pub(crate) fn shown(
    key: &HistogramKey,
    value: &HistogramKeyValue,
    comm: &[u8],
    names: &Names,
) -> String {
    let number = match &value.what {
        None => return "(fault)".to_owned(),
        Some(What::Text(text)) => return escaped(text),
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
            let kind = key.r#type.as_ref().map(|ty| ty.kind());
            let is_signed = kind == Some(TypeKind::Signed);
            let (first, most) = match is_signed {
                true => (i128::from(number.cast_signed()), i128::from(i64::MAX)),
                false => (i128::from(number), i128::from(u64::MAX)),
            };
            format!("~ {first}-{}", most.min(first + width))
        }
        HistogramForm::Usecs => number.to_string(),
        _ => typed(key, number, |value| value_text::text(value, names)),
    }
}

/// Shows a number as a value of the key's type.
pub(super) fn typed<T>(key: &HistogramKey, number: u64, show: impl Fn(&Value<'_>) -> T) -> T {
    match key.r#type.clone().map(Shape::from_wire) {
        Some(Ok(shape)) => show(&Value::read(&shape, None, &number.to_le_bytes())),
        Some(Err(_)) => show(&Value::Unknown),
        None => show(&Value::Unsigned(number.into())),
    }
}
