//! Actions of a probe at its hits: conversion between the wire and the engine.
//!
//! Invariants: actions of the engine survive a round trip over the wire; a required field that is missing, or a
//! number that means nothing, is refused by name. Limits are the engine's own
//! ([`ProbeSpec::check`](hvprobe_spec::ProbeSpec::check)).

use std::time::Duration;

use super::enums::WireEnum as _;
use super::fetched;
use super::meaningless::Meaningless;
use super::registers::{self, register};
use crate::v1;
use hvprobe_arch::Gva;
use hvprobe_arch::regs::Gpr;
use hvprobe_spec::{
    Actions, Change, Comparison, Condition, Decision, Hold, Item, RegisterSet, Then,
};

/// Converts the actions of a probe.
///
/// # Errors
/// When a field means nothing to the engine.
pub fn actions(wire: v1::Actions) -> Result<Actions, Meaningless> {
    use v1::actions::{Hold as WireHold, Then as WireThen};
    Ok(Actions {
        when: all(wire.when, condition)?,
        registers: match wire.registers {
            None => RegisterSet::default(),
            Some(set) => all(set.registers, register)?.into_iter().collect(),
        },
        // The filter is a part of the definition.
        filter: None,
        capture: all(wire.capture, item)?,
        capture_at_return: all(wire.capture_at_return, item)?,
        changes: all(wire.changes, change)?,
        then: match wire.then {
            None => Then::Proceed,
            Some(WireThen::ReturnValue(value)) => Then::Return(value),
            Some(WireThen::Jump(at)) => Then::Jump(Gva(at)),
        },
        post: wire.post,
        faults: wire.faults,
        hold: match wire.hold {
            None => None,
            Some(WireHold::Stop(v1::StopMachine {})) => Some(Hold::Stop),
            Some(WireHold::Ask(ask)) => Some(Hold::Ask {
                deadline: Duration::from_millis(ask.deadline_ms.into()),
                default: decision(ask.fallback.unwrap_or_default())?,
            }),
        },
        wait_for_room: wire.wait_for_room,
    })
}

/// Converts the decision of a client.
///
/// # Errors
/// When a field means nothing to the engine.
pub fn decision(wire: v1::Decision) -> Result<Decision, Meaningless> {
    Ok(Decision {
        changes: all(wire.changes, change)?,
        then: match wire.then {
            None => Then::Proceed,
            Some(v1::decision::Then::ReturnValue(value)) => Then::Return(value),
            Some(v1::decision::Then::Jump(at)) => Then::Jump(Gva(at)),
        },
    })
}

fn all<W, T>(
    wire: Vec<W>,
    convert: impl Fn(W) -> Result<T, Meaningless>,
) -> Result<Vec<T>, Meaningless> {
    wire.into_iter().map(convert).collect()
}

fn condition(wire: v1::Condition) -> Result<Condition, Meaningless> {
    let comparison = Comparison::of(wire.comparison());
    Ok(Condition {
        register: register(wire.register)?,
        comparison: comparison.ok_or(Meaningless::Missing("the comparison of a condition"))?,
        value: wire.value,
    })
}

/// Converts an item to read at a hit.
///
/// # Errors
/// When a field means nothing to the engine.
pub fn item(wire: v1::Item) -> Result<Item, Meaningless> {
    let short =
        |what, number| u16::try_from(number).map_err(|_| Meaningless::TooLarge { what, number });
    match wire.what {
        None => Err(Meaningless::Missing("what is to be captured")),
        Some(v1::item::What::Memory(memory)) => Ok(Item::Memory {
            base: register(memory.base)?,
            offset: memory.offset,
            len: short("a capture's length", memory.length)?,
        }),
        Some(v1::item::What::Stack(word)) => Ok(Item::Stack(short("a stack word", word)?)),
        Some(v1::item::What::Fetched(fetched)) => {
            Ok(Item::Fetched(Box::new(fetched::from_wire(fetched)?)))
        }
        Some(v1::item::What::StackTrace(frames)) => {
            let what = "the number of a stack's addresses";
            let frames = u8::try_from(frames).map_err(|_| Meaningless::TooLarge {
                what,
                number: frames,
            })?;
            Ok(Item::StackTrace(frames))
        }
    }
}

