//! Compares the values of fetch arguments with those that the guest's own kernel fetches for the same definition.
//! The guest makes the same call for the kernel and for hvprobe. hvprobe reads each value twice: in a detour, where
//! possible, and in the host.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use hvprobe_hit::event::{Event, EventKind};
use hvprobe_linux::symbols::Symbols;
use hvprobe_machine::{Mechanism, ProbeInfo, ProbeSpec, Refusals};
use hvprobe_spec::definition::{self, Definition, Kind};
use hvprobe_spec::fetch::{Element, ExprKind};
use hvprobe_spec::shape::{Shape, ShapeKind};
use hvprobe_spec::{Argument, Common, Item, Read, Source, TextHeader};
use hvprobe_tests::names;
use hvprobe_tests::rig::{
    Running, assert_clean, infos, optimizing_guest, progress, rig, rounds, values,
};

use super::generate;

/// Number of definitions planted at a time.
const GROUP: usize = 100;
/// Mechanisms with which each definition is planted: one that may need no exit, and one that exits.
const ROUNDS: [Option<Mechanism>; 2] = [None, Some(Mechanism::Emulated)];

/// A value that hvprobe fetched.
#[derive(Debug, PartialEq, Eq)]
struct Ours {
    bytes: Vec<u8>,
    /// Whether a text is longer than the bytes that were read.
    truncated: bool,
}

/// Returns the value of an argument; `None` if it could not be read.
fn value(event: &Event, info: &ProbeInfo, argument: &Argument) -> Option<Ours> {
    let regs = match (&event.kind, &argument.source) {
        (EventKind::Return(call), Source::Registers { entry: true, .. }) => &call.entry,
        _ => &event.regs,
    };
    let (bytes, truncated) = match &argument.source {
        Source::Registers { registers, .. } => {
            let bytes = registers.iter().flat_map(|it| regs.get(*it).to_le_bytes());
            (bytes.collect(), false)
        }
        Source::Item(index) => item(event, info, *index)?,
        Source::Constant(bytes) => (bytes.clone(), false),
        Source::Common(Common::Comm) => {
            let comm = event.task.expect("a task").comm;
            let end = comm.iter().position(|byte| *byte == 0);
            (comm[..end.unwrap_or(comm.len())].to_vec(), false)
        }
        Source::Common(Common::Ip) => (regs.rip.to_le_bytes().to_vec(), false),
        Source::Common(Common::Flags) => (regs.rflags.to_le_bytes().to_vec(), false),
        Source::Common(Common::Retval) => (regs.rax.to_le_bytes().to_vec(), false),
    };
    Some(Ours { bytes, truncated })
}

fn item(event: &Event, info: &ProbeInfo, wanted: usize) -> Option<(Vec<u8>, bool)> {
    let mut rest = event.captured.bytes();
    let actions = &info.actions;
    let items = actions.capture.iter().chain(&actions.capture_at_return);
    for (index, item) in items.enumerate() {
        let (mut head, mut len, mut truncated) = (0, item.len(), false);
        if let Item::Fetched(fetched) = item
            && let Read::Text(_) = fetched.read
        {
            let header = TextHeader::from_bytes(*rest.first_chunk().expect("a header"));
            head = TextHeader::SIZE;
            len = head + usize::from(header.len);
            truncated = header.truncated;
        }
        let (this, behind) = rest.split_at(len);
        if index == wanted {
            let readable = !event.captured.is_unreadable(index);
            return readable.then(|| (this[head..].to_vec(), truncated));
        }
        rest = behind;
    }
    panic!("no item {wanted} in {info:?}");
}

/// Returns whether `printed`, which the kernel printed, is the same value as `ours`.
fn is_same(printed: &str, ours: Option<&Ours>, argument: &Argument, symbols: &Symbols) -> bool {
    let Shape { kind, size, .. } = &argument.shape;
    let Some(ours) = ours else {
        // For a number that it could not read, the kernel shows old bytes of its ring buffer.
        return printed == "(fault)" || *kind != ShapeKind::String;
    };
    match kind {
        ShapeKind::String => {
            let Some(text) = unquoted(printed, "\\\"") else {
                return false;
            };
            text == ours.bytes || ours.truncated && text.starts_with(&ours.bytes)
        }
        ShapeKind::Array { element, .. } => {
            let inner = printed
                .strip_prefix('{')
                .and_then(|it| it.strip_suffix('}'));
            let Some(inner) = inner else { return false };
            let size = usize::try_from(element.size).expect("small");
            let parts: Vec<&str> = inner.split(',').collect();
            let elements = ours.bytes.chunks(size);
            parts.len() == elements.len()
                && parts
                    .iter()
                    .zip(elements)
                    .all(|(part, bytes)| is_number(part, bytes, element, argument, symbols))
        }
        _ => {
            let size = usize::try_from(*size).expect("small");
            let bytes = &ours.bytes[..size.min(ours.bytes.len())];
            is_number(printed, bytes, &argument.shape, argument, symbols)
        }
    }
}

