//! What probes do, written as it is read.

use hvprobe_proto::v1::{self, Comparison, Register, actions, change, decision, item};

use crate::errno;

/// Comparisons with their signs; a sign that begins another one stands before it.
pub(super) const COMPARISONS: [(Comparison, &str); 7] = [
    (Comparison::Equal, "=="),
    (Comparison::NotEqual, "!="),
    (Comparison::Less, "<"),
    (Comparison::LessOrEqual, "<="),
    (Comparison::Greater, ">"),
    (Comparison::GreaterOrEqual, ">="),
    (Comparison::AnyBit, "&"),
];

/// `rax`, `r8`.
pub(super) fn long_name(register: Register) -> String {
    let name = register.as_str_name();
    name.strip_prefix("REGISTER_")
        .unwrap_or(name)
        .to_lowercase()
}

/// `%ax`, `%r8`.
fn register(number: i32) -> String {
    let register = Register::try_from(number).unwrap_or_default();
    let long = long_name(register);
    match long.strip_prefix('r') {
        Some(short) if !short.starts_with(|c: char| c.is_ascii_digit()) => format!("%{short}"),
        _ => format!("%{long}"),
    }
}

/// As it is easiest to recognise: `-12` for what may be an error, else hexadecimal.
fn value(value: u64) -> String {
    match errno::name(value) {
        Some(name) => format!("-{name}"),
        None => format!("{value:#x}"),
    }
}

/// What `item` reads and how much of it: `+16(%di):4`, `$stack3`.
pub(super) fn captured(item: &v1::Item) -> String {
    let name = item_name(item);
    match &item.what {
        Some(item::What::Memory(memory)) => format!("{name}:{}", memory.length),
        Some(item::What::Stack(_)) | None => name,
    }
}

/// What `item` reads: `+16(%di)`, `$stack3`.
pub(crate) fn item_name(item: &v1::Item) -> String {
    match &item.what {
        Some(item::What::Memory(memory)) => {
            format!("{:+}({})", memory.offset, register(memory.base))
        }
        Some(item::What::Stack(word)) => format!("$stack{word}"),
        None => "?".to_owned(),
    }
}

pub(super) fn changed(change: &v1::Change) -> String {
    match &change.what {
        Some(change::What::Register(set)) => {
            format!("{}={}", register(set.register), value(set.value))
        }
        Some(change::What::Memory(write)) => {
            let bytes = hex(&write.data);
            match write.base() {
                Register::Unspecified => {
                    format!("@{:#x}=hex:{bytes}", write.offset.cast_unsigned())
                }
                _ => format!("{:+}({})=hex:{bytes}", write.offset, register(write.base)),
            }
        }
        None => "?".to_owned(),
    }
}

pub(super) fn condition(condition: &v1::Condition) -> String {
    let wanted = condition.comparison();
    let sign = COMPARISONS.iter().find(|(known, _)| *known == wanted);
    format!(
        "{}{}{}",
        register(condition.register),
        sign.map_or("?", |(_, sign)| sign),
        value(condition.value)
    )
}

/// A decision: `proceed`, `return=-ENOMEM`, `%ax=0x1,jump=0x1000`.
pub(crate) fn decision(decision: &v1::Decision) -> String {
    let mut parts: Vec<_> = decision.changes.iter().map(changed).collect();
    match &decision.then {
        Some(decision::Then::ReturnValue(returned)) => {
            parts.push(format!("return={}", value(*returned)));
        }
        Some(decision::Then::Jump(at)) => parts.push(format!("jump={at:#x}")),
        None if parts.is_empty() => parts.push("proceed".to_owned()),
        None => {}
    }
    parts.join(",")
}

pub(super) fn ask(ask: &v1::Ask) -> String {
    let mut text = match ask.deadline_ms {
        ms if ms > 0 && ms % 1000 == 0 => format!("{}s", ms / 1000),
        ms => format!("{ms}ms"),
    };
    if let Some(fallback) = &ask.fallback {
        text.push(',');
        text.push_str(&decision(fallback));
    }
    text
}

/// What happens at a hit, as the options that ask for it: `capture=+16(%di):32`, `post`.
pub(crate) fn actions(actions: &v1::Actions) -> Vec<String> {
    let mut options = Vec::new();
    let mut add = |name: &str, text: String| options.push(format!("{name}={text}"));
    for when in &actions.when {
        add("when", condition(when));
    }
    if let Some(shown) = &actions.registers {
        for shown in &shown.registers {
            add("capture", register(*shown));
        }
    }
    for item in &actions.capture {
        add("capture", captured(item));
    }
    for item in &actions.capture_at_return {
        add("capture-return", captured(item));
    }
    for change in &actions.changes {
        add("set", changed(change));
    }
    match &actions.then {
        Some(actions::Then::ReturnValue(returned)) => add("return", value(*returned)),
        Some(actions::Then::Jump(at)) => add("jump", format!("{at:#x}")),
        None => {}
    }
    if let Some(actions::Hold::Ask(question)) = &actions.hold {
        add("ask", ask(question));
    }
    let flags = [
        (actions.post, "post"),
        (actions.faults, "faults"),
        (matches!(actions.hold, Some(actions::Hold::Stop(_))), "stop"),
    ];
    options.extend(
        flags
            .iter()
            .filter(|(on, _)| *on)
            .map(|(_, name)| (*name).to_owned()),
    );
    options
}

/// Two digits for each byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