fn change(wire: v1::Change) -> Result<Change, Meaningless> {
    match wire.what {
        None => Err(Meaningless::Missing("what is to be changed")),
        Some(v1::change::What::Register(set)) => Ok(Change::Register {
            register: register(set.register)?,
            value: set.value,
        }),
        Some(v1::change::What::Memory(write)) => Ok(Change::Memory {
            base: Gpr::numbered(write.base)?,
            offset: write.offset,
            bytes: write.data.into(),
        }),
    }
}

/// Converts the actions of a probe to the wire.
#[must_use]
pub fn to_wire(actions: &Actions) -> v1::Actions {
    use v1::actions::{Hold as WireHold, Then as WireThen};
    v1::Actions {
        when: actions.when.iter().map(wire_condition).collect(),
        registers: registers::set_to_wire(actions.registers),
        capture: actions.capture.iter().map(wire_item).collect(),
        capture_at_return: actions.capture_at_return.iter().map(wire_item).collect(),
        changes: actions.changes.iter().map(wire_change).collect(),
        then: match actions.then {
            Then::Proceed => None,
            Then::Return(value) => Some(WireThen::ReturnValue(value)),
            Then::Jump(at) => Some(WireThen::Jump(at.0)),
        },
        post: actions.post,
        faults: actions.faults,
        hold: match &actions.hold {
            None => None,
            Some(Hold::Stop) => Some(WireHold::Stop(v1::StopMachine {})),
            Some(Hold::Ask { deadline, default }) => Some(WireHold::Ask(v1::Ask {
                deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
                fallback: Some(decision_to_wire(default)),
            })),
        },
        wait_for_room: actions.wait_for_room,
    }
}

/// Converts a decision to the wire.
#[must_use]
pub fn decision_to_wire(decision: &Decision) -> v1::Decision {
    v1::Decision {
        changes: decision.changes.iter().map(wire_change).collect(),
        then: match decision.then {
            Then::Proceed => None,
            Then::Return(value) => Some(v1::decision::Then::ReturnValue(value)),
            Then::Jump(at) => Some(v1::decision::Then::Jump(at.0)),
        },
    }
}

fn wire_condition(condition: &Condition) -> v1::Condition {
    v1::Condition {
        register: condition.register.number(),
        comparison: condition.comparison.number(),
        value: condition.value,
    }
}

fn wire_item(item: &Item) -> v1::Item {
    v1::Item {
        what: Some(match item {
            Item::Memory { base, offset, len } => v1::item::What::Memory(v1::MemoryItem {
                base: base.number(),
                offset: *offset,
                length: (*len).into(),
            }),
            Item::Stack(word) => v1::item::What::Stack((*word).into()),
            Item::Fetched(fetched) => v1::item::What::Fetched(fetched::to_wire(fetched)),
            Item::StackTrace(frames) => v1::item::What::StackTrace((*frames).into()),
        }),
    }
}

