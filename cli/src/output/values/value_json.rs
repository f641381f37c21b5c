//! Values as JSON: numbers as numbers, names and texts as strings, structures as objects.
//!
//! Addresses and hexadecimal values are strings of hexadecimal digits, as are numbers of more than 64 bits. A
//! value that could not be read is `null`.

use hvprobe_spec::language::text::hex;
use serde::{Serialize, Serializer};

use super::decode::Value;
use super::names::Names;
use super::value_text;

/// JSON value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum Json {
    /// Unknown value.
    Null,
    /// Truth value.
    Bool(bool),
    /// Unsigned number.
    Unsigned(u64),
    /// Signed number.
    Signed(i64),
    /// String.
    Text(String),
    /// Array.
    List(Vec<Json>),
    /// Object whose members keep this order.
    Object(#[serde(serialize_with = "in_order")] Vec<(String, Json)>),
}

fn in_order<S: Serializer>(members: &[(String, Json)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(members.iter().map(|(name, value)| (name, value)))
}

impl Json {
    /// Converts `value`, with names for its addresses.
    pub(crate) fn of(value: &Value<'_>, names: &Names) -> Self {
        match value {
            Value::Fault | Value::Unknown => Self::Null,
            Value::Bool(so) => Self::Bool(*so),
            Value::Unsigned(number) => match u64::try_from(*number) {
                Ok(number) => Self::Unsigned(number),
                Err(_) => Self::Text(format!("{number:#x}")),
            },
            Value::Signed(number) => match i64::try_from(*number) {
                Ok(number) => Self::Signed(number),
                Err(_) => Self::Text(format!("{number:#x}")),
            },
            Value::Char(byte) => match char::from(*byte) {
                c if c.is_ascii() => Self::Text(c.to_string()),
                _ => Self::Unsigned((*byte).into()),
            },
            Value::Named { names, rest } => Self::Text(value_text::flags(names, *rest)),
            Value::Array(all) => Self::List(all.iter().map(|each| Self::of(each, names)).collect()),
            Value::Struct(all) => Self::object(all, names),
            Value::Text {
                bytes,
                truncated: false,
            } => Self::Text(text(bytes)),
            Value::Text {
                bytes,
                truncated: true,
            } => Self::Object(vec![
                ("text".to_owned(), Self::Text(text(bytes))),
                ("truncated".to_owned(), Self::Bool(true)),
            ]),
            Value::Bytes(bytes) => Self::Text(hex(bytes)),
            Value::Hex(_) | Value::Pointer(_) | Value::Symbol(_) | Value::More => {
                Self::Text(value_text::text(value, names))
            }
        }
    }

    /// Converts named `values` to an object.
    pub(crate) fn object(values: &[(&str, Value<'_>)], names: &Names) -> Self {
        let member = |(name, value): &(&str, Value<'_>)| {
            let name = (*name).to_owned();
            (name, Self::of(value, names))
        };
        Self::Object(values.iter().map(member).collect())
    }
}

/// Returns `bytes` as text. JSON escapes ASCII control characters, but not DEL and the control characters above
/// ASCII; these are replaced.
fn text(bytes: &[u8]) -> String {
    let replaced = |c: char| match c {
        '\u{7f}'..='\u{9f}' => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    String::from_utf8_lossy(bytes)
        .chars()
        .map(replaced)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(value: &Value<'_>) -> String {
        let mut names = Names::default();
        names.insert(0x1010, Some(("vfs_read", 0x1000)));
        serde_json::to_string(&Json::of(value, &names)).unwrap()
    }

    #[test]
    fn values_have_the_types_of_json() {
        for (value, expected) in [
            (Value::Fault, "null"),
            (Value::Unknown, "null"),
            (Value::Unsigned(u64::MAX.into()), "18446744073709551615"),
            (Value::Unsigned(1 << 64), "\"0x10000000000000000\""),
            (Value::Signed(-100), "-100"),
            (
                Value::Signed(-1 << 64),
                "\"0xffffffffffffffff0000000000000000\"",
            ),
            (Value::Hex(16), "\"0x10\""),
            (Value::Char(b'a'), "\"a\""),
            (Value::Char(0), "\"\\u0000\""),
            (Value::Char(0x9b), "155"),
            (Value::Bool(false), "false"),
            (Value::Pointer(0), "\"0x0\""),
            (Value::Symbol(0x1010), "\"vfs_read+0x10\""),
            (Value::Symbol(1), "\"0x1\""),
            (
                Value::Named {
                    names: vec!["A"],
                    rest: 2,
                },
                "\"A|0x2\"",
            ),
            (Value::Bytes(vec![1, 2]), "\"0102\""),
            (
                Value::Array(vec![Value::Signed(1), Value::More]),
                "[1,\"...\"]",
            ),
            (
                Value::Struct(vec![("b", Value::Signed(1)), ("a", Value::Fault)]),
                "{\"b\":1,\"a\":null}",
            ),
        ] {
            assert_eq!(shown(&value), expected);
        }
    }

    #[test]
    fn texts_that_go_on_are_objects() {
        let text = |bytes: &[u8], truncated| Value::Text {
            bytes: bytes.to_vec(),
            truncated,
        };
        assert_eq!(shown(&text(b"a\"b", false)), r#""a\"b""#);
        assert_eq!(shown(&text(b"a", true)), r#"{"text":"a","truncated":true}"#);
        assert_eq!(
            shown(&text("\x1b\u{9b}\x7f".as_bytes(), false)),
            "\"\\u001b\u{fffd}\u{fffd}\""
        );
    }
}