fn is_number(
    printed: &str,
    bytes: &[u8],
    shape: &Shape,
    argument: &Argument,
    symbols: &Symbols,
) -> bool {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    let mut value = u64::from_le_bytes(whole);
    let mut width = 8 * bytes.len();
    if let Some(bits) = argument.bits {
        value >>= bits.offset;
        width = bits.width.into();
    }
    let mask = u64::MAX >> (64 - width);
    value &= mask;
    if shape.kind == ShapeKind::Symbol {
        let named = |text: &str| {
            let (name, rest) = text.split_once('+')?;
            let offset = number(rest.split('/').next()?)?;
            let mut at = symbols.candidates(name).into_iter();
            at.find(|symbol| symbol.addr.0.wrapping_add(offset) == value)
        };
        let text = printed.trim_matches(['"', '\\']);
        // The kernel does not terminate a symbol's text, so the next text follows directly.
        return named(text).is_some() || text.starts_with(&format!("{value:#x}"));
    }
    if let Some(text) = unquoted(printed, "\\'") {
        return text == bytes[..1];
    }
    number(printed).is_some_and(|number| number & mask == value)
}

fn number(text: &str) -> Option<u64> {
    match (text.strip_prefix("0x"), text.strip_prefix('-')) {
        (Some(hex), _) => u64::from_str_radix(hex, 16).ok(),
        (_, Some(digits)) => Some(digits.parse::<u64>().ok()?.wrapping_neg()),
        _ => text.parse().ok(),
    }
}

/// Returns the bytes of a text that is printed between two `quote`s, with Rust's escapes for bytes.
fn unquoted(printed: &str, quote: &str) -> Option<Vec<u8>> {
    let mut rest = printed.strip_prefix(quote)?.strip_suffix(quote)?;
    let mut bytes = Vec::new();
    while let Some(first) = rest.chars().next() {
        let (byte, len) = match (first, rest.get(1..2)) {
            ('\\', Some("x")) => (u8::from_str_radix(rest.get(2..4)?, 16).ok()?, 4),
            ('\\', Some("n")) => (b'\n', 2),
            ('\\', Some("t")) => (b'\t', 2),
            ('\\', Some("r")) => (b'\r', 2),
            ('\\', Some(other)) => (*other.as_bytes().first()?, 2),
            _ => (u8::try_from(first).ok()?, 1),
        };
        bytes.push(byte);
        rest = &rest[len..];
    }
    Some(bytes)
}

/// Returns the text that the kernel printed after `NAME: (PLACE)` for each definition, by the definition's number.
fn traced(printed: &str) -> BTreeMap<usize, String> {
    let mut found = BTreeMap::new();
    for line in printed.lines().filter_map(|line| line.strip_prefix("K ")) {
        let event = line.split_once(": e").and_then(|(_, rest)| {
            let (number, rest) = rest.split_once(": (")?;
            let (_, values) = rest.split_once(')')?;
            Some((number.parse().ok()?, values.trim_end().to_owned()))
        });
        if let Some((number, values)) = event {
            // Of several hits the first counts, as for ours.
            found.entry(number).or_insert(values);
        }
    }
    found
}

/// Splits `line`, which has ` NAME=VALUE` for each of `names`, into the values.
fn split<'l>(line: &'l str, names: &[String]) -> Option<Vec<&'l str>> {
    let mut rest = line;
    let mut values = Vec::new();
    for (index, name) in names.iter().enumerate() {
        rest = rest.strip_prefix(&format!(" {name}="))?;
        let end = names
            .get(index + 1)
            .map(|next| rest.find(&format!(" {next}=")));
        let (value, behind) = match end {
            None => (rest, ""),
            Some(end) => rest.split_at(end?),
        };
        values.push(value);
        rest = behind;
    }
    Some(values)
}

