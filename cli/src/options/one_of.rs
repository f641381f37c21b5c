//! Options that take one of a few values by its name.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// Returns a parser that accepts the name of one of `values`, as `name` returns it. The text beside each value is
/// its help.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    values: &'static [(T, &'static str)],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let possible = values
        .iter()
        .map(move |(value, help)| PossibleValue::new(name(*value)).help(*help));
    PossibleValuesParser::new(possible).try_map(move |text| {
        let found = values.iter().find(|(value, _)| name(*value) == text);
        // The parser of possible values has already refused other texts.
        found
            .map(|(value, _)| *value)
            .ok_or("there is no such value")
    })
}
