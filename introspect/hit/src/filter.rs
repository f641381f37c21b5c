//! Decides by a probe's filter whether a hit counts.
//!
//! Invariant: nothing is allocated. The work is bounded by the filter, by what was captured and, for texts that
//! must be read as a whole, by [`TEXT_MAX`]. One match with a pattern takes at most [`LOOKS`] steps. No condition
//! holds for a value that could not be read. A text that continues after its captured part is never treated as if
//! it ended there: if the captured part does not decide, the whole text does; if that cannot be read, nothing is
//! decided.

use hvprobe_arch::Regs;
use hvprobe_linux::task::Task;
use hvprobe_spec::fetch::Operator;
use hvprobe_spec::predicate::{Check, Field, Predicate, With};
use hvprobe_spec::{Actions, Bits, Common, Source, TextHeader};

use crate::event::Captured;

/// Input of a filter: the data of a hit for which no event has been made yet.
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

/// Maximum length of a text that is read, as in the kernel (`MAX_STRING_SIZE` in kernel/trace/trace_probe.h).
const TEXT_MAX: usize = 4096;

/// Maximum number of steps for matching one text with a pattern: 32 for each character of the longest text. Without
/// this limit, a pattern that matches many characters from each of a thousand places before it fails would take
/// many times as many steps.
const LOOKS: usize = 32 * TEXT_MAX;

/// Function that reads the whole text of a captured item of which only the beginning was captured. Its arguments
/// are the index of the item and a buffer. Returns `None` if the text cannot be read.
pub(crate) type Whole<'a> = dyn Fn(usize, &mut [u8]) -> Option<TextHeader> + 'a;

/// A [`Whole`] that reads nothing, for filters that are evaluated after the guest has continued.
pub(crate) fn no_more(_: usize, _: &mut [u8]) -> Option<TextHeader> {
    None
}

/// Returns whether `filter`, which may only check the task and the vCPU, accepts what `task` did on `vcpu`. Any
/// other check does not hold.
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
    seen.passes(filter, &no_more) == Some(true)
}

impl Seen<'_> {
    /// Returns whether `filter` accepts the event; `None` if that depends on the rest of a text that `whole`
    /// cannot read.
    pub(crate) fn passes(&self, filter: &Predicate, whole: &Whole<'_>) -> Option<bool> {
        // Returns `by` if the result of a filter is `by`; otherwise `None` if a filter is undecided; otherwise the
        // opposite of `by`.
        let decides = |filters: &[Predicate], by: bool| {
            let mut all = Some(!by);
            for filter in filters {
                match self.passes(filter, whole) {
                    Some(it) if it == by => return Some(by),
                    None => all = None,
                    Some(_) => {}
                }
            }
            all
        };
        match filter {
            Predicate::Check(check) => self.holds(check, whole),
            Predicate::Not(filter) => self.passes(filter, whole).map(|it| !it),
            Predicate::All(filters) => decides(filters, false),
            Predicate::Any(filters) => decides(filters, true),
        }
    }

    fn holds(&self, check: &Check, whole: &Whole<'_>) -> Option<bool> {
        match &check.with {
            With::Number(operator, with) => {
                let number = self.number(&check.field);
                Some(number.is_some_and(|(value, signed)| compare(*operator, value, signed, *with)))
            }
            With::Text(operator, with) => match &check.field {
                Field::Text(Source::Item(index)) => self.text_holds(*index, *operator, with, whole),
                Field::Text(source) => self
                    .bytes(source, |bytes| matches_text(*operator, bytes, with, false))
                    .unwrap_or(Some(false)),
                _ => Some(false),
            },
        }
    }

    /// Compares the text of the captured item `index` with `with`; `None` if the result cannot be decided.
    fn text_holds(
        &self,
        index: usize,
        operator: Operator,
        with: &[u8],
        whole: &Whole<'_>,
    ) -> Option<bool> {
        let Some((bytes, goes_on)) = self.found(index) else {
            return Some(false);
        };
        matches_text(operator, bytes, with, goes_on)
            .or_else(|| whole_matches(index, operator, with, whole))
    }

    /// Returns the number in `field`, extended to 64 bits, and whether it is signed.
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

    /// Calls `take` with the bytes at `source`, and returns its result.
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

    /// Returns the captured item `wanted`; for a text or a stack, its content without the header.
    pub(crate) fn item(&self, wanted: usize) -> Option<&[u8]> {
        self.found(wanted).map(|(bytes, _)| bytes)
    }

    /// Like [`Seen::item`], and also returns whether the item is a text that continues after the captured part.
    fn found(&self, wanted: usize) -> Option<(&[u8], bool)> {
        let mut rest = self.captured.bytes();
        let (first, then) = (&self.actions.capture, &self.actions.capture_at_return);
        for (index, item) in first.iter().chain(then).enumerate() {
            let head = if item.has_header() {
                TextHeader::SIZE
            } else {
                0
            };
            let (len, goes_on) = match rest.first_chunk() {
                Some(header) if head > 0 => {
                    let header = TextHeader::from_bytes(*header);
                    (usize::from(header.len), header.truncated)
                }
                _ => (item.len(), false),
            };
            let (this, behind) = rest.split_at_checked(head + len)?;
            if index == wanted {
                let is_there = !self.captured.is_unreadable(index);
                return is_there.then(|| (&this[head..], goes_on && !item.is_stack_trace()));
            }
            rest = behind;
        }
        None
    }
}