/// Size of a task's stack (`THREAD_SIZE` in arch/x86/include/asm/page_64_types.h, without KASAN).
const STACK: u64 = 16 << 10;

/// Caller-saved registers except for the result's (System V ABI for AMD64, section 3.2.1).
const CLOBBERED: [&str; 8] = ["%cx", "%dx", "%si", "%di", "%r8", "%r9", "%r10", "%r11"];

/// Returns the reason for which the value of an argument, in a call with the stack pointer `stack`, may rightly
/// differ from the kernel's.
fn differs_by_design(
    definition: &Definition,
    index: usize,
    printed: &str,
    stack: u64,
) -> Option<&'static str> {
    let text = definition.arguments[index].text.as_str();
    let nothing = ["0", "0x0", "(fault)"].contains(&printed);
    let returns = matches!(definition.kind, Kind::Return { .. });
    match () {
        // `pt_regs` holds the address after the kernel's int3.
        () if text.contains("%ip") => Some("%ip is the probepoint, not the byte behind it"),
        () if text.contains("%flags") => Some("%flags are those of another call"),
        () if text.contains("%orig_ax") => Some("%orig_ax is what the kernel's entry left there"),
        () if text.contains("%ss") || text.contains("%cs") => Some("selectors at an ftrace site"),
        () if text.contains("@jiffies") => Some("@jiffies goes on"),
        () if reaches_below(text) || text.contains("-0x10(%cx)") => Some("what is below the stack"),
        // We show the word that is there, and follow it as a pointer. The kernel takes it as zero, and what it
        // shows for memory at zero may be old bytes of its ring buffer.
        () if is_behind(text, stack) && (nothing || text.contains("($stack")) => {
            Some("behind its stack's end the kernel sees zeros")
        }
        // On 7.2 the kernel's own events do not agree on this value.
        () if text.contains("($stack5)") => Some("what that word of the stack points to changes"),
        () if text.contains("@init_task") => Some("the idle task has run"),
        () if returns && CLOBBERED.iter().any(|register| text.contains(register)) => {
            Some("what a call leaves in registers that it need not keep")
        }
        _ => None,
    }
}

/// Returns whether `text` reads memory below the stack pointer, which an interrupt may overwrite at any time.
/// Farther down the memory belongs to another task.
fn reaches_below(text: &str) -> bool {
    let is_below = |at: usize| {
        let before = text[..at].trim_end_matches(|c: char| c.is_ascii_alphanumeric());
        before.ends_with('-')
    };
    // A kernel without frame pointers may have an address of the stack in %bp.
    let bases = ["(%sp)", "($stack)", "(%bp)"].into_iter();
    let mut all = bases.flat_map(|base| text.match_indices(base));
    all.any(|(at, _)| is_below(at))
}

/// Returns the indexes of the words of the stack that `text` reads.
fn stack_words(text: &str) -> impl Iterator<Item = u64> {
    let words = text.split("$stack").skip(1);
    words.filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit());
        rest[..end.unwrap_or(rest.len())].parse().ok()
    })
}

/// Returns whether `text` reads a word of the stack that may lie outside the stack pointer's page.
fn reaches_far(text: &str) -> bool {
    stack_words(text).any(|word| word > 20)
}

/// Returns whether `text` reads a word outside the stack into which `stack` points. The kernel reads zero there
/// (`regs_within_kernel_stack` in arch/x86/include/asm/ptrace.h).
fn is_behind(text: &str, stack: u64) -> bool {
    stack_words(text).any(|word| (stack + 8 * word) / STACK != stack / STACK)
}

/// Returns whether the values of a definition are compared with the kernel's. They are not compared if an argument
/// stands for all arguments of the function, or is an array of texts, which we refuse.
fn is_comparable(definition: &Definition) -> bool {
    definition.arguments.iter().all(|it| {
        let text_array = it.ty.as_ref().is_some_and(|ty| {
            ty.count.is_some() && matches!(ty.element, Element::String | Element::UserString)
        });
        !matches!(it.expr.kind, ExprKind::Arguments) && !text_array
    })
}

