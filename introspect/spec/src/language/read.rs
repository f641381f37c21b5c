//! Parser for the text form of actions.

use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_arch::regs::Gpr;

use super::text;
use crate::actions::{Change, Condition, Decision, Hold, Then};
use crate::cursor::{Cursor, unprintable};
use crate::errno;
use crate::item::Item;
use crate::limits::{CAPTURE_MAX, DEADLINE_MAX};
use crate::parse_error::{ParseError, bounded, error, quoted};
use crate::registers::{REGISTERS, by_short_name};

/// Number of bytes that are captured at an address if no length is given.
const DEFAULT_LENGTH: u16 = 8;

/// Value of `--capture`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capture {
    /// Register that events contain.
    Register(Gpr),
    /// Item that is read.
    Item(Item),
}

/// Parses a capture.
///
/// # Errors
/// Returns the column and the reason.
pub fn capture(text: &str) -> Result<Capture, ParseError> {
    whole(text, Cursor::capture)
}

/// Parses a change of a register or of memory.
///
/// # Errors
/// Returns the column and the reason.
pub fn change(text: &str) -> Result<Change, ParseError> {
    whole(text, Cursor::change)
}

/// Parses a condition.
///
/// # Errors
/// Returns the column and the reason.
pub fn condition(text: &str) -> Result<Condition, ParseError> {
    whole(text, Cursor::condition)
}

/// Parses a decision.
///
/// # Errors
/// Returns the column and the reason.
pub fn decision(text: &str) -> Result<Decision, ParseError> {
    whole(text, Cursor::decision)
}

/// Parses a deadline and the default decision: a [`Hold::Ask`].
///
/// # Errors
/// Returns the column and the reason.
pub fn ask(text: &str) -> Result<Hold, ParseError> {
    whole(text, Cursor::ask)
}

/// Parses a value.
///
/// # Errors
/// Returns the column and the reason.
pub fn value(text: &str) -> Result<u64, ParseError> {
    whole(text, Cursor::value)
}

/// Parses an address.
///
/// # Errors
/// Returns the column and the reason.
pub fn address(text: &str) -> Result<Gva, ParseError> {
    whole(text, Cursor::address)
}

/// Parses all of `text` with `read`. Skips blanks around it.
fn whole<'a, T>(
    text: &'a str,
    read: impl FnOnce(&mut Cursor<'a>) -> Result<T, ParseError>,
) -> Result<T, ParseError> {
    // After this check each character is one byte, so byte offsets are columns.
    if let Some((column, c)) = unprintable(text) {
        return error(
            column,
            format!("{c:?} cannot be here: write printable ASCII"),
        );
    }
    let mut cursor = Cursor::new(0, text);
    cursor.blanks();
    let read = read(&mut cursor)?;
    cursor.blanks();
    match cursor.rest() {
        "" => Ok(read),
        rest => cursor.error(format!("{} is too much here", quoted(rest))),
    }
}