/// Returns the bits of `value` that `bits` selects (if `None`, the low `size` bytes), extended to 64 bits.
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

/// Compares the text in `bytes`, up to the first NUL, with `with`. If `goes_on` is set, the text continues after
/// `bytes`: returns `None` if `bytes` alone do not decide.
fn matches_text(operator: Operator, bytes: &[u8], with: &[u8], goes_on: bool) -> Option<bool> {
    let end = bytes.iter().position(|byte| *byte == 0);
    let text = &bytes[..end.unwrap_or(bytes.len())];
    let goes_on = goes_on && end.is_none();
    let equal = || match goes_on {
        true if with.len() > text.len() && with.starts_with(text) => None,
        true => Some(false),
        false => Some(text == with),
    };
    match operator {
        Operator::Equal => equal(),
        Operator::NotEqual => equal().map(|equal| !equal),
        Operator::Glob => glob(with, text, goes_on),
        _ => Some(false),
    }
}

/// Returns whether all of `text` matches `pattern`: `*`, `?`, `[...]` and `\` as in the kernel (`glob_match` in
/// lib/glob.c). After a mismatch, goes back only to the last `*`; returns `None` after [`LOOKS`] steps. If
/// `goes_on` is set, `text` is only the beginning of a longer text: returns `None` if the result depends on the
/// rest of it.
fn glob(pattern: &[u8], text: &[u8], goes_on: bool) -> Option<bool> {
    let (mut at, mut read) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    let mut left = LOOKS;
    loop {
        left = left.checked_sub(1)?;
        let step = match (pattern.get(at), text.get(read)) {
            (Some(b'*'), _) => {
                at += 1;
                if at == pattern.len() {
                    return Some(true);
                }
                back = Some((at, read));
                continue;
            }
            (None, None) if !goes_on => return Some(true),
            // A pattern without a `*` does not match a longer text.
            (None, None) => return if back.is_some() { None } else { Some(false) },
            (Some(_), None) if goes_on => return None,
            (Some(_), Some(byte)) => {
                let (looks, step) = one(&pattern[at..], *byte);
                left = left.checked_sub(looks)?;
                step
            }
            (None, Some(_)) | (Some(_), None) => None,
        };
        match (step, back) {
            (Some(len), _) => (at, read) = (at + len, read + 1),
            (None, Some((after, from))) if from < text.len() => {
                (at, read) = (after, from + 1);
                back = Some((after, from + 1));
            }
            (None, _) => return Some(false),
        }
    }
}