fn wire_change(change: &Change) -> v1::Change {
    v1::Change {
        what: Some(match change {
            Change::Register { register, value } => v1::change::What::Register(v1::SetRegister {
                register: register.number(),
                value: *value,
            }),
            Change::Memory {
                base,
                offset,
                bytes,
            } => v1::change::What::Memory(v1::WriteMemory {
                base: base.map_or(0, Gpr::number),
                offset: *offset,
                data: bytes.to_vec(),
            }),
        }),
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_spec::Mechanism;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::wire::enums::WireEnum;

    fn any_gpr() -> impl Strategy<Value = Gpr> {
        select(Gpr::VALUES)
    }

    fn any_change() -> impl Strategy<Value = Change> {
        prop_oneof![
            (any_gpr(), any::<u64>())
                .prop_map(|(register, value)| Change::Register { register, value }),
            (
                proptest::option::of(any_gpr()),
                any::<i64>(),
                proptest::collection::vec(any::<u8>(), 0..9)
            )
                .prop_map(|(base, offset, bytes)| Change::Memory {
                    base,
                    offset,
                    bytes: bytes.into(),
                }),
        ]
    }

    fn any_then() -> impl Strategy<Value = Then> {
        prop_oneof![
            Just(Then::Proceed),
            any::<u64>().prop_map(Then::Return),
            any::<u64>().prop_map(|at| Then::Jump(Gva(at))),
        ]
    }

    fn any_item() -> impl Strategy<Value = Item> {
        prop_oneof![
            (any_gpr(), any::<i64>(), any::<u16>()).prop_map(|(base, offset, len)| Item::Memory {
                base,
                offset,
                len
            }),
            any::<u16>().prop_map(Item::Stack),
            any::<u8>().prop_map(Item::StackTrace),
            fetched::tests::any_fetched().prop_map(|it| Item::Fetched(Box::new(it))),
        ]
    }

    fn any_hold() -> impl Strategy<Value = Hold> {
        let changes = proptest::collection::vec(any_change(), 0..3);
        prop_oneof![
            Just(Hold::Stop),
            (any::<u32>(), changes, any_then()).prop_map(|(ms, changes, then)| Hold::Ask {
                deadline: Duration::from_millis(ms.into()),
                default: Decision { changes, then },
            }),
        ]
    }

    fn any_actions() -> impl Strategy<Value = Actions> {
        let comparison = select(Comparison::VALUES);
        let condition = (any_gpr(), comparison, any::<u64>());
        let condition = condition.prop_map(|(register, comparison, value)| Condition {
            register,
            comparison,
            value,
        });
        let items = || proptest::collection::vec(any_item(), 0..4);
        (
            proptest::collection::vec(condition, 0..3),
            proptest::option::of(proptest::collection::vec(any_gpr(), 0..16)),
            items(),
            items(),
            proptest::collection::vec(any_change(), 0..4),
            any_then(),
            any::<[bool; 3]>(),
            proptest::option::of(any_hold()),
        )
            .prop_map(
                |(when, registers, capture, at_return, changes, then, flags, hold)| Actions {
                    when,
                    filter: None,
                    registers: registers
                        .map_or_else(RegisterSet::default, |set| set.into_iter().collect()),
                    capture,
                    capture_at_return: at_return,
                    changes,
                    then,
                    post: flags[0],
                    faults: flags[1],
                    hold,
                    wait_for_room: flags[2],
                },
            )
    }

    proptest! {
        #[test]
        fn actions_come_back_as_they_went_out(out in any_actions()) {
            prop_assert_eq!(actions(to_wire(&out)), Ok(out));
        }
    }

    #[test]
    fn messages_that_mean_nothing_are_refused_by_name() {
        let refused = |wire: v1::Actions| actions(wire).unwrap_err().to_string();
        let of_change = |what| v1::Actions {
            changes: vec![v1::Change { what }],
            ..Default::default()
        };
        let of_item = |what| v1::Actions {
            capture: vec![v1::Item { what }],
            ..Default::default()
        };
        assert_eq!(refused(of_change(None)), "what is to be changed is missing");
        assert_eq!(refused(of_item(None)), "what is to be captured is missing");
        let memory = v1::MemoryItem {
            base: 99,
            offset: 0,
            length: 1 << 16,
        };
        let of_memory = |memory| refused(of_item(Some(v1::item::What::Memory(memory))));
        assert_eq!(of_memory(memory), "99 is no register");
        let base = v1::Register::Unspecified.into();
        assert_eq!(
            of_memory(v1::MemoryItem { base, ..memory }),
            "a register is missing"
        );
        let base = v1::Register::Rdi.into();
        assert_eq!(
            of_memory(v1::MemoryItem { base, ..memory }),
            "a capture's length of 65536 is too large"
        );
        assert_eq!(
            refused(of_item(Some(v1::item::What::Stack(70_000)))),
            "a stack word of 70000 is too large"
        );
        let when = v1::Condition {
            register: base,
            comparison: 42,
            value: 0,
        };
        assert_eq!(
            refused(v1::Actions {
                when: vec![when],
                ..Default::default()
            }),
            "the comparison of a condition is missing"
        );
        let unknown = Mechanism::numbered(17).unwrap_err();
        assert_eq!(unknown.to_string(), "17 is no mechanism");
    }
}
