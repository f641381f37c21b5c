//! Values as text in a line.

use std::fmt::{self, Write as _};

use hvprobe_spec::errno;
use hvprobe_spec::language::text::hex;

use super::decode::Value;
use super::names::Names;
use super::quoted;

/// Formats `value`, with names for its addresses.
pub(crate) fn text(value: &Value<'_>, names: &Names) -> String {
    let mut text = String::new();
    write(&mut text, value, names).expect("writing to a string cannot fail");
    text
}

/// Formats the result of a function. If its type can hold an error, an error is shown by its name.
pub(crate) fn result(value: &Value<'_>, names: &Names) -> String {
    let returned = match value {
        Value::Signed(number) => i64::try_from(*number).ok().map(i64::cast_unsigned),
        Value::Pointer(at) => Some(*at),
        _ => None,
    };
    match returned.and_then(errno::name) {
        Some(error) => format!("-{error}"),
        None => text(value, names),
    }
}

fn write(text: &mut String, value: &Value<'_>, names: &Names) -> fmt::Result {
    match value {
        Value::Fault => write!(text, "(fault)"),
        Value::Unknown => write!(text, "?"),
        Value::More => write!(text, "..."),
        Value::Unsigned(number) => write!(text, "{number}"),
        Value::Signed(number) => write!(text, "{number}"),
        Value::Hex(number) => write!(text, "{number:#x}"),
        Value::Char(byte) => write!(text, "{}", quoted::character(*byte)),
        Value::Bool(so) => write!(text, "{so}"),
        Value::Pointer(at) => write!(text, "{at:#x}"),
        Value::Symbol(at) => write!(text, "{}", names.of(*at)),
        Value::Named { names, rest } => write!(text, "{}", flags(names, *rest)),
        Value::Array(elements) => {
            text.push('{');
            for (at, element) in elements.iter().enumerate() {
                if at > 0 {
                    text.push(',');
                }
                write(text, element, names)?;
            }
            text.push('}');
            Ok(())
        }
        Value::Struct(members) => {
            text.push('{');
            for (at, (name, member)) in members.iter().enumerate() {
                if at > 0 {
                    text.push_str(", ");
                }
                match member {
                    Value::More => text.push_str("..."),
                    member => {
                        write!(text, "{name}=")?;
                        write(text, member, names)?;
                    }
                }
            }
            text.push('}');
            Ok(())
        }
        Value::Text { bytes, truncated } => {
            text.push_str(&quoted::string(bytes));
            if *truncated {
                text.push_str("...");
            }
            Ok(())
        }
        Value::Bytes(bytes) => write!(text, "{}", hex(bytes)),
    }
}

/// Returns the names of flags, and the remaining bits: `A|B|0x10`.
pub(crate) fn flags(names: &[&str], rest: u64) -> String {
    let mut text = names.join("|");
    if rest != 0 {
        text.push_str(&format!("|{rest:#x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(value: &Value<'_>) -> String {
        let mut names = Names::default();
        names.insert(0x1010, Some(("vfs_read", 0x1000)));
        text(value, &names)
    }

    #[test]
    fn values_are_shown_as_their_kind_asks() {
        for (value, expected) in [
            (Value::Fault, "(fault)"),
            (Value::Unknown, "?"),
            (
                Value::Unsigned(u128::from(u64::MAX)),
                "18446744073709551615",
            ),
            (Value::Signed(-100), "-100"),
            (Value::Hex(0x1f), "0x1f"),
            (Value::Char(b'\n'), r"'\n'"),
            (Value::Bool(true), "true"),
            (Value::Pointer(0), "0x0"),
            (Value::Symbol(0x1010), "vfs_read+0x10"),
            (Value::Symbol(0x1011), "0x1011"),
            (
                Value::Named {
                    names: vec!["A", "B"],
                    rest: 0x10,
                },
                "A|B|0x10",
            ),
            (Value::Bytes(vec![0, 0xab]), "00ab"),
        ] {
            assert_eq!(shown(&value), expected);
        }
    }

    #[test]
    fn parts_stand_in_braces() {
        let numbers = Value::Array(vec![Value::Signed(1), Value::Signed(2), Value::More]);
        let value = Value::Struct(vec![
            ("a", numbers),
            ("in", Value::Struct(vec![("b", Value::Fault)])),
            ("...", Value::More),
        ]);
        assert_eq!(shown(&value), "{a={1,2,...}, in={b=(fault)}, ...}");
        assert_eq!(shown(&Value::Array(Vec::new())), "{}");
    }

    #[test]
    fn texts_that_go_on_say_so_behind_the_quotes() {
        let text = |truncated| Value::Text {
            bytes: b"/etc/\x1b".to_vec(),
            truncated,
        };
        assert_eq!(shown(&text(false)), r#""/etc/\x1b""#);
        assert_eq!(shown(&text(true)), r#""/etc/\x1b"..."#);
    }

    #[test]
    fn errors_are_printed_by_name_where_the_type_has_room_for_them() {
        let names = Names::default();
        for (value, expected) in [
            (Value::Signed(-2), "-ENOENT"),
            (Value::Signed(3), "3"),
            (Value::Signed(-512), "-512"),
            (Value::Signed(-5000), "-5000"),
            (
                Value::Signed(i128::MIN),
                "-170141183460469231731687303715884105728",
            ),
            (Value::Pointer(12_u64.wrapping_neg()), "-ENOMEM"),
            (Value::Pointer(0x1000), "0x1000"),
            (
                Value::Unsigned(u128::from(2_u64.wrapping_neg())),
                "18446744073709551614",
            ),
        ] {
            assert_eq!(result(&value, &names), expected);
        }
    }
}
