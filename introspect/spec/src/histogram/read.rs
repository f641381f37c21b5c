//! Parser of histograms.

use std::num::NonZeroU64;

use super::print::{BUCKETS, HITCOUNT, KEY_FORMS, VALUE_FORMS};
use super::trigger::{By, Histogram, Key, KeyForm, Order, Value, ValueForm};
use crate::column::Column;
use crate::cursor::{Cursor, unprintable};
use crate::fetch::{Filter, read_filter_at};
use crate::number::number_in;
use crate::parse_error::{ParseError, error, quoted};

/// Maximum number of keys.
pub const KEYS_MAX: usize = 8;
/// Maximum number of values.
pub const VALUES_MAX: usize = 8;
/// Maximum number of entries, as in the kernel (`TRACING_MAP_BITS_MAX`).
pub const SIZE_MAX: u64 = 1 << 17;
/// Default number of entries, as in the kernel.
const SIZE: usize = 2048;

/// Parses a histogram, which is one line of ASCII.
///
/// # Errors
/// Returns the column and the reason if the text is not a histogram.
pub fn read_histogram(text: &str) -> Result<Histogram, ParseError> {
    if let Some((column, c)) = unprintable(text) {
        return error(column, format!("{c:?}: a histogram is one line of ASCII"));
    }
    let blank = |c: char| c == ' ' || c == '\t';
    let start = text.len() - text.trim_start_matches(blank).len();
    let end = text[start..]
        .find(blank)
        .map_or(text.len(), |at| start + at);
    let mut words = Cursor::new(0, &text[..end]);
    words.blanks();
    words.eat("hist:");
    let mut parts = Parts::default();
    loop {
        parts.clause(&mut words)?;
        if words.rest().is_empty() {
            break;
        }
        words.expect(":", "`:` or `,` belongs here")?;
    }
    parts.finish(words.at(), filter(end, &text[end..])?)
}

/// Parses the filter in `text`, which begins at `column` and follows the clauses.
fn filter(column: usize, text: &str) -> Result<Option<Filter>, ParseError> {
    let rest = text.trim_start();
    let column = column + text.len() - rest.len();
    if rest.is_empty() {
        return Ok(None);
    }
    match rest.strip_prefix("if") {
        Some(filter) if filter.starts_with([' ', '\t']) || filter.is_empty() => {
            read_filter_at(column + "if".len(), filter).map(Some)
        }
        _ => error(column, "only `if FILTER` can follow a histogram's clauses"),
    }
}

/// Parsed clauses.
#[derive(Default)]
struct Parts {
    keys: Option<Vec<Key>>,
    values: Option<Vec<Value>>,
    /// Column, name and direction (whether descending) of each field to sort by. The names are resolved when all
    /// clauses are known.
    sort: Option<Vec<(usize, String, bool)>>,
    size: Option<usize>,
}

impl Parts {
    fn clause(&mut self, words: &mut Cursor<'_>) -> Result<(), ParseError> {
        let start = words.at();
        let name = words.name();
        if words.rest().is_empty() || !words.eat("=") {
            let message = match name {
                "pause" | "cont" | "continue" | "clear" => {
                    "pausing and clearing are asked for while it counts".to_owned()
                }
                "nohitcount" | "nohc" => {
                    format!("`{name}` is not known here: each entry shows its hits; leave it out")
                }
                "onmatch" | "onmax" | "onchange" => {
                    format!("`{name}` is not known here: a histogram counts, and does nothing else")
                }
                _ => "keys=, vals=, sort= or size= belongs here".to_owned(),
            };
            return error(start, message);
        }
        let twice = match name {
            "keys" | "key" => {
                let keys = list(words, KEYS_MAX, "keys", key)?;
                self.keys.replace(keys).is_some()
            }
            "vals" | "values" | "val" => {
                // The hit count is allowed in the list, but is not counted as a value.
                let values = list(words, usize::MAX, "values", value)?;
                let values: Vec<_> = values.into_iter().flatten().collect();
                if let Some(first) = values.get(VALUES_MAX) {
                    let message = format!("too many values: at most {VALUES_MAX}");
                    return error(first.column.0, message);
                }
                self.values.replace(values).is_some()
            }
            "sort" => {
                let sort = list(words, KEYS_MAX, "fields to sort by", order)?;
                self.sort.replace(sort).is_some()
            }
            "size" => {
                let at = words.at();
                let digits = words.name();
                let size = number_in(at, digits, "size", || "missing size".to_owned())?;
                let fits = (1..=SIZE_MAX).contains(&size);
                let Some(size) = usize::try_from(size).ok().filter(|_| fits) else {
                    return error(at, format!("size {size}: 1 to {SIZE_MAX} entries"));
                };
                self.size.replace(size).is_some()
            }
            "name" => {
                let message = "`name=` is not known here: histograms are not shared; leave it out";
                return error(start, message);
            }
            other => {
                let message = format!("{}: write keys=, vals=, sort= or size=", quoted(other));
                return error(start, message);
            }
        };
        match twice {
            true => error(start, format!("`{name}` is given twice")),
            false => Ok(()),
        }
    }