impl Cursor<'_> {
    fn value(&mut self) -> Result<u64, ParseError> {
        let start = self.at();
        let negative = self.eat("-");
        if self.rest().starts_with(|c: char| c.is_ascii_uppercase()) {
            let at = self.at();
            let name = self.word();
            return match (errno::number(name), negative) {
                (Some(number), true) => Ok(u64::from(number).wrapping_neg()),
                (Some(_), false) => error(
                    start,
                    format!("the kernel's functions return errors negative: write -{name}"),
                ),
                (None, _) => error(at, format!("no error is called {}", bounded(name))),
            };
        }
        let magnitude = self.number("value")?;
        match negative {
            false => Ok(magnitude),
            true if magnitude <= 1 << 63 => Ok(magnitude.wrapping_neg()),
            true => error(start, "the value does not fit 64 bits"),
        }
    }

    fn register(&mut self) -> Result<Gpr, ParseError> {
        let start = self.at();
        self.expect("%", "a register belongs here, as in %di")?;
        let name = self.word();
        let long = REGISTERS.iter().find(|(_, long)| *long == name);
        let found = long.map(|(register, _)| *register);
        found.or_else(|| by_short_name(name)).ok_or_else(|| ParseError {
            column: start,
            message: format!("no general register is called %{}: %ax %bx %cx %dx %si %di %bp %sp %r8 … %r15 are", bounded(name)),
        })
    }

    fn address(&mut self) -> Result<Gva, ParseError> {
        self.number("address").map(Gva)
    }

    /// Parses `+16(%di)`, from its sign on.
    fn memory(&mut self) -> Result<(Gpr, i64), ParseError> {
        let start = self.at();
        let negative = self.eat("-");
        if !negative {
            self.expect("+", "an offset with its sign belongs here, as in +0(%di)")?;
        }
        let magnitude = self.number("offset")?;
        let offset = match (i64::try_from(magnitude), negative) {
            (Ok(offset), false) => offset,
            (Ok(offset), true) => -offset,
            (Err(_), true) if magnitude == 1 << 63 => i64::MIN,
            (Err(_), _) => return error(start, "the offset does not fit 64 bits with its sign"),
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
        let item = if self.eat("$stack") {
            Item::Stack(self.count("stack word", u16::MAX.into())?)
        } else if self.rest().starts_with(['+', '-']) {
            let (base, offset) = self.memory()?;
            let mut len = DEFAULT_LENGTH;
            if self.eat(":") {
                let at = self.at();
                len = self.count("length", CAPTURE_MAX)?;
                if len == 0 {
                    return error(at, "nothing can be read in 0 bytes");
                }
            }
            Item::Memory { base, offset, len }
        } else {
            return self
                .error("capture a register (%di), memory (+16(%di):32) or the stack ($stack0)");
        };
        Ok(Capture::Item(item))
    }

    fn change(&mut self) -> Result<Change, ParseError> {
        if self.rest().starts_with('%') {
            let register = self.register()?;
            self.equals()?;
            let value = self.value()?;
            return Ok(Change::Register { register, value });
        }
        let (base, offset) = if self.eat("@") {
            (None, self.number("address")?.cast_signed())
        } else if self.rest().starts_with(['+', '-']) {
            let (base, offset) = self.memory()?;
            (Some(base), offset)
        } else {
            return self.error("change a register (%ax=…) or memory (+8(%di)=…, @0x…=…)");
        };
        self.equals()?;
        let bytes = self.bytes()?;
        Ok(Change::Memory {
            base,
            offset,
            bytes,
        })
    }

    fn equals(&mut self) -> Result<(), ParseError> {
        self.blanks();
        self.expect("=", "missing `=` and what it is set to")?;
        self.blanks();
        Ok(())
    }

    fn bytes(&mut self) -> Result<Box<[u8]>, ParseError> {
        if self.eat("hex:") {
            return self.hex();
        }
        for (width, bytes) in [("u8:", 1), ("u16:", 2), ("u32:", 4), ("u64:", 8)] {
            if !self.eat(width) {
                continue;
            }
            let at = self.at();
            let value = self.value()?;
            // The value fits if the bits that are cut off are all zero, or if it is negative and sign extension of
            // the other bits restores it.
            let bits = 64 - bytes * 8;
            let unsigned = value << bits >> bits == value;
            let signed = (value.cast_signed() << bits >> bits).cast_unsigned() == value
                && value.cast_signed() < 0;
            if !unsigned && !signed {
                return error(at, format!("the value does not fit {} bits", bytes * 8));
            }
            return Ok(value.to_le_bytes().iter().copied().take(bytes).collect());
        }
        self.error("memory is set to hex:BYTES, or u8:, u16:, u32: or u64: and a number")
    }

    fn hex(&mut self) -> Result<Box<[u8]>, ParseError> {
        let start = self.at();
        let word = self.word();
        if let Some((i, c)) = word.char_indices().find(|(_, c)| !c.is_ascii_hexdigit()) {
            return error(start + i, format!("`{c}` is no hexadecimal digit"));
        }
        if word.is_empty() || word.len() % 2 == 1 {
            return self.error("two hexadecimal digits for each byte belong here");
        }
        let length = word.len() / 2;
        if length <= CAPTURE_MAX {
            return Ok(word
                .as_bytes()
                .chunks_exact(2)
                .filter_map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok())
                .collect());
        }
        error(start, format!("{length} bytes: at most {CAPTURE_MAX}"))
    }

    fn condition(&mut self) -> Result<Condition, ParseError> {
        let register = self.register()?;
        self.blanks();
        let operators = text::COMPARISONS.iter();
        // Longer ones first, or `<=` would be read as `<`.
        let found = operators
            .rev()
            .find(|(_, sign)| self.rest().starts_with(sign));
        let Some((comparison, sign)) = found else {
            return self.error("compare with ==, !=, <, <=, >, >= or & (some bit in common)");
        };
        self.eat(sign);
        self.blanks();
        Ok(Condition {
            register,
            comparison: *comparison,
            value: self.value()?,
        })
    }

    fn decision(&mut self) -> Result<Decision, ParseError> {
        let mut decision = Decision::default();
        let mut path: Option<()> = None;
        loop {
            self.blanks();
            let at = self.at();
            let then = if self.eat("proceed") {
                Then::Proceed
            } else if self.eat("return=") {
                Then::Return(self.value()?)
            } else if self.eat("jump=") {
                Then::Jump(self.address()?)
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
                return error(at, "the guest can go on in one place only");
            }
            decision.then = then;
            if !self.more() {
                return Ok(decision);
            }
        }
    }

    /// Skips a comma if one comes next. Returns whether there was one, which means that another part follows.
    fn more(&mut self) -> bool {
        self.blanks();
        self.eat(",")
    }

    fn ask(&mut self) -> Result<Hold, ParseError> {
        let start = self.at();
        let digits = self.digits();
        let unit = if self.eat("ms") {
            1
        } else if self.eat("s") {
            1000
        } else {
            return self.error("a time belongs here, as in 500ms or 5s");
        };
        let deadline = digits
            .parse::<u32>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .map(|ms| Duration::from_millis(ms.into()))
            .filter(|deadline| !deadline.is_zero() && *deadline <= DEADLINE_MAX);
        let Some(deadline) = deadline else {
            return error(start, "a hit can wait between 1ms and 60s");
        };
        let default = self.more().then(|| self.decision()).transpose()?;
        Ok(Hold::Ask {
            deadline,
            default: default.unwrap_or_default(),
        })
    }
}
