//! Printer for the actions and budgets of probes, in the form that can be parsed again.

use std::time::Duration;

use hvprobe_arch::regs::Gpr;

use crate::actions::{Actions, Change, Comparison, Condition, Decision, Hold, RegisterSet, Then};
use crate::budget::Budget;
use crate::errno;
use crate::item::{Base, Fetched, Item, Memory, Read};
use crate::registers::{REGISTERS, short_name};

/// Comparisons with their signs. A sign that is a prefix of another one comes before it.
pub(super) const COMPARISONS: [(Comparison, &str); 7] = [
    (Comparison::Equal, "=="),
    (Comparison::NotEqual, "!="),
    (Comparison::Less, "<"),
    (Comparison::LessOrEqual, "<="),
    (Comparison::Greater, ">"),
    (Comparison::GreaterOrEqual, ">="),
    (Comparison::AnyBit, "&"),
];

/// Formats a register: `%ax`, `%r8`.
#[must_use]
pub fn register(wanted: Gpr) -> String {
    format!("%{}", short_name(wanted))
}

/// Formats a value: `-ENOMEM` if it may be an error, else hexadecimal.
fn value(value: u64) -> String {
    match errno::name(value) {
        Some(name) => format!("-{name}"),
        None => format!("{value:#x}"),
    }
}

/// Returns the source of `item` and its length: `+16(%di):4`, `$stack3`.
#[must_use]
pub fn item(item: &Item) -> String {
    let name = item_name(item);
    match item {
        Item::Memory { len, .. } => format!("{name}:{len}"),
        Item::Stack(_) | Item::StackTrace(_) => name,
        Item::Fetched(fetched) => match fetched.read {
            Read::Bytes(len) => format!("{name}:{len}"),
            Read::Text(_) => format!("{name}:string"),
        },
    }
}

/// Returns the source of `item`: `+16(%di)`, `$stack3`.
#[must_use]
pub fn item_name(item: &Item) -> String {
    match item {
        Item::Memory { base, offset, .. } => format!("{offset:+}({})", register(*base)),
        Item::Stack(word) => format!("$stack{word}"),
        Item::StackTrace(_) => "stacktrace".to_owned(),
        Item::Fetched(fetched) => fetched_name(fetched),
    }
}

/// Formats a fetched item like a fetch argument: `+0(+8(%di))`.
fn fetched_name(fetched: &Fetched) -> String {
    let base = match fetched.base {
        Base::Register(gpr) | Base::Entry(gpr) => register(gpr),
        Base::Constant(value) => format!("\\{value:#x}"),
        Base::Task => "$current".to_owned(),
    };
    fetched.pointers.iter().fold(base, |inner, pointer| {
        let sign = if pointer.offset < 0 { '-' } else { '+' };
        let user = match pointer.memory {
            Memory::User => "u",
            Memory::Kernel | Memory::Either => "",
        };
        format!("{sign}{user}{}({inner})", pointer.offset.unsigned_abs())
    })
}

/// Formats a change: `%ax=0x10`, `+8(%di)=hex:05000000`.
#[must_use]
pub fn change(change: &Change) -> String {
    match change {
        Change::Register {
            register: set,
            value: to,
        } => format!("{}={}", register(*set), value(*to)),
        Change::Memory {
            base: Some(base),
            offset,
            bytes,
        } => format!("{offset:+}({})=hex:{}", register(*base), hex(bytes)),
        Change::Memory {
            base: None,
            offset,
            bytes,
        } => format!("@{:#x}=hex:{}", offset.cast_unsigned(), hex(bytes)),
    }
}

/// Formats a condition: `%di==0x10`.
#[must_use]
pub fn condition(condition: &Condition) -> String {
    let wanted = condition.comparison;
    let sign = COMPARISONS.iter().find(|(known, _)| *known == wanted);
    format!(
        "{}{}{}",
        register(condition.register),
        sign.map_or("?", |(_, sign)| sign),
        value(condition.value)
    )
}

/// Formats a decision: `proceed`, `return=-ENOMEM`, `%ax=0x1,jump=0x1000`.
#[must_use]
pub fn decision(decision: &Decision) -> String {
    let mut parts: Vec<_> = decision.changes.iter().map(change).collect();
    match decision.then {
        Then::Return(returned) => parts.push(format!("return={}", value(returned))),
        Then::Jump(at) => parts.push(format!("jump={:#x}", at.0)),
        Then::Proceed if parts.is_empty() => parts.push("proceed".to_owned()),
        Then::Proceed => {}
    }
    parts.join(",")
}

/// Formats a deadline and the default decision: `5s,return=-EIO`.
#[must_use]
pub fn ask(deadline: Duration, default: &Decision) -> String {
    let time = match deadline.as_millis() {
        ms if ms > 0 && ms % 1000 == 0 => format!("{}s", ms / 1000),
        ms => format!("{ms}ms"),
    };
    format!("{time},{}", decision(default))
}

/// Formats actions as the options that request them: `capture=+16(%di):32`, `post`.
#[must_use]
pub fn actions(actions: &Actions) -> Vec<String> {
    let mut options = Vec::new();
    let mut add = |name: &str, text: String| options.push(format!("{name}={text}"));
    for when in &actions.when {
        add("when", condition(when));
    }
    if actions.registers != RegisterSet::default() {
        for (shown, _) in REGISTERS {
            if actions.registers.contains(shown) {
                add("capture", register(shown));
            }
        }
    }
    for captured in &actions.capture {
        add("capture", item(captured));
    }
    for captured in &actions.capture_at_return {
        add("capture-return", item(captured));
    }
    for changed in &actions.changes {
        add("set", change(changed));
    }
    match actions.then {
        Then::Return(returned) => add("return", value(returned)),
        Then::Jump(at) => add("jump", format!("{:#x}", at.0)),
        Then::Proceed => {}
    }
    if let Some(Hold::Ask { deadline, default }) = &actions.hold {
        add("ask", ask(*deadline, default));
    }
    let flags = [
        (actions.post, "post"),
        (actions.faults, "faults"),
        (actions.hold == Some(Hold::Stop), "stop"),
        (actions.wait_for_room, "wait-for-room"),
    ];
    options.extend(
        flags
            .iter()
            .filter(|(on, _)| *on)
            .map(|(_, name)| (*name).to_owned()),
    );
    options
}

/// Formats a budget as the options that request it: `max-rate=100/s`, `throttle=sample`.
#[must_use]
pub fn budget(budget: &Budget) -> Vec<String> {
    let mut options = Vec::new();
    if let Some(rate) = budget.max_rate {
        options.push(format!("max-rate={rate}/s"));
    }
    if let Some(share) = budget.max_share {
        options.push(format!("max-cpu={share}%"));
    }
    options.push(format!("throttle={}", budget.excess.name()));
    options
}

/// Formats bytes as two hexadecimal digits each.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
