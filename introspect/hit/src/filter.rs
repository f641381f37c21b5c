//! Whether a hit counts, by its probe's filter.
//!
//! Invariant: nothing is allocated, and the work is bounded by the filter and what was captured. Of a value
//! that could not be read nothing holds.

use hvprobe_arch::Regs;
use hvprobe_linux::task::Task;
use hvprobe_spec::fetch::Operator;
use hvprobe_spec::predicate::{Check, Field, Predicate, With};
use hvprobe_spec::{Actions, Bits, Common, Source, TextHeader};

use crate::event::Captured;

/// What a filter looks at: an event, before it is one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen<'a> {
    pub(crate) actions: &'a Actions,
    pub(crate) regs: &'a Regs,
    /// At a return, the registers at the entry.
    pub(crate) entry: Option<&'a Regs>,
    pub(crate) captured: &'a Captured,
    pub(crate) task: Option<&'a Task>,
    pub(crate) vcpu: u32,
}

/// Whether `filter`, which asks for nothing but the task and the virtual CPU, lets what `task` did on `vcpu`
/// pass. Of anything else it asks for, nothing holds.
#[must_use]
pub fn passes_by_task(filter: &Predicate, task: Option<&Task>, vcpu: u32) -> bool {
    let seen = Seen {
        actions: &Actions::default(),
        regs: &Regs::default(),
        entry: None,
        captured: &Captured::nothing(),
        task,
        vcpu,
    };
    seen.passes(filter)
}

impl Seen<'_> {
    /// Whether `filter` lets it pass.
    pub(crate) fn passes(&self, filter: &Predicate) -> bool {
        match filter {
            Predicate::Check(check) => self.holds(check),
            Predicate::Not(filter) => !self.passes(filter),
            Predicate::All(filters) => filters.iter().all(|filter| self.passes(filter)),
            Predicate::Any(filters) => filters.iter().any(|filter| self.passes(filter)),
        }
    }

    fn holds(&self, check: &Check) -> bool {
        match &check.with {
            With::Number(operator, with) => self
                .number(&check.field)
                .is_some_and(|(value, signed)| compare(*operator, value, signed, *with)),
            With::Text(operator, with) => match &check.field {
                Field::Text(source) => self
                    .bytes(source, |bytes| matches_text(*operator, bytes, with))
                    .unwrap_or(false),
                _ => false,
            },
        }
    }

    /// A number, extended to 64 bits, and whether it has a sign.
    pub(crate) fn number(&self, field: &Field) -> Option<(u64, bool)> {
        let task = |of: fn(&Task) -> i32| Some((i64::from(of(self.task?)).cast_unsigned(), true));
        match field {
            Field::Pid => task(|task| task.pid),
            Field::Tgid => task(|task| task.tgid),
            Field::Cpu => Some((self.vcpu.into(), false)),
            Field::Number {
                source,
                size,
                bits,
                signed,
            } => {
                let value = self.bytes(source, |bytes| {
                    let mut whole = [0; 8];
                    let size = usize::from(*size).min(bytes.len()).min(whole.len());
                    whole[..size].copy_from_slice(&bytes[..size]);
                    u64::from_le_bytes(whole)
                })?;
                Some((extend(value, *size, *bits, *signed), *signed))
            }
            Field::Text(_) => None,
        }
    }

    /// What `take` makes of the bytes at `source`.
    pub(crate) fn bytes<T>(&self, source: &Source, take: impl FnOnce(&[u8]) -> T) -> Option<T> {
        match source {
            Source::Registers { registers, entry } => {
                let regs = if *entry { self.entry? } else { self.regs };
                Some(take(&regs.get(*registers.first()?).to_le_bytes()))
            }
            Source::Item(index) => Some(take(self.item(*index)?)),
            Source::Constant(bytes) => Some(take(bytes)),
            Source::Common(common) => {
                let number = match common {
                    Common::Comm => return Some(take(&self.task?.comm)),
                    Common::Ip => self.regs.rip,
                    Common::Flags => self.regs.rflags,
                    Common::Retval => self.regs.rax,
                };
                Some(take(&number.to_le_bytes()))
            }
        }
    }

    /// The captured item at `wanted`; of a text or a stack what it says.
    pub(crate) fn item(&self, wanted: usize) -> Option<&[u8]> {
        let mut rest = self.captured.bytes();
        let (first, then) = (&self.actions.capture, &self.actions.capture_at_return);
        for (index, item) in first.iter().chain(then).enumerate() {
            let head = if item.has_header() {
                TextHeader::SIZE
            } else {
                0
            };
            let len = match rest.first_chunk() {
                Some(header) if head > 0 => usize::from(TextHeader::from_bytes(*header).len),
                _ => item.len(),
            };
            let (this, behind) = rest.split_at_checked(head + len)?;
            if index == wanted {
                return (!self.captured.is_unreadable(index)).then(|| &this[head..]);
            }
            rest = behind;
        }
        None
    }
}

/// The bits of `value` that are meant, extended to 64.
fn extend(value: u64, size: u8, bits: Option<Bits>, signed: bool) -> u64 {
    let (offset, width) = match bits {
        Some(bits) => (u32::from(bits.offset), u32::from(bits.width)),
        None => (0, u32::from(size) * 8),
    };
    let above = 64_u32.saturating_sub(width).min(63);
    let value = value.checked_shr(offset).unwrap_or(0) << above;
    if signed {
        (value.cast_signed() >> above).cast_unsigned()
    } else {
        value >> above
    }
}

