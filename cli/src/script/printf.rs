//! Values formatted by `printf`.

use std::num::NonZeroU64;

use hvprobe_spec::script::{Conversion, Directive};

use crate::output::harmless;
use crate::output::values::Value;

/// Argument of `printf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Printed {
    /// A number.
    Number(i128),
    /// Text without control characters for a terminal.
    Text(String),
}

impl Printed {
    /// Converts `value`; a value that is neither number nor text becomes a placeholder.
    pub(crate) fn of(value: &Value<'_>) -> Self {
        match value {
            Value::Unsigned(number) | Value::Hex(number) => {
                Self::Number(i128::try_from(*number).unwrap_or(i128::MAX))
            }
            Value::Signed(number) => Self::Number(*number),
            Value::Char(byte) => Self::Number((*byte).into()),
            Value::Bool(so) => Self::Number((*so).into()),
            Value::Pointer(at) | Value::Symbol(at) => Self::Number((*at).into()),
            Value::Text { bytes, .. } => Self::Text(harmless(bytes)),
            Value::Fault => Self::Text("(fault)".to_owned()),
            Value::Unknown
            | Value::More
            | Value::Named { .. }
            | Value::Array(_)
            | Value::Struct(_)
            | Value::Bytes(_) => Self::Text("?".to_owned()),
        }
    }

    /// Returns the number divided by `by`, rounded towards zero. A text stays as it is.
    pub(crate) fn divided(self, by: NonZeroU64) -> Self {
        match self {
            Self::Number(number) => Self::Number(number / i128::from(by.get())),
            text => text,
        }
    }

    /// Returns the lowest 64 bits of a number.
    pub(crate) fn bits(&self) -> Option<u64> {
        match self {
            // The remainder modulo 2^64 has the bits of the two's complement.
            Self::Number(number) => u64::try_from(number.rem_euclid(1 << 64)).ok(),
            Self::Text(_) => None,
        }
    }
}

/// Formats `value` by `directive`. If the directive is for a number but `value` is a text, prints the text.
pub(crate) fn text(directive: &Directive, value: &Printed) -> String {
    let plus = |number: bool| if directive.plus && number { "+" } else { "" };
    let before = |prefix: &'static str| if directive.alternate { prefix } else { "" };
    let (sign, digits) = match (directive.conversion, value.bits(), value) {
        (Conversion::Text, _, Printed::Number(number)) => (String::new(), number.to_string()),
        (_, None, Printed::Text(text)) | (_, _, Printed::Text(text)) => {
            let most = directive.precision.unwrap_or(usize::MAX);
            (String::new(), text.chars().take(most).collect())
        }
        (conversion, bits, Printed::Number(_)) => {
            let bits = bits.unwrap_or(0);
            match conversion {
                Conversion::Unsigned => (String::new(), bits.to_string()),
                Conversion::Hex => (before("0x").to_owned(), format!("{bits:x}")),
                Conversion::UpperHex => (before("0X").to_owned(), format!("{bits:X}")),
                Conversion::Octal => (before("0").to_owned(), format!("{bits:o}")),
                Conversion::Pointer => ("0x".to_owned(), format!("{bits:x}")),
                Conversion::Char => (String::new(), harmless(&bits.to_le_bytes()[..1])),
                Conversion::Signed | Conversion::Text => {
                    let number = bits.cast_signed();
                    let sign = if number < 0 { "-" } else { plus(true) };
                    (sign.to_owned(), number.unsigned_abs().to_string())
                }
            }
        }
    };
    let length = sign.chars().count() + digits.chars().count();
    let fill = directive.width.saturating_sub(length);
    let is_number = value.bits().is_some() && directive.conversion != Conversion::Char;
    match (directive.left, directive.zeros && is_number) {
        (true, _) => format!("{sign}{digits}{}", " ".repeat(fill)),
        (false, true) => format!("{sign}{}{digits}", "0".repeat(fill)),
        (false, false) => format!("{}{sign}{digits}", " ".repeat(fill)),
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_spec::script::{StatementKind, read_script};

    use super::*;

    /// Formats `value` by the directive `text_of`.
    fn shown(text_of: &str, value: &Printed) -> String {
        let script = read_script(&format!("kprobe:f {{ printf(\"{text_of}\", args.x); }}"));
        let script = script.expect("a script");
        match &script.clauses[0].statements[0].kind {
            StatementKind::Printf { format, .. } => {
                text(format.directives().next().expect("a directive"), value)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn numbers_are_printed_as_c_does() {
        for (directive, number, expected) in [
            ("%d", -5, "-5"),
            ("%5d", -5, "   -5"),
            ("%-5d", -5, "-5   "),
            ("%05d", -5, "-0005"),
            ("%+d", 5, "+5"),
            ("%u", -1, "18446744073709551615"),
            ("%x", -1, "ffffffffffffffff"),
            ("%#x", 255, "0xff"),
            ("%08X", 0xbeef, "0000BEEF"),
            ("%o", 8, "10"),
            ("%lld", i128::from(i64::MIN), "-9223372036854775808"),
            ("%d", i128::from(u64::MAX), "-1"),
            ("%p", 0x1000, "0x1000"),
            ("%c", 65, "A"),
            ("%c", 27, "?"),
            ("%s", 7, "7"),
        ] {
            assert_eq!(
                shown(directive, &Printed::Number(number)),
                expected,
                "{directive}"
            );
        }
    }

    #[test]
    fn texts_are_printed_as_wide_as_is_asked_for() {
        let text = Printed::of(&Value::Text {
            bytes: b"gr\xc3\xbcn\x1b".to_vec(),
            truncated: true,
        });
        for (directive, expected) in [
            ("%s", "grün?"),
            ("%7s", "  grün?"),
            ("%-7s", "grün?  "),
            ("%.2s", "gr"),
            ("%05.1s", "    g"),
            ("%d", "grün?"),
        ] {
            assert_eq!(shown(directive, &text), expected, "{directive}");
        }
        assert_eq!(shown("%d", &Printed::of(&Value::Fault)), "(fault)");
    }
}