#[test]
fn values_are_those_that_the_guests_kernel_fetches() {
    if rig("values held against the kernel's").is_none() {
        return;
    }
    let function = "vfs_read";
    let all = generate::definitions(
        function,
        names::behind_entry(function),
        rounds(generate::MADE_UP),
    );
    let mut texts = Vec::new();
    for text in all {
        let comparable = definition::parse(&text).is_ok_and(|it| is_comparable(&it));
        if comparable && text[1..].starts_with(":e ") {
            texts.push(text);
        }
    }
    // All definitions of a group are of one kind, because a return probe of the kernel changes the stack, and
    // because a definition that reaches too far up the stack makes all probes of its group exit.
    texts.sort_by_key(|text| (text.starts_with('r'), reaches_far(text)));
    let entries = texts.iter().filter(|text| text.starts_with('p')).count();
    let filler =
        (0..entries.next_multiple_of(GROUP) - entries).map(|_| format!("p:e {function} %di"));
    texts.splice(entries..entries, filler);
    let texts: Vec<String> = texts
        .into_iter()
        .enumerate()
        .map(|(number, text)| format!("{}:e{number}{}", &text[..1], &text[3..]))
        .collect();
    let script = format!(
        "cat > /tmp/definitions <<'END'\n{}\nEND\nworkload fetch /tmp/definitions {GROUP} {}",
        texts.join("\n"),
        ROUNDS.len()
    );
    let mut config = optimizing_guest(1, &["sh", "-c", &script]);
    // Keeps the stack at the same offset in each system call.
    config.cmdline += " randomize_kstack_offset=off rcupdate.rcu_expedited=1";
    let mut running = Running::boot(config);
    let groups = texts.len().div_ceil(GROUP);
    for number in 0..groups {
        running.wait_for(&format!("kernel: {number}"));
    }
    let printed = running.wait_for("ready: 0");
    let traced = traced(&printed);
    let refused: BTreeSet<_> = printed
        .lines()
        .filter_map(|line| line.strip_prefix("R ")?.trim().parse::<usize>().ok())
        .collect();
    let pid = i32::try_from(values(&printed, "pid")[0]).expect("a pid");
    let mut tally = Tally::default();
    let rounds = ROUNDS.into_iter().flat_map(|mechanism| {
        let groups = texts.chunks(GROUP).enumerate();
        groups.map(move |(number, group)| (mechanism, number * GROUP, group))
    });
    for (number, (mechanism, first, group)) in rounds.enumerate() {
        running.wait_for(&format!("ready: {number}\n").replace('\n', "\r\n"));
        progress(&format!("group {number} of {}", ROUNDS.len() * groups));
        let taken: Vec<usize> = (first..first + group.len())
            .filter(|index| !refused.contains(index))
            .collect();
        let specs: Vec<_> = taken
            .iter()
            .map(|index| {
                let definition = definition::parse(&texts[*index]);
                ProbeSpec {
                    mechanism,
                    ..definition.expect("parsed before").into()
                }
            })
            .collect();
        let registered = running.machine.register_batch(&specs, Refusals::Skip);
        let registered = registered.expect("some can be planted");
        for skipped in &registered.skipped {
            tally.refuse(&texts[taken[skipped.index]], &skipped.why.to_string());
        }
        assert!(running.machine.console_input(b"go\n") > 0);
        running.wait_for(&format!("called: {number}"));
        let ids = registered.ids();
        let probes = infos(&running.machine, &ids);
        running.machine.unregister(&ids).expect("a running guest");
        let wanted = ids.clone();
        let own = |event: &&Event| event.task.is_some_and(|task| task.pid == pid);
        let events = running.wait_events(|events| {
            let hit: BTreeSet<_> = events.iter().filter(own).map(|it| it.probe).collect();
            wanted.iter().all(|id| hit.contains(id))
        });
        let events: Vec<Event> = events.iter().filter(own).copied().collect();
        let symbols = running.machine.image().symbols();
        for ((entry, id), info) in registered.probes.iter().zip(&probes) {
            let index = taken[*entry];
            let event = events.iter().find(|event| event.probe == *id);
            let event = event.expect("every probe was hit");
            tally.compare(
                (index, &texts[index]),
                traced.get(&index),
                event,
                info,
                symbols,
            );
        }
    }
    let (ending, printed) = running.end();
    // Kernels complain when their own events read invalid addresses. The complaints come before `ready`, and again
    // with the log at the end.
    let (_, ours) = printed.split_once("ready: 0").expect("seen before");
    let ours = ours.split("hvprobe-guest: the kernel complains").next();
    assert_clean(&ending, ours.unwrap_or_default(), 0);
    tally.finish(texts.len(), refused.len());
}

