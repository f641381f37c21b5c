//! Formats of `printf`.
//!
//! Invariants: each parsed directive takes one value, its conversion is known, and no width is greater than
//! [`WIDTH_MAX`].

use std::fmt;
use std::iter::Peekable;

use crate::parse_error::{ParseError, error};

/// Maximum width or precision.
const WIDTH_MAX: usize = 256;

/// Format of `printf`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Format {
    /// Pieces in the order of their output.
    pub pieces: Vec<Piece>,
}

/// Piece of a format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Literal text.
    Text(String),
    /// Value.
    Directive(Directive),
}

/// Format of a value, such as `%-10s`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Directive {
    /// `-`: left-justified.
    pub left: bool,
    /// `0`: padded with zeros.
    pub zeros: bool,
    /// `#`: with the prefix `0x`.
    pub alternate: bool,
    /// `+`: with a sign.
    pub plus: bool,
    /// Minimum number of characters.
    pub width: usize,
    /// Maximum number of characters of a text.
    pub precision: Option<usize>,
    /// Conversion of the value.
    pub conversion: Conversion,
}

/// Conversion of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conversion {
    /// `%d`, `%i`, `%ld`, `%lld`: signed number.
    #[default]
    Signed,
    /// `%u`: unsigned number.
    Unsigned,
    /// `%x`: hexadecimal number.
    Hex,
    /// `%X`: hexadecimal number in capitals.
    UpperHex,
    /// `%o`: octal number.
    Octal,
    /// `%p`: address.
    Pointer,
    /// `%c`: character.
    Char,
    /// `%s`: text.
    Text,
}

/// Letters of the conversions.
const LETTERS: [(Conversion, char); 9] = [
    (Conversion::Signed, 'd'),
    (Conversion::Signed, 'i'),
    (Conversion::Unsigned, 'u'),
    (Conversion::Hex, 'x'),
    (Conversion::UpperHex, 'X'),
    (Conversion::Octal, 'o'),
    (Conversion::Pointer, 'p'),
    (Conversion::Char, 'c'),
    (Conversion::Text, 's'),
];

impl Conversion {
    /// Returns the letter of the conversion.
    #[must_use]
    pub fn letter(self) -> char {
        let found = LETTERS.iter().find(|(known, _)| *known == self);
        found.map_or('d', |(_, letter)| *letter)
    }
}

impl Format {
    /// Returns the directives.
    pub fn directives(&self) -> impl Iterator<Item = &Directive> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Text(_) => None,
            Piece::Directive(directive) => Some(directive),
        })
    }
}

/// Parses a format. `text` has its characters with their columns, and `end` is the column of the closing quote.
pub(super) fn read_format(text: &[(usize, char)], end: usize) -> Result<Format, ParseError> {
    let mut pieces = Vec::new();
    let mut plain = String::new();
    let mut rest = text.iter().copied().peekable();
    while let Some((at, c)) = rest.next() {
        if c != '%' {
            plain.push(c);
            continue;
        }
        if rest.next_if(|(_, c)| *c == '%').is_some() {
            plain.push('%');
            continue;
        }
        if !plain.is_empty() {
            pieces.push(Piece::Text(std::mem::take(&mut plain)));
        }
        let mut directive = Directive::default();
        while let Some((_, flag)) = rest.next_if(|(_, c)| "-0#+ ".contains(*c)) {
            match flag {
                '-' => directive.left = true,
                '0' => directive.zeros = true,
                '#' => directive.alternate = true,
                '+' => directive.plus = true,
                _ => {
                    return error(
                        at,
                        "a blank in a directive: write `+`, or a blank before it",
                    );
                }
            }
        }
        directive.width = number(&mut rest)?.unwrap_or(0);
        if rest.next_if(|(_, c)| *c == '.').is_some() {
            directive.precision = Some(number(&mut rest)?.unwrap_or(0));
        }
        // Length modifiers are ignored: all numbers have 64 bits.
        while rest.next_if(|(_, c)| "hlzj".contains(*c)).is_some() {}
        let letter = rest.next();
        let known = LETTERS
            .iter()
            .find(|(_, known)| letter.is_some_and(|(_, it)| it == *known));
        let Some((conversion, _)) = known else {
            return match letter {
                Some((at, c)) => error(
                    at,
                    format!("`%{c}` is not supported; there are %d %u %x %X %o %p %c %s and %%"),
                ),
                None => error(
                    end,
                    "a letter of the directive is missing: write %% for `%`",
                ),
            };
        };
        directive.conversion = *conversion;
        if directive.precision.is_some() && directive.conversion != Conversion::Text {
            return error(at, "a precision belongs to texts: leave it out");
        }
        pieces.push(Piece::Directive(directive));
    }
    if !plain.is_empty() {
        pieces.push(Piece::Text(plain));
    }
    Ok(Format { pieces })
}

/// Takes the number that comes next, if there is one.
fn number(
    rest: &mut Peekable<impl Iterator<Item = (usize, char)>>,
) -> Result<Option<usize>, ParseError> {
    let mut number = None;
    while let Some((at, digit)) = rest.next_if(|(_, c)| c.is_ascii_digit()) {
        let digit = digit.to_digit(10).and_then(|it| usize::try_from(it).ok());
        let next = number.unwrap_or(0) * 10 + digit.unwrap_or(0);
        if next > WIDTH_MAX {
            return error(at, format!("at most {WIDTH_MAX} characters"));
        }
        number = Some(next);
    }
    Ok(number)
}

impl fmt::Display for Directive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("%")?;
        for (flag, is_given) in [
            ('-', self.left),
            ('0', self.zeros),
            ('#', self.alternate),
            ('+', self.plus),
        ] {
            if is_given {
                write!(f, "{flag}")?;
            }
        }
        if self.width > 0 {
            write!(f, "{}", self.width)?;
        }
        if let Some(precision) = self.precision {
            write!(f, ".{precision}")?;
        }
        write!(f, "{}", self.conversion.letter())
    }
}
