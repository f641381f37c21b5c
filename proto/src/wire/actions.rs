//! Wire format of a probe's actions, and of decisions on held hits.
//!
//! Invariant: conversions refuse missing required fields and meaningless numbers, with an error that names the
//! field. Limits are checked elsewhere ([`ProbeSpec::check`](hvprobe_spec::ProbeSpec::check)).

use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_arch::regs::Gpr;
use hvprobe_spec::{
    Actions, Change, Comparison, Condition, Decision, Fetched, Hold, Item, RegisterSet, Then,
};

use super::enums::WireEnum as _;
use super::meaningless::Meaningless;
use super::registers::register;
use super::value::{Wire, small};
use crate::v1::{self, actions, change, decision, item};

impl Wire for Actions {
    type Message = v1::Actions;

    fn to_wire(&self) -> v1::Actions {
        v1::Actions {
            when: self.when.to_wire(),
            registers: self.registers.to_wire(),
            capture: self.capture.to_wire(),
            capture_at_return: self.capture_at_return.to_wire(),
            changes: self.changes.to_wire(),
            then: match self.then {
                Then::Proceed => None,
                Then::Return(value) => Some(actions::Then::ReturnValue(value)),
                Then::Jump(at) => Some(actions::Then::Jump(at.0)),
            },
            post: self.post,
            faults: self.faults,
            hold: self.hold.as_ref().map(|hold| match hold {
                Hold::Stop => actions::Hold::Stop(v1::StopMachine {}),
                Hold::Ask { deadline, default } => actions::Hold::Ask(v1::Ask {
                    deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
                    fallback: Some(default.to_wire()),
                }),
            }),
            wait_for_room: self.wait_for_room,
        }
    }

    fn from_wire(wire: v1::Actions) -> Result<Self, Meaningless> {
        Ok(Self {
            when: Wire::from_wire(wire.when)?,
            // The filter is a part of the definition.
            filter: None,
            registers: Wire::from_wire(wire.registers)?,
            capture: Wire::from_wire(wire.capture)?,
            capture_at_return: Wire::from_wire(wire.capture_at_return)?,
            changes: Wire::from_wire(wire.changes)?,
            then: match wire.then {
                None => Then::Proceed,
                Some(actions::Then::ReturnValue(value)) => Then::Return(value),
                Some(actions::Then::Jump(at)) => Then::Jump(Gva(at)),
            },
            post: wire.post,
            faults: wire.faults,
            hold: match wire.hold {
                None => None,
                Some(actions::Hold::Stop(v1::StopMachine {})) => Some(Hold::Stop),
                Some(actions::Hold::Ask(ask)) => Some(Hold::Ask {
                    deadline: Duration::from_millis(ask.deadline_ms.into()),
                    default: Wire::from_wire(ask.fallback.unwrap_or_default())?,
                }),
            },
            wait_for_room: wire.wait_for_room,
        })
    }
}

impl Wire for Decision {
    type Message = v1::Decision;

    fn to_wire(&self) -> v1::Decision {
        v1::Decision {
            changes: self.changes.to_wire(),
            then: match self.then {
                Then::Proceed => None,
                Then::Return(value) => Some(decision::Then::ReturnValue(value)),
                Then::Jump(at) => Some(decision::Then::Jump(at.0)),
            },
        }
    }

    fn from_wire(wire: v1::Decision) -> Result<Self, Meaningless> {
        Ok(Self {
            changes: Wire::from_wire(wire.changes)?,
            then: match wire.then {
                None => Then::Proceed,
                Some(decision::Then::ReturnValue(value)) => Then::Return(value),
                Some(decision::Then::Jump(at)) => Then::Jump(Gva(at)),
            },
        })
    }
}

impl Wire for RegisterSet {
    /// `None` for all registers.
    type Message = Option<v1::RegisterSet>;

    fn to_wire(&self) -> Self::Message {
        let shown = Gpr::VALUES.iter().copied();
        let shown = shown.filter(|register| self.contains(*register));
        (*self != Self::default()).then(|| v1::RegisterSet {
            registers: shown.map(Gpr::number).collect(),
        })
    }