/// Matches `byte` with the first part of `pattern`, which is not `*`. Returns the number of characters of `pattern`
/// that were read after its first one, and the length of the part if it matches.
fn one(pattern: &[u8], byte: u8) -> (usize, Option<usize>) {
    match *pattern {
        [b'?', ..] => (0, Some(1)),
        [b'\\', escaped, ..] => (0, (escaped == byte).then_some(2)),
        // A set is searched to its end.
        [b'[', ref rest @ ..] => match set(pattern, byte) {
            Some((len, matches)) => (len - 1, matches.then_some(len)),
            // Not closed: a literal `[`.
            None => (rest.len(), (byte == b'[').then_some(1)),
        },
        [first, ..] => (0, (first == byte).then_some(1)),
        [] => (0, None),
    }
}

/// Returns the length of the set that `pattern` begins with, and whether `byte` is in it. `None` if the set is not
/// closed.
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

/// Compares the whole text of the captured item `index` with `with`. Not inlined, because of its buffer.
#[cold]
#[inline(never)]
fn whole_matches(index: usize, operator: Operator, with: &[u8], whole: &Whole<'_>) -> Option<bool> {
    let mut buffer = [0; TEXT_MAX];
    let header = whole(index, &mut buffer)?;
    let bytes = buffer.get(..header.len.into())?;
    matches_text(operator, bytes, with, header.truncated)
}

