//! What probes do at a hit, as it is written on the command line.
//!
//! ```text
//! capture   = register | memory [":" LENGTH] | "$stack" N
//! change    = register "=" value | place "=" bytes
//! condition = register ("==" | "!=" | "<" | "<=" | ">" | ">=" | "&") value
//! decision  = part {"," part}
//! part      = "proceed" | "return=" value | "jump=" ADDRESS | change
//! ask       = TIME ("ms" | "s") ["," decision]
//!
//! register  = "%" NAME                       %di or %rdi, %r8
//! memory    = ("+" | "-") OFFSET "(" register ")"
//! place     = memory | "@" ADDRESS
//! value     = ["-"] number | "-" ERROR       -5, 0x10, -ENOMEM
//! bytes     = "hex:" DIGITS | ("u8:" | "u16:" | "u32:" | "u64:") value
//! ```
//! Numbers are decimal, or hexadecimal after `0x`. Blanks may stand around everything, not inside
//! of it. Registers and memory look as they do among the fetch arguments of the kernel's
//! `kprobe_events`. What is kept true: what [`text`] prints is read as the same again, and an error
//! points at the character it is about.

mod text;

use hvprobe_proto::v1::{self, Comparison, Register, change, item};
use hvprobe_spec::ParseError;

use crate::errno;
pub(crate) use text::{actions as actions_text, decision as decision_text, hex, item_name};

/// Bytes captured at an address for which no length is given.
const DEFAULT_LENGTH: u32 = 8;
/// The most bytes of one capture and of one change.
const LONGEST: u32 = 248;
/// The longest a hit waits for a client, in milliseconds.
const LONGEST_ASK: u32 = 60_000;

/// What `--capture` asks for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Capture {
    /// Events show this register.
    Register(Register),
    /// Something is read.
    Item(v1::Item),
}

/// Reads a capture.
pub(crate) fn capture(text: &str) -> Result<Capture, ParseError> {
    whole(text, Cursor::capture)
}

/// Reads a change of a register or of memory.
pub(crate) fn change(text: &str) -> Result<v1::Change, ParseError> {
    whole(text, Cursor::change)
}

/// Reads a condition.
pub(crate) fn condition(text: &str) -> Result<v1::Condition, ParseError> {
    whole(text, Cursor::condition)
}

/// Reads a decision.
pub(crate) fn decision(text: &str) -> Result<v1::Decision, ParseError> {
    whole(text, Cursor::decision)
}

/// Reads for how long to ask, and the default.
pub(crate) fn ask(text: &str) -> Result<v1::Ask, ParseError> {
    whole(text, Cursor::ask)
}

/// Reads a value.
pub(crate) fn value(text: &str) -> Result<u64, ParseError> {
    whole(text, Cursor::value)
}

/// Reads an address.
pub(crate) fn address(text: &str) -> Result<u64, ParseError> {
    whole(text, |cursor| cursor.number("address"))
}

/// All of `text` as one thing.
fn whole<'a, T>(
    text: &'a str,
    read: impl FnOnce(&mut Cursor<'a>) -> Result<T, ParseError>,
) -> Result<T, ParseError> {
    // From here on a byte is a character, so that byte offsets are columns.
    if let Some((column, c)) = text
        .chars()
        .enumerate()
        .find(|(_, c)| !matches!(c, ' '..='~' | '\t'))
    {
        return Err(ParseError {
            column,
            message: format!("{c:?} cannot be here: write printable ASCII"),
        });
    }
    let mut cursor = Cursor { text, at: 0 };
    cursor.blanks();
    let read = read(&mut cursor)?;
    cursor.blanks();
    match cursor.rest() {
        "" => Ok(read),
        rest => cursor.error(format!("`{rest}` is too much here")),
    }
}

