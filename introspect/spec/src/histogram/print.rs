//! Printed forms of histograms.

use std::fmt;

use super::trigger::{By, Histogram, Key, KeyForm, Term, Value, ValueForm};

/// Suffixes of the forms of keys, except for [`KeyForm::Plain`] and [`KeyForm::Buckets`].
pub(super) const KEY_FORMS: [(KeyForm, &str); 7] = [
    (KeyForm::Hex, "hex"),
    (KeyForm::SymbolOffset, "sym-offset"),
    (KeyForm::Symbol, "sym"),
    (KeyForm::ExecName, "execname"),
    (KeyForm::Log2, "log2"),
    (KeyForm::Bits, "bits"),
    (KeyForm::Usecs, "usecs"),
];
/// Prefix of the number of [`KeyForm::Buckets`].
pub(super) const BUCKETS: &str = "buckets=";
/// Suffixes of the forms of values, except for [`ValueForm::Sum`].
pub(super) const VALUE_FORMS: [(ValueForm, &str); 4] = [
    (ValueForm::Hex, "hex"),
    (ValueForm::Average, "avg"),
    (ValueForm::Least, "min"),
    (ValueForm::Greatest, "max"),
];
/// Name of the number of hits, which every entry has.
pub(super) const HITCOUNT: &str = "hitcount";

impl<F> Term<F> {
    /// Returns the field's name with its divisor, as written.
    #[must_use]
    pub fn name(&self) -> String {
        match self.per {
            Some(per) => format!("{}/{per}", self.field),
            None => self.field.clone(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        if let KeyForm::Buckets(width) = self.form {
            return write!(f, ".{BUCKETS}{width}");
        }
        match KEY_FORMS.iter().find(|(form, _)| *form == self.form) {
            Some((_, word)) => write!(f, ".{word}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        match VALUE_FORMS.iter().find(|(form, _)| *form == self.form) {
            Some((_, word)) => write!(f, ".{word}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Histogram {
    /// Writes the histogram in the format in which the kernel prints a trigger.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("hist:keys=")?;
        for (at, key) in self.keys.iter().enumerate() {
            write!(f, "{}{key}", if at > 0 { "," } else { "" })?;
        }
        write!(f, ":vals={HITCOUNT}")?;
        for value in &self.values {
            write!(f, ",{value}")?;
        }
        f.write_str(":sort=")?;
        for (at, order) in self.sort.iter().enumerate() {
            let name = match order.by {
                By::Hits => Some(HITCOUNT),
                By::Key(key) => self.keys.get(key).map(|key| key.field.as_str()),
                By::Value(value) => self.values.get(value).map(|value| value.field.as_str()),
            };
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma}{}", name.unwrap_or_default())?;
            if order.descending {
                f.write_str(".descending")?;
            }
        }
        write!(f, ":size={}", self.size)?;
        match &self.filter {
            Some(filter) => write!(f, " if {filter}"),
            None => Ok(()),
        }
    }
}