    fn finish(self, end: usize, filter: Option<Filter>) -> Result<Histogram, ParseError> {
        let Some(keys) = self.keys else {
            return error(end, "no keys: write keys=FIELD");
        };
        let values = self.values.unwrap_or_default();
        let mut sort = Vec::new();
        for (column, name, descending) in self.sort.into_iter().flatten() {
            let key = || keys.iter().position(|key| key.field == name);
            let value = || values.iter().position(|value| value.field == name);
            let by = match name.as_str() {
                HITCOUNT => Some(By::Hits),
                // A field that is both a key and a value means the value, as in the kernel.
                _ => value().map(By::Value).or_else(|| key().map(By::Key)),
            };
            match by {
                Some(by) => sort.push(Order { by, descending }),
                None => {
                    let name = quoted(&name);
                    let message =
                        format!("{name} is neither {HITCOUNT} nor one of the keys and values");
                    return error(column, message);
                }
            }
        }
        if sort.is_empty() {
            sort.push(Order {
                by: By::Hits,
                descending: false,
            });
        }
        Ok(Histogram {
            keys,
            values,
            sort,
            size: self.size.unwrap_or(SIZE),
            filter,
        })
    }
}

/// Parses a comma-separated list of at most `most` elements.
fn list<T>(
    words: &mut Cursor<'_>,
    most: usize,
    what: &str,
    one: impl Fn(&mut Cursor<'_>) -> Result<T, ParseError>,
) -> Result<Vec<T>, ParseError> {
    let mut all = Vec::new();
    loop {
        if all.len() == most {
            return error(words.at(), format!("too many {what}: at most {most}"));
        }
        all.push(one(words)?);
        if !words.eat(",") {
            return Ok(all);
        }
    }
}

fn key(words: &mut Cursor<'_>) -> Result<Key, ParseError> {
    let (column, field) = words.field()?;
    let per = words.per()?;
    let mut form = KeyForm::Plain;
    if words.eat(".") {
        let at = words.at();
        let found = KEY_FORMS.iter().find(|(_, word)| words.eat_word(word));
        form = match found {
            Some((form, _)) => *form,
            None if words.eat(BUCKETS) => {
                let at = words.at();
                let digits = words.name();
                match number_in(at, digits, "width", || "missing width".to_owned())? {
                    0 => return error(at, "a bucket has a width of at least 1"),
                    width => KeyForm::Buckets(width),
                }
            }
            None => {
                return unknown(
                    at,
                    words.name(),
                    "write hex, sym, sym-offset, execname, log2, bits, buckets=N or usecs",
                );
            }
        };
    }
    if field == HITCOUNT {
        return error(column.0, format!("{HITCOUNT} cannot be a key"));
    }
    Ok(Key {
        column,
        field: field.to_owned(),
        per,
        form,
    })
}

/// Returns the error for an unknown `form` after a field, at `at`. The message differs if the kernel knows the
/// form.
fn unknown<T>(at: usize, form: &str, known: &str) -> Result<T, ParseError> {
    const KERNELS: [&str; 4] = ["percent", "graph", "syscall", "stacktrace"];
    match KERNELS.contains(&form) {
        true => error(at, format!("`{form}` is not known here; {known}")),
        false => error(at, known),
    }
}

/// Parses a value; returns `None` for the hit count, which every entry has.
fn value(words: &mut Cursor<'_>) -> Result<Option<Value>, ParseError> {
    let (column, field) = words.field()?;
    let per = words.per()?;
    let mut form = ValueForm::Sum;
    if field == HITCOUNT {
        return match per {
            Some(_) => error(column.0, format!("{HITCOUNT} is not divided")),
            None if words.eat(".") => {
                let known = "how often an entry was hit is shown as it is";
                unknown(words.at(), words.name(), known)
            }
            None => Ok(None),
        };
    }
    if words.eat(".") {
        let at = words.at();
        let found = VALUE_FORMS.iter().find(|(_, word)| words.eat_word(word));
        let Some((found, _)) = found else {
            return unknown(at, words.name(), "write hex, avg, min or max");
        };
        form = *found;
    }
    Ok(Some(Value {
        column,
        field: field.to_owned(),
        per,
        form,
    }))
}

fn order(words: &mut Cursor<'_>) -> Result<(usize, String, bool), ParseError> {
    let (column, field) = words.field()?;
    let mut descending = false;
    if words.eat(".") {
        descending = words.eat_word("descending");
        if !descending && !words.eat_word("ascending") {
            return error(words.at(), "write ascending or descending");
        }
    }
    Ok((column.0, field.to_owned(), descending))
}

impl<'a> Cursor<'a> {
    /// Skips the word `what` if it comes next and is a whole word.
    fn eat_word(&mut self, what: &str) -> bool {
        let behind = self.rest().strip_prefix(what);
        let found =
            behind.is_some_and(|rest| !rest.starts_with(|c: char| is_of_name(c) || c == '-'));
        found && self.eat(what)
    }

    /// Takes the letters, digits and `_` that come next.
    fn name(&mut self) -> &'a str {
        self.take(is_of_name)
    }

    /// Parses the divisor of a field, if there is one.
    fn per(&mut self) -> Result<Option<NonZeroU64>, ParseError> {
        if let Some(sign) = self.rest().chars().next().filter(|c| "+-*".contains(*c)) {
            let message = format!("`{sign}` is not known here: of a field there is FIELD/N only");
            return self.error(message);
        }
        if !self.eat("/") {
            return Ok(None);
        }
        let at = self.at();
        let missing = || "missing number to divide by".to_owned();
        let number = number_in(at, self.name(), "number to divide by", missing)?;
        match NonZeroU64::new(number) {
            Some(number) => Ok(Some(number)),
            None => error(at, "nothing can be divided by 0"),
        }
    }

    fn field(&mut self) -> Result<(Column, &'a str), ParseError> {
        let column = Column(self.at());
        if self.rest().starts_with('$') {
            return error(column.0, "`$` is not known here: there are no variables");
        }
        match self.name() {
            "" => error(column.0, "the name of a field belongs here"),
            name => Ok((column, name)),
        }
    }
}

fn is_of_name(c: char) -> bool {
    c == '_' || c.is_ascii_alphanumeric()
}