/// Results of the comparison.
#[derive(Default)]
struct Tally {
    /// Values that detours read, by definition and argument.
    first: BTreeMap<(usize, usize), Option<Ours>>,
    /// Number of items of memory that were read without an exit.
    in_detours: usize,
    same: usize,
    faults: usize,
    by_design: BTreeMap<&'static str, usize>,
    refused: BTreeMap<String, usize>,
    untraced: usize,
    differ: String,
}

impl Tally {
    fn refuse(&mut self, text: &str, why: &str) {
        let known = [
            "an event carries at most",
            "are no value of an event",
            "items to capture",
            "memory cannot be followed from here",
            "This variable is not found at this probe point",
            "unknown symbol",
        ];
        let known = known.iter().find(|known| why.contains(**known));
        match known {
            Some(known) => *self.refused.entry((*known).to_owned()).or_default() += 1,
            None => writeln!(self.differ, "{text}\n  refused: {why}").expect("memory"),
        }
    }

    fn compare(
        &mut self,
        (number, text): (usize, &str),
        line: Option<&String>,
        event: &Event,
        info: &ProbeInfo,
        symbols: &Symbols,
    ) {
        let definition = definition::parse(text).expect("parsed before");
        let names: Vec<_> = definition
            .arguments
            .iter()
            .enumerate()
            .map(|(before, it)| it.shown_name(before))
            .collect();
        // Since 6.6, the kernel also shows an argument that is given by number under the argument's own name.
        let own: Vec<_> = info
            .shown
            .arguments
            .iter()
            .map(|it| it.name.clone())
            .collect();
        let values = line.and_then(|line| split(line, &names).or_else(|| split(line, &own)));
        let Some(values) = values else {
            self.untraced += 1;
            writeln!(self.differ, "{text}\n  kernel: {line:?}").expect("memory");
            return;
        };
        let differs =
            |index, printed| differs_by_design(&definition, index, printed, event.regs.rsp);
        for (index, printed) in values.into_iter().enumerate() {
            let argument = &info.shown.arguments[index];
            let ours = value(event, info, argument);
            // Only a hit that the host handled has a cost.
            let exits = event.cost_ns > 0;
            let is_memory = matches!(argument.source, Source::Item(_));
            self.in_detours += usize::from(is_memory && !exits);
            let here = (number, index);
            if let Some(before) = self.first.remove(&here)
                && before != ours
                && differs(index, printed).is_none()
            {
                let of = &definition.arguments[index].text;
                let both = format!("in a detour {before:x?}, by the host {ours:x?}");
                writeln!(self.differ, "{text}\n  {of}: {both}").expect("memory");
            }
            if is_same(printed, ours.as_ref(), argument, symbols) {
                self.same += 1;
                self.faults += usize::from(ours.is_none());
            } else if let Some(why) = differs(index, printed) {
                *self.by_design.entry(why).or_default() += 1;
            } else {
                let ours = ours.map(|it| it.bytes);
                let of = &definition.arguments[index].text;
                writeln!(
                    self.differ,
                    "{text}\n  {of}: kernel {printed}, ours {ours:x?} (exit: {exits})"
                )
                .expect("memory");
            }
            if !exits {
                self.first.insert(here, value(event, info, argument));
            }
        }
    }

    fn finish(&self, all: usize, refused: usize) {
        eprintln!(
            "{all} definitions, {refused} that the kernel refuses, each planted {} times; {} values are the \
             same, and {} could not be read; {} of memory were read without an exit",
            ROUNDS.len(),
            self.same - self.faults,
            self.faults,
            self.in_detours,
        );
        for (why, count) in &self.by_design {
            eprintln!("{count:5} differ: {why}");
        }
        for (why, count) in &self.refused {
            eprintln!("{count:5} refused by us: {why}");
        }
        assert!(self.differ.is_empty(), "{}", self.differ);
        assert!(self.same >= rounds(1000) && self.same - self.faults >= rounds(400));
        assert!(self.in_detours >= rounds(100));
    }
}