/// A place in a text.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        error_at(self.at, message)
    }

    fn eat(&mut self, what: &str) -> bool {
        let found = self.rest().starts_with(what);
        if found {
            self.at += what.len();
        }
        found
    }

    fn expect(&mut self, what: &str, message: &str) -> Result<(), ParseError> {
        if self.eat(what) {
            return Ok(());
        }
        self.error(message)
    }

    fn blanks(&mut self) {
        while self.eat(" ") || self.eat("\t") {}
    }

    /// Letters and digits from here on.
    fn word(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric());
        let word = &rest[..end.unwrap_or(rest.len())];
        self.at += word.len();
        word
    }

    fn number(&mut self, what: &str) -> Result<u64, ParseError> {
        let start = self.at;
        let word = self.word();
        let hex = word.strip_prefix("0x").or_else(|| word.strip_prefix("0X"));
        let (digits, radix) = match hex {
            Some(digits) => (digits, 16),
            None => (word, 10),
        };
        if digits.is_empty() {
            return self.error(format!("missing {what}: a number belongs here"));
        }
        if let Some((i, c)) = digits.char_indices().find(|(_, c)| !c.is_digit(radix)) {
            let column = start + word.len() - digits.len() + i;
            return error_at(column, format!("`{c}` is no digit of the {what}"));
        }
        if radix == 10 && digits.len() > 1 && digits.starts_with('0') {
            return error_at(
                start,
                format!("leading zero in the {what}: write decimal, or hex after 0x"),
            );
        }
        u64::from_str_radix(digits, radix)
            .or_else(|_| error_at(start, format!("the {what} does not fit 64 bits")))
    }

    /// A number that is `most` at most.
    fn count(&mut self, what: &str, most: u32) -> Result<u32, ParseError> {
        let start = self.at;
        let number = self.number(what)?;
        match u32::try_from(number) {
            Ok(count) if count <= most => Ok(count),
            _ => error_at(start, format!("{what} of {number}: at most {most}")),
        }
    }

    fn value(&mut self) -> Result<u64, ParseError> {
        let start = self.at;
        let negative = self.eat("-");
        if self.rest().starts_with(|c: char| c.is_ascii_uppercase()) {
            let at = self.at;
            let name = self.word();
            return match (errno::number(name), negative) {
                (Some(number), true) => Ok(u64::from(number).wrapping_neg()),
                (Some(_), false) => error_at(
                    start,
                    format!("the kernel's functions return errors negative: write -{name}"),
                ),
                (None, _) => error_at(at, format!("no error is called {name}")),
            };
        }
        let magnitude = self.number("value")?;
        match negative {
            false => Ok(magnitude),
            true if magnitude <= 1 << 63 => Ok(magnitude.wrapping_neg()),
            true => error_at(start, "the value does not fit 64 bits"),
        }
    }

    fn register(&mut self) -> Result<Register, ParseError> {
        let start = self.at;
        self.expect("%", "a register belongs here, as in %di")?;
        let name = self.word();
        let all = (1..).map_while(|number| Register::try_from(number).ok());
        let found = all.into_iter().find(|register| {
            let long = text::long_name(*register);
            long == name || long.strip_prefix('r') == Some(name) && !name.starts_with(digit)
        });
        found.map_or_else(
            || {
                error_at(
                    start,
                    format!("no general register is called %{name}: %ax %bx %cx %dx %si %di %bp %sp %r8 … %r15 are"),
                )
            },
            Ok,
        )
    }

    /// `+16(%di)`, from its sign on.
    fn memory(&mut self) -> Result<(Register, i64), ParseError> {
        let start = self.at;
        let negative = self.eat("-");
        if !negative {
            self.expect("+", "an offset with its sign belongs here, as in +0(%di)")?;
        }
        let magnitude = self.number("offset")?;
        let offset = match (i64::try_from(magnitude), negative) {
            (Ok(offset), false) => offset,
            (Ok(offset), true) => -offset,
            (Err(_), true) if magnitude == 1 << 63 => i64::MIN,
            (Err(_), _) => return error_at(start, "the offset does not fit 64 bits with its sign"),
        };
        self.expect(
            "(",
            "the register that holds the address is missing, as in +0(%di)",
        )?;
        let base = self.register()?;
        self.expect(")", "missing `)`")?;
        Ok((base, offset))
    }

    fn capture(&mut self) -> Result<Capture, ParseError> {
        if self.rest().starts_with('%') {
            return Ok(Capture::Register(self.register()?));
        }
        let what = if self.eat("$stack") {
            item::What::Stack(self.count("stack word", u16::MAX.into())?)
        } else if self.rest().starts_with(['+', '-']) {
            let (base, offset) = self.memory()?;
            let mut length = DEFAULT_LENGTH;
            if self.eat(":") {
                let at = self.at;
                length = self.count("length", LONGEST)?;
                if length == 0 {
                    return error_at(at, "nothing can be read in 0 bytes");
                }
            }
            item::What::Memory(v1::MemoryItem {
                base: base.into(),
                offset,
                length,
            })
        } else {
            return self
                .error("capture a register (%di), memory (+16(%di):32) or the stack ($stack0)");
        };
        Ok(Capture::Item(v1::Item { what: Some(what) }))
    }

    fn change(&mut self) -> Result<v1::Change, ParseError> {
        let what = if self.rest().starts_with('%') {
            let register = self.register()?.into();
            self.equals()?;
            let value = self.value()?;
            change::What::Register(v1::SetRegister { register, value })
        } else {
            let (base, offset) = if self.eat("@") {
                let address = self.number("address")?;
                (Register::Unspecified, address.cast_signed())
            } else if self.rest().starts_with(['+', '-']) {
                self.memory()?
            } else {
                return self.error("change a register (%ax=…) or memory (+8(%di)=…, @0x…=…)");
            };
            self.equals()?;
            change::What::Memory(v1::WriteMemory {
                base: base.into(),
                offset,
                data: self.bytes()?,
            })
        };
        Ok(v1::Change { what: Some(what) })
    }

    fn equals(&mut self) -> Result<(), ParseError> {
        self.blanks();
        self.expect("=", "missing `=` and what it is set to")?;
        self.blanks();
        Ok(())
    }

    fn bytes(&mut self) -> Result<Vec<u8>, ParseError> {
        if self.eat("hex:") {
            return self.hex();
        }
        for (width, bytes) in [("u8:", 1), ("u16:", 2), ("u32:", 4), ("u64:", 8)] {
            if !self.eat(width) {
                continue;
            }
            let at = self.at;
            let value = self.value()?;
            // Either what is cut off is all zeros, or the number is negative and fits its width.
            let bits = 64 - bytes * 8;
            let unsigned = value << bits >> bits == value;
            let signed = (value.cast_signed() << bits >> bits).cast_unsigned() == value
                && value.cast_signed() < 0;
            if !unsigned && !signed {
                return error_at(at, format!("the value does not fit {} bits", bytes * 8));
            }
            return Ok(value.to_le_bytes().iter().copied().take(bytes).collect());
        }
        self.error("memory is set to hex:BYTES, or u8:, u16:, u32: or u64: and a number")
    }

    fn hex(&mut self) -> Result<Vec<u8>, ParseError> {
        let start = self.at;
        let word = self.word();
        if let Some((i, c)) = word.char_indices().find(|(_, c)| !c.is_ascii_hexdigit()) {
            return error_at(start + i, format!("`{c}` is no hexadecimal digit"));
        }
        if word.is_empty() || word.len() % 2 == 1 {
            return self.error("two hexadecimal digits for each byte belong here");
        }
        let length = word.len() / 2;
        if u32::try_from(length).is_ok_and(|length| length <= LONGEST) {
            return Ok(word
                .as_bytes()
                .chunks_exact(2)
                .filter_map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok())
                .collect());
        }
        error_at(start, format!("{length} bytes: at most {LONGEST}"))
    }

    fn condition(&mut self) -> Result<v1::Condition, ParseError> {
        let register = self.register()?.into();
        self.blanks();
        let operators = text::COMPARISONS.iter();
        // Longer ones first, or `<=` would be read as `<`.
        let found = operators
            .rev()
            .find(|(_, sign)| self.rest().starts_with(sign));
        let Some((comparison, sign)) = found else {
            return self.error("compare with ==, !=, <, <=, >, >= or & (some bit in common)");
        };
        self.at += sign.len();
        self.blanks();
        Ok(v1::Condition {
            register,
            comparison: Comparison::into(*comparison),
            value: self.value()?,
        })
    }

    fn decision(&mut self) -> Result<v1::Decision, ParseError> {
        let mut decision = v1::Decision::default();
        let mut path: Option<()> = None;
        loop {
            self.blanks();
            let at = self.at;
            let then = if self.eat("proceed") {
                None
            } else if self.eat("return=") {
                Some(v1::decision::Then::ReturnValue(self.value()?))
            } else if self.eat("jump=") {
                Some(v1::decision::Then::Jump(self.number("address")?))
            } else if self.rest().starts_with(['%', '+', '-', '@']) {
                decision.changes.push(self.change()?);
                if !self.more() {
                    return Ok(decision);
                }
                continue;
            } else {
                return self.error("write proceed, return=VALUE, jump=ADDRESS or a change (%ax=…)");
            };
            if path.replace(()).is_some() {
                return error_at(at, "the guest can go on in one place only");
            }
            decision.then = then;
            if !self.more() {
                return Ok(decision);
            }
        }
    }

    /// Whether another part of a list follows.
    fn more(&mut self) -> bool {
        self.blanks();
        self.eat(",")
    }

    fn ask(&mut self) -> Result<v1::Ask, ParseError> {
        let start = self.at;
        let end = self.rest().find(|c: char| !c.is_ascii_digit());
        let (digits, rest) = self.rest().split_at(end.unwrap_or(self.rest().len()));
        let unit = match rest {
            rest if rest.starts_with("ms") => 1,
            rest if rest.starts_with('s') => 1000,
            _ => {
                return error_at(
                    start + digits.len(),
                    "a time belongs here, as in 500ms or 5s",
                );
            }
        };
        let deadline_ms = digits
            .parse::<u32>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .filter(|ms| (1..=LONGEST_ASK).contains(ms));
        let Some(deadline_ms) = deadline_ms else {
            return error_at(start, "a hit can wait between 1ms and 60s");
        };
        self.at += digits.len() + if unit == 1 { 2 } else { 1 };
        let fallback = self.more().then(|| self.decision()).transpose()?;
        Ok(v1::Ask {
            deadline_ms,
            fallback,
        })
    }
}

fn digit(c: char) -> bool {
    c.is_ascii_digit()
}

fn error_at<T>(column: usize, message: impl Into<String>) -> Result<T, ParseError> {
    Err(ParseError {
        column,
        message: message.into(),
    })
}

#[cfg(test)]
mod tests;