fn compare(operator: Operator, value: u64, signed: bool, with: u64) -> bool {
    let order = if signed {
        value.cast_signed().cmp(&with.cast_signed())
    } else {
        value.cmp(&with)
    };
    match operator {
        Operator::Equal => order.is_eq(),
        Operator::NotEqual => order.is_ne(),
        Operator::Less => order.is_lt(),
        Operator::LessOrEqual => order.is_le(),
        Operator::Greater => order.is_gt(),
        Operator::GreaterOrEqual => order.is_ge(),
        Operator::AnyBit => value & with != 0,
        Operator::Glob => false,
    }
}

fn matches_text(operator: Operator, bytes: &[u8], with: &[u8]) -> bool {
    let end = bytes.iter().position(|byte| *byte == 0);
    let text = &bytes[..end.unwrap_or(bytes.len())];
    match operator {
        Operator::Equal => text == with,
        Operator::NotEqual => text != with,
        Operator::Glob => glob(with, text),
        _ => false,
    }
}

/// Whether all of `text` matches `pattern`: `*`, `?`, `[...]` and `\` as the kernel has them
/// (`glob_match` in lib/glob.c). Only the last `*` is ever gone back to, so that the work is at most the
/// product of both lengths.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut read) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    loop {
        let step = match (pattern.get(at), text.get(read)) {
            (Some(b'*'), _) => {
                at += 1;
                back = Some((at, read));
                continue;
            }
            (None, None) => return true,
            (Some(_), Some(byte)) => one(&pattern[at..], *byte),
            (None, Some(_)) | (Some(_), None) => None,
        };
        match (step, back) {
            (Some(len), _) => (at, read) = (at + len, read + 1),
            (None, Some((after, from))) if from < text.len() => {
                (at, read) = (after, from + 1);
                back = Some((after, from + 1));
            }
            (None, _) => return false,
        }
    }
}

/// How long the first part of `pattern` is, which is no `*`, if `byte` matches it.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match *pattern {
        [b'?', ..] => Some(1),
        [b'\\', escaped, ..] => (escaped == byte).then_some(2),
        [b'[', ..] => match set(pattern, byte) {
            Some((len, matches)) => matches.then_some(len),
            // Not closed: itself.
            None => (byte == b'[').then_some(1),
        },
        [first, ..] => (first == byte).then_some(1),
        [] => None,
    }
}

/// How long the set is that `pattern` begins with, and whether `byte` is in it.
fn set(pattern: &[u8], byte: u8) -> Option<(usize, bool)> {
    let mut at = 1;
    let inverted = pattern.get(at) == Some(&b'!');
    at += usize::from(inverted);
    let (start, mut found) = (at, false);
    loop {
        let first = *pattern.get(at)?;
        if first == b']' && at > start {
            return Some((at + 1, found != inverted));
        }
        let last = match (pattern.get(at + 1), pattern.get(at + 2)) {
            (Some(b'-'), Some(last)) if *last != b']' => {
                at += 2;
                *last
            }
            _ => first,
        };
        found |= (first..=last).contains(&byte);
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn globs_match_as_the_kernels_do() {
        let cases: [(&str, &str, bool); 18] = [
            ("", "", true),
            ("*", "", true),
            ("?", "", false),
            ("/etc/*", "/etc/passwd", true),
            ("/etc/*", "/usr/etc/", false),
            ("*.so", "libc.so", true),
            ("*.so", "libc.so.6", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXcYb", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]]", "]", true),
            ("[]-a]", "^", true),
            ("[x", "[x", true),
            ("a\\*", "a*", true),
            ("a\\*", "ab", false),
            ("*\\?", "what?", true),
            ("x?*", "x", false),
        ];
        for (pattern, text, expected) in cases {
            let found = glob(pattern.as_bytes(), text.as_bytes());
            assert_eq!(found, expected, "{pattern} {text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_matched_in_the_end(pattern in "[a*?\\[\\]!\\\\-]{0,20}", text in "[ab\\]]{0,20}") {
            glob(pattern.as_bytes(), text.as_bytes());
            // Followed by anything, it matches whatever it matched before.
            let before = glob(pattern.as_bytes(), text.as_bytes());
            if before && !pattern.ends_with('\\') && !pattern.contains('[') {
                let (pattern, text) = (pattern + "*", text + "x");
                prop_assert!(glob(pattern.as_bytes(), text.as_bytes()));
            }
        }

        #[test]
        fn numbers_are_extended_by_their_sign(value: u64, size in 1_u8..=8) {
            let bits = u32::from(size) * 8;
            let low = value & (u64::MAX >> (64 - bits));
            prop_assert_eq!(extend(value, size, None, false), low);
            let signed = extend(value, size, None, true);
            prop_assert_eq!(signed & (u64::MAX >> (64 - bits)), low);
            prop_assert_eq!(signed >> 63, low >> (bits - 1));
        }
    }

    #[test]
    fn signs_and_bits_count() {
        assert_eq!(
            extend(
                0xb4,
                1,
                Some(Bits {
                    offset: 2,
                    width: 3
                }),
                false
            ),
            5
        );
        assert_eq!(
            extend(
                0xb4,
                1,
                Some(Bits {
                    offset: 2,
                    width: 3
                }),
                true
            ),
            3_u64.wrapping_neg()
        );
        let minus = 100_u64.wrapping_neg();
        assert!(compare(Operator::Less, minus, true, 0));
        assert!(!compare(Operator::Less, minus, false, 0));
        assert!(compare(Operator::AnyBit, 6, false, 4));
    }
}