#[cfg(test)]
mod tests {
    use hvprobe_spec::{Base, Fetched, Item, Read};
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
            let found = glob(pattern.as_bytes(), text.as_bytes(), false);
            assert_eq!(found, Some(expected), "{pattern} {text}");
        }
    }

    #[test]
    fn a_pattern_that_is_tried_without_end_is_not_decided() {
        let text = [b'a'; TEXT_MAX];
        for pattern in ["*a?b", "*[ab]b", "a*a*a*ab"] {
            assert_eq!(glob(pattern.as_bytes(), &text, false), Some(false));
        }
        let [letters, set] = ["a", "[ab]"].map(|part| format!("*{}c", part.repeat(60)));
        for pattern in [letters, set] {
            assert_eq!(glob(pattern.as_bytes(), &text, false), None, "{pattern}");
        }
    }

    #[test]
    fn a_set_costs_what_it_is_long_and_not_what_is_behind_it() {
        let text = [b'a'; TEXT_MAX];
        let closed = format!("*[b]{}", "x".repeat(60));
        assert_eq!(glob(closed.as_bytes(), &text, false), Some(false));
        let open = format!("*[b{}", "x".repeat(60));
        assert_eq!(glob(open.as_bytes(), &text, false), None);
    }

    #[test]
    fn the_beginning_of_a_text_decides_only_what_is_so_whatever_follows() {
        use Operator::{Equal, Glob, NotEqual};
        for (operator, with, expected) in [
            (Equal, "/etc/passwd", None),
            (Equal, "/etc/", Some(false)),
            (Equal, "/etc", Some(false)),
            (Equal, "/usr/lib", Some(false)),
            (NotEqual, "/etc/passwd", None),
            (NotEqual, "/etc/", Some(true)),
            (NotEqual, "/usr", Some(true)),
            (Glob, "/etc/*", Some(true)),
            (Glob, "*", Some(true)),
            (Glob, "*etc*", Some(true)),
            (Glob, "/etc/", Some(false)),
            (Glob, "/usr/*", Some(false)),
            (Glob, "/etc/p*", None),
            (Glob, "*Z", None),
            (Glob, "*/", None),
            (Glob, "*x*", None),
            (Glob, "/[!e]*", Some(false)),
        ] {
            let found = matches_text(operator, b"/etc/", with.as_bytes(), true);
            assert_eq!(found, expected, "{operator:?} {with}");
        }
        // A text whose end was captured is complete.
        let found = matches_text(Glob, b"/etc\0", b"*c", true);
        assert_eq!(found, Some(true));
    }

    /// Returns a hit that captured only `text`, the beginning of a longer text.
    fn beginning(text: &[u8]) -> (Actions, Captured) {
        let actions = Actions {
            capture: vec![Item::Fetched(Box::new(Fetched {
                base: Base::Constant(0),
                pointers: Vec::new(),
                read: Read::Text(16),
            }))],
            ..Actions::default()
        };
        let mut captured = Captured::nothing();
        captured.text(16, |bytes| {
            bytes[..text.len()].copy_from_slice(text);
            let len = u16::try_from(text.len()).ok()?;
            Some(TextHeader {
                len,
                truncated: true,
            })
        });
        (actions, captured)
    }

    #[test]
    fn what_a_beginning_leaves_open_is_decided_by_the_whole_or_not_at_all() {
        let (actions, captured) = beginning(b"/etc/");
        let seen = Seen {
            actions: &actions,
            regs: &Regs::default(),
            entry: None,
            captured: &captured,
            task: None,
            vcpu: 0,
        };
        let glob = |pattern: &str| {
            Predicate::Check(Check {
                field: Field::Text(Source::Item(0)),
                with: With::Text(Operator::Glob, pattern.as_bytes().into()),
            })
        };
        let [yes, no, open] = ["/etc/*", "/usr/*", "*Z"].map(glob);
        let not = |filter: &Predicate| Predicate::Not(Box::new(filter.clone()));
        let all =
            |filters: &[&Predicate]| Predicate::All(filters.iter().copied().cloned().collect());
        let any =
            |filters: &[&Predicate]| Predicate::Any(filters.iter().copied().cloned().collect());
        let whole = |_: usize, bytes: &mut [u8]| {
            bytes[..7].copy_from_slice(b"/etc/fZ");
            Some(TextHeader {
                len: 7,
                truncated: false,
            })
        };
        for (filter, alone, with_whole) in [
            (yes.clone(), Some(true), true),
            (no.clone(), Some(false), false),
            (open.clone(), None, true),
            (not(&open), None, false),
            (all(&[&open, &no]), Some(false), false),
            (all(&[&open, &yes]), None, true),
            (any(&[&open, &yes]), Some(true), true),
            (any(&[&open, &no]), None, true),
            (glob("*Y"), None, false),
        ] {
            assert_eq!(seen.passes(&filter, &no_more), alone, "{filter:?}");
            assert_eq!(seen.passes(&filter, &whole), Some(with_whole), "{filter:?}");
        }
        let counters = crate::Counters::new(1);
        assert!(counters.lets_pass(0, Some(true)));
        assert!(!counters.lets_pass(0, None) && !counters.lets_pass(0, Some(false)));
        let counts = counters.sum();
        assert_eq!((counts.hits, counts.vetoed, counts.missed), (0, 1, 1));
    }

    proptest! {
        #[test]
        fn any_bytes_are_matched_in_the_end(pattern in "[a*?\\[\\]!\\\\-]{0,20}", text in "[ab\\]]{0,20}") {
            // A pattern that matches, with a `*` appended, also matches a longer text.
            let before = glob(pattern.as_bytes(), text.as_bytes(), false);
            prop_assert!(before.is_some());
            if before == Some(true) && !pattern.ends_with('\\') && !pattern.contains('[') {
                let (pattern, text) = (pattern + "*", text + "x");
                prop_assert_eq!(glob(pattern.as_bytes(), text.as_bytes(), false), Some(true));
            }
        }

        #[test]
        fn what_a_beginning_decides_is_so_of_the_whole(
            pattern in "[ab*?]{0,8}|[ab*?]{0,4}\\[a-b\\][ab*]{0,3}",
            text in "[ab]{0,10}",
            rest in "[ab]{1,5}",
        ) {
            let whole = text.clone() + &rest;
            let found = glob(pattern.as_bytes(), text.as_bytes(), true);
            if found.is_some() {
                prop_assert_eq!(found, glob(pattern.as_bytes(), whole.as_bytes(), false));
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
