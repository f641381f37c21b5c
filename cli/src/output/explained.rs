//! Explanations of definitions, as text and as JSON.

use hvprobe_sources::Explained;
use hvprobe_spec::definition;
use hvprobe_spec::language::text as language;
use hvprobe_spec::{Argument, Common, Item, Mechanism, Read, Source};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::json::{Shown, object};

/// Returns the explanation of one probe, with one line per fact.
pub(crate) fn text(explained: &Explained) -> String {
    let Explained {
        at,
        symbol: (symbol, offset),
        ..
    } = explained;
    let mut lines = vec![
        ("event", explained.event.clone()),
        ("at", format!("{symbol}+{offset:#x} {at}")),
        ("instruction", explained.instruction.clone()),
        ("hits", hits(explained)),
    ];
    let provided = explained.provided.iter();
    lines.extend(provided.map(|what| ("provided", format!("that {what}"))));
    if explained.ftrace {
        let what = "while the guest's ftrace traces this function, which is then [GONE]";
        lines.push(("never", what.to_owned()));
    }
    for argument in &explained.shown.arguments {
        let Argument { name, shape, .. } = argument;
        let place = place(explained, argument);
        lines.push(("argument", format!("{name}: {}, {place}", shape.name)));
    }
    if explained.shown.arguments.is_empty() {
        let registers = explained.shown.registers.iter().map(language::register);
        let registers: Vec<_> = registers.collect();
        lines.push(("registers", registers.join(" ")));
    }
    if let Some((filter, when)) = filter(explained) {
        lines.push(("filter", format!("{filter}, {when}")));
    }
    let mut text = explained.definition.clone();
    let mut last = "";
    for (label, line) in lines {
        let shown = if label == last { "" } else { label };
        text.push_str(&format!("\n  {shown:<12} {line}"));
        last = label;
    }
    text
}

/// Returns the mechanism, the number of exits per hit, and the reason for them.
fn hits(explained: &Explained) -> String {
    let with_exits = explained.with_exits;
    let exits = exits(with_exits);
    match &explained.exit {
        None => format!("optimized, no exit; if not, {with_exits}, {exits}"),
        Some(why) => format!("{with_exits}, {exits}: {why}"),
    }
}

fn exits(mechanism: Mechanism) -> &'static str {
    match mechanism {
        Mechanism::Optimized => "no exit",
        Mechanism::Emulated | Mechanism::Boosted => "one exit",
        Mechanism::Stepped => "two exits",
    }
}

/// Returns the place from which `argument` is read.
fn place(explained: &Explained, argument: &Argument) -> String {
    let mut place = match &argument.source {
        Source::Registers { registers, entry } => {
            let registers: Vec<_> = registers.iter().copied().map(language::register).collect();
            let when = if *entry { " at the entry" } else { "" };
            format!("{}{when}", registers.join(":"))
        }
        Source::Item(index) => {
            let actions = &explained.actions;
            let at_entry = actions.capture.len();
            let mut all = actions.capture.iter().chain(&actions.capture_at_return);
            let when = match (*index < at_entry, actions.capture_at_return.is_empty()) {
                (false, _) => " at the return",
                (true, false) => " at the entry",
                (true, true) => "",
            };
            all.nth(*index)
                .map_or_else(String::new, |item| format!("{}{when}", item_text(item)))
        }
        Source::Constant(_) => "always the same".to_owned(),
        Source::Common(Common::Comm) => "$comm".to_owned(),
        Source::Common(Common::Ip) => "%ip".to_owned(),
        Source::Common(Common::Flags) => "%flags".to_owned(),
        Source::Common(Common::Retval) => "$retval".to_owned(),
    };
    if let Some(bits) = argument.bits {
        place.push_str(&format!(", {} bits from {}", bits.width, bits.offset));
    }
    place
}

/// Returns the source of an item and its length.
fn item_text(item: &Item) -> String {
    let name = language::item_name(item);
    match item {
        Item::Fetched(fetched) if matches!(fetched.read, Read::Text(_)) => {
            format!("{name}, up to {} bytes", item.text().unwrap_or_default())
        }
        Item::StackTrace(most) => format!("{name}, up to {most} addresses"),
        _ => format!("{name}, {} bytes", item.len()),
    }
}

/// Returns the filter, and when it is evaluated.
fn filter(explained: &Explained) -> Option<(String, &'static str)> {
    let filter = definition::parse(&explained.definition).ok()?.filter?;
    let when = match (&explained.actions.filter, &explained.exit) {
        (None, _) => "before anything is recorded",
        (Some(_), None) => "of what is recorded",
        (Some(_), Some(_)) => "at the exit",
    };
    Some((filter.to_string(), when))
}

impl Serialize for Shown<&Explained> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let explained = self.0;
        let arguments = explained.shown.arguments.iter();
        let registers = explained.shown.registers.iter();
        let filter = filter(explained);
        let mechanism = match &explained.exit {
            None => Mechanism::Optimized,
            Some(_) => explained.with_exits,
        };
        object!(serializer, {
            "definition": explained.definition,
            "event": explained.event,
            "address": explained.at.to_string(),
            "symbol": explained.symbol.0,
            "offset": explained.symbol.1,
            "bytes": language::hex(&explained.code),
            "instruction": explained.instruction,
            "mechanism": mechanism.name(),
            "exit": explained.exit,
            "provided": explained.provided,
            "with_exits": explained.with_exits.name(),
            "ftrace": explained.ftrace,
            "arguments": arguments.map(|each| Shown((explained, each))).collect::<Vec<_>>(),
            "registers": registers.map(language::register).collect::<Vec<_>>(),
            "filter": filter.as_ref().map(|(filter, _)| filter),
            "filter_when": filter.as_ref().map(|(_, when)| when),
        })
    }
}

impl Serialize for Shown<(&Explained, &Argument)> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self((explained, argument)) = self;
        object!(serializer, {
            "name": argument.name,
            "type": argument.shape.name,
            "size": argument.shape.size,
            "place": place(explained, argument),
        })
    }
}

#[cfg(test)]
mod tests;