    fn from_wire(wire: Self::Message) -> Result<Self, Meaningless> {
        match wire {
            None => Ok(Self::default()),
            Some(set) => set.registers.into_iter().map(register).collect(),
        }
    }
}

impl Wire for Condition {
    type Message = v1::Condition;

    fn to_wire(&self) -> v1::Condition {
        v1::Condition {
            register: self.register.number(),
            comparison: self.comparison.number(),
            value: self.value,
        }
    }

    fn from_wire(wire: v1::Condition) -> Result<Self, Meaningless> {
        let comparison = Comparison::of(wire.comparison());
        Ok(Self {
            register: register(wire.register)?,
            comparison: comparison.ok_or(Meaningless::Missing("the comparison of a condition"))?,
            value: wire.value,
        })
    }
}

impl Wire for Item {
    type Message = v1::Item;

    fn to_wire(&self) -> v1::Item {
        v1::Item {
            what: Some(match self {
                Self::Memory { base, offset, len } => item::What::Memory(v1::MemoryItem {
                    base: base.number(),
                    offset: *offset,
                    length: (*len).into(),
                }),
                Self::Stack(word) => item::What::Stack((*word).into()),
                Self::Fetched(fetched) => item::What::Fetched(fetched.to_wire()),
                Self::StackTrace(frames) => item::What::StackTrace((*frames).into()),
            }),
        }
    }

    fn from_wire(wire: v1::Item) -> Result<Self, Meaningless> {
        Ok(match wire.what {
            None => return Err(Meaningless::Missing("what is to be captured")),
            Some(item::What::Memory(memory)) => Self::Memory {
                base: register(memory.base)?,
                offset: memory.offset,
                len: small("a capture's length", memory.length)?,
            },
            Some(item::What::Stack(word)) => Self::Stack(small("a stack word", word)?),
            Some(item::What::Fetched(wire)) => Self::Fetched(Fetched::from_wire(wire)?.into()),
            Some(item::What::StackTrace(frames)) => {
                Self::StackTrace(small("the number of a stack's addresses", frames)?)
            }
        })
    }
}

impl Wire for Change {
    type Message = v1::Change;

    fn to_wire(&self) -> v1::Change {
        v1::Change {
            what: Some(match self {
                Self::Register { register, value } => change::What::Register(v1::SetRegister {
                    register: register.number(),
                    value: *value,
                }),
                Self::Memory {
                    base,
                    offset,
                    bytes,
                } => change::What::Memory(v1::WriteMemory {
                    base: base.map_or(0, Gpr::number),
                    offset: *offset,
                    data: bytes.to_vec(),
                }),
            }),
        }
    }

    fn from_wire(wire: v1::Change) -> Result<Self, Meaningless> {
        Ok(match wire.what {
            None => return Err(Meaningless::Missing("what is to be changed")),
            Some(change::What::Register(set)) => Self::Register {
                register: register(set.register)?,
                value: set.value,
            },
            Some(change::What::Memory(write)) => Self::Memory {
                base: Gpr::numbered(write.base)?,
                offset: write.offset,
                bytes: write.data.into(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_spec::Mechanism;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::wire::enums::WireEnum;
    use crate::wire::fetched::tests::any_fetched;

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
            any_fetched().prop_map(|it| Item::Fetched(Box::new(it))),
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
        fn decisions_come_back_as_they_went_out(
            changes in proptest::collection::vec(any_change(), 0..4),
            then in any_then(),
        ) {
            let out = Decision { changes, then };
            prop_assert_eq!(Decision::from_wire(out.to_wire()), Ok(out));
        }

        #[test]
        fn actions_come_back_as_they_went_out(out in any_actions()) {
            prop_assert_eq!(Actions::from_wire(out.to_wire()), Ok(out));
        }
    }

    #[test]
    fn messages_that_mean_nothing_are_refused_by_name() {
        let refused = |wire: v1::Actions| Actions::from_wire(wire).unwrap_err().to_string();
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
