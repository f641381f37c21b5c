//! Fetch arguments: conversion between the wire and the engine.

use crate::v1::{self, fetched_item};
use hvprobe_spec::{Base, Fetched, Memory, Pointer, Read};

use super::registers::{self, Meaningless, named, register};

/// Address spaces with their names on the wire.
const MEMORY: [(Memory, v1::MemoryOf); 3] = [
    (Memory::Kernel, v1::MemoryOf::Kernel),
    (Memory::User, v1::MemoryOf::User),
    (Memory::Either, v1::MemoryOf::Either),
];

pub(super) fn from_wire(wire: v1::FetchedItem) -> Result<Fetched, Meaningless> {
    let short = |number| {
        let what = "a capture's length";
        u16::try_from(number).map_err(|_| Meaningless::TooLarge { what, number })
    };
    Ok(Fetched {
        base: match wire.base {
            None => Base::Constant(0),
            Some(fetched_item::Base::Register(number)) => Base::Register(register(number)?),
            Some(fetched_item::Base::EntryRegister(number)) => Base::Entry(register(number)?),
            Some(fetched_item::Base::Constant(value)) => Base::Constant(value),
            Some(fetched_item::Base::Task(v1::CurrentTask {})) => Base::Task,
        },
        pointers: wire
            .pointers
            .into_iter()
            .map(pointer)
            .collect::<Result<_, _>>()?,
        read: match wire.read {
            None => return Err(Meaningless::Missing("what is to be read at the end")),
            Some(fetched_item::Read::Bytes(len)) => Read::Bytes(short(len)?),
            Some(fetched_item::Read::Text(most)) => Read::Text(short(most)?),
        },
    })
}

fn pointer(wire: v1::Pointer) -> Result<Pointer, Meaningless> {
    let memory = match v1::MemoryOf::try_from(wire.memory) {
        Ok(wire) => registers::from_wire(&MEMORY, &wire).unwrap_or(Memory::Kernel),
        Err(_) => {
            return Err(Meaningless::Unknown {
                what: "memory",
                number: wire.memory,
            });
        }
    };
    Ok(Pointer {
        offset: wire.offset,
        memory,
    })
}

pub(super) fn to_wire(fetched: &Fetched) -> v1::FetchedItem {
    let base = match fetched.base {
        Base::Register(gpr) => fetched_item::Base::Register(named(gpr).into()),
        Base::Entry(gpr) => fetched_item::Base::EntryRegister(named(gpr).into()),
        Base::Constant(value) => fetched_item::Base::Constant(value),
        Base::Task => fetched_item::Base::Task(v1::CurrentTask {}),
    };
    let pointer = |it: &Pointer| v1::Pointer {
        offset: it.offset,
        memory: registers::on_wire(&MEMORY, &it.memory).into(),
    };
    v1::FetchedItem {
        base: Some(base),
        pointers: fetched.pointers.iter().map(pointer).collect(),
        read: Some(match fetched.read {
            Read::Bytes(len) => fetched_item::Read::Bytes(len.into()),
            Read::Text(most) => fetched_item::Read::Text(most.into()),
        }),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use hvprobe_arch::regs::Gpr;
    use proptest::prelude::*;

    use super::*;

    pub(in super::super) fn any_fetched() -> impl Strategy<Value = Fetched> {
        let gpr = || (0..Gpr::ALL.len()).prop_map(|at| Gpr::ALL[at]);
        let base = prop_oneof![
            gpr().prop_map(Base::Register),
            gpr().prop_map(Base::Entry),
            any::<u64>().prop_map(Base::Constant),
            Just(Base::Task),
        ];
        let pointer = (any::<i64>(), 0..MEMORY.len()).prop_map(|(offset, row)| Pointer {
            offset,
            memory: MEMORY[row].0,
        });
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
        let refused = |wire| from_wire(wire).unwrap_err().to_string();
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
