//! Fetch arguments.

use hvprobe_spec::{Base, Fetched, Memory, Pointer, Read};

use super::enums::WireEnum as _;
use super::meaningless::Meaningless;
use super::registers::register;
use super::value::{Wire, small};
use crate::v1::{self, fetched_item};

impl Wire for Fetched {
    type Message = v1::FetchedItem;

    fn to_wire(&self) -> v1::FetchedItem {
        v1::FetchedItem {
            base: Some(match self.base {
                Base::Register(register) => fetched_item::Base::Register(register.number()),
                Base::Entry(register) => fetched_item::Base::EntryRegister(register.number()),
                Base::Constant(value) => fetched_item::Base::Constant(value),
                Base::Task => fetched_item::Base::Task(v1::CurrentTask {}),
            }),
            pointers: self.pointers.to_wire(),
            read: Some(match self.read {
                Read::Bytes(len) => fetched_item::Read::Bytes(len.into()),
                Read::Text(most) => fetched_item::Read::Text(most.into()),
            }),
        }
    }

    fn from_wire(wire: v1::FetchedItem) -> Result<Self, Meaningless> {
        let what = "a capture's length";
        Ok(Self {
            base: match wire.base {
                None => Base::Constant(0),
                Some(fetched_item::Base::Register(number)) => Base::Register(register(number)?),
                Some(fetched_item::Base::EntryRegister(number)) => Base::Entry(register(number)?),
                Some(fetched_item::Base::Constant(value)) => Base::Constant(value),
                Some(fetched_item::Base::Task(v1::CurrentTask {})) => Base::Task,
            },
            pointers: Wire::from_wire(wire.pointers)?,
            read: match wire.read {
                None => return Err(Meaningless::Missing("what is to be read at the end")),
                Some(fetched_item::Read::Bytes(len)) => Read::Bytes(small(what, len)?),
                Some(fetched_item::Read::Text(most)) => Read::Text(small(what, most)?),
            },
        })
    }
}

impl Wire for Pointer {
    type Message = v1::Pointer;

    fn to_wire(&self) -> v1::Pointer {
        v1::Pointer {
            offset: self.offset,
            memory: self.memory.number(),
        }
    }

    fn from_wire(wire: v1::Pointer) -> Result<Self, Meaningless> {
        Ok(Self {
            offset: wire.offset,
            memory: Memory::numbered(wire.memory)?.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use hvprobe_arch::regs::Gpr;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::wire::enums::WireEnum;

    pub(in super::super) fn any_fetched() -> impl Strategy<Value = Fetched> {
        let gpr = || select(Gpr::VALUES);
        let base = prop_oneof![
            gpr().prop_map(Base::Register),
            gpr().prop_map(Base::Entry),
            any::<u64>().prop_map(Base::Constant),
            Just(Base::Task),
        ];
        let memory = select(Memory::VALUES);
        let pointer =
            (any::<i64>(), memory).prop_map(|(offset, memory)| Pointer { offset, memory });
        let read = prop_oneof![
            any::<u16>().prop_map(Read::Bytes),
            any::<u16>().prop_map(Read::Text)
        ];
        (base, proptest::collection::vec(pointer, 0..4), read).prop_map(|(base, pointers, read)| {
            Fetched {
                base,
                pointers,
                read,
            }
        })
    }

    #[test]
    fn what_means_nothing_is_refused_by_name() {
        let refused = |wire| Fetched::from_wire(wire).unwrap_err().to_string();
        let nothing = v1::FetchedItem::default();
        assert_eq!(
            refused(nothing.clone()),
            "what is to be read at the end is missing"
        );
        let read = Some(fetched_item::Read::Bytes(8));
        let base = Some(fetched_item::Base::Register(99));
        let wire = v1::FetchedItem {
            base,
            read,
            ..nothing.clone()
        };
        assert_eq!(refused(wire), "99 is no register");
        let pointers = vec![v1::Pointer {
            offset: 0,
            memory: 7,
        }];
        let wire = v1::FetchedItem {
            pointers,
            read,
            ..nothing.clone()
        };
        assert_eq!(refused(wire), "7 is no memory");
        let read = Some(fetched_item::Read::Text(1 << 16));
        assert_eq!(
            refused(v1::FetchedItem { read, ..nothing }),
            "a capture's length of 65536 is too large"
        );
    }
}
