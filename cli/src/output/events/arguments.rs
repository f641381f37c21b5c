//! Values of a probe's hits and returns, and where an event contains them.
//!
//! Invariant: no name from a server or a guest contains control characters for a terminal.

use std::sync::Arc;

use hvprobe_proto::v1::{self, EventKind};
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::shape::{Shape, ShapeKind};
use hvprobe_spec::{Argument, Common, Source};

use super::captured::{Captures, Data, ItemData};
use super::hits::is_hit;
use super::registers;
use crate::output::printable::harmless;
use crate::output::values::{Value, decode};

/// Description of the values of a probe's hits. Clones share it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Arguments(Arc<Schema>);

#[derive(Debug, Default, PartialEq)]
struct Schema {
    /// Names and arguments. An argument is `None` if this program does not understand it.
    arguments: Vec<(String, Option<Argument>)>,
    call: bool,
    /// Whether some values are addresses that may have names.
    has_symbols: bool,
}

/// Values of one hit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HitValues<'a> {
    /// Values with their names.
    Values(Vec<(&'a str, Value<'a>)>),
    /// All arguments of a function and, at its return, its result.
    Call {
        /// The arguments.
        arguments: Vec<(&'a str, Value<'a>)>,
        /// The result, with its name, if this is a return and the function has a result.
        result: Option<(&'a str, Value<'a>)>,
    },
}

impl Arguments {
    /// Returns the description for `probe`.
    pub(crate) fn of(probe: &v1::Probe) -> Self {
        let arguments = probe.arguments.iter().map(|wire| {
            let mut argument = Argument::from_wire(wire.clone()).ok();
            if let Some(argument) = &mut argument {
                make_harmless(&mut argument.shape);
            }
            (harmless(wire.name.as_bytes()), argument)
        });
        let arguments: Vec<_> = arguments.collect();
        let mut known = arguments.iter().filter_map(|(_, known)| known.as_ref());
        let has_symbols = known.any(|argument| has_symbols(&argument.shape));
        Self(Arc::new(Schema {
            arguments,
            call: probe.call,
            has_symbols,
        }))
    }

    /// Calls `visit` with each address that may have a name in `event`, which is an event of this probe.
    pub(crate) fn symbols(
        &self,
        event: &v1::Event,
        captures: &Captures,
        visit: &mut impl FnMut(u64),
    ) {
        if !self.0.has_symbols {
            return;
        }
        let values = self.values_of(event, &captures.split(event).items);
        for (_, value) in values.into_iter().flat_map(HitValues::values) {
            value.symbols(visit);
        }
    }

    /// Returns the values of `event`, an event of this probe with the captured `items`. Returns `None` if it has no
    /// values, like all events other than hits and returns.
    pub(crate) fn values_of<'a>(
        &'a self,
        event: &v1::Event,
        items: &[ItemData<'_>],
    ) -> Option<HitValues<'a>> {
        let Schema {
            arguments, call, ..
        } = &*self.0;
        if (arguments.is_empty() && !call) || !is_hit(event) {
            return None;
        }
        let values = arguments.iter().map(|(name, argument)| {
            let value = argument.as_ref().map(|it| value(it, event, items));
            (name.as_str(), value.unwrap_or(Value::Unknown))
        });
        let mut values: Vec<_> = values.collect();
        if !call {
            return Some(HitValues::Values(values));
        }
        let returns = event.kind() == EventKind::Return;
        let last = arguments.last().and_then(|(_, last)| last.as_ref());
        let has_result = match last.map(|last| &last.source) {
            Some(Source::Common(common)) => *common == Common::Retval,
            // A result that is larger than one register is in the registers at the return; arguments are in those
            // at the entry.
            Some(Source::Registers { entry, .. }) => returns && !entry,
            _ => false,
        };
        let result = if has_result { values.pop() } else { None };
        Some(HitValues::Call {
            arguments: values,
            result,
        })
    }
}

impl<'a> HitValues<'a> {
    /// Returns all values with their names.
    pub(crate) fn values(self) -> Vec<(&'a str, Value<'a>)> {
        match self {
            Self::Values(values) => values,
            Self::Call {
                mut arguments,
                result,
            } => {
                arguments.extend(result);
                arguments
            }
        }
    }
}

/// Replaces control characters in the names in `shape`, because values are printed with these names.
fn make_harmless(shape: &mut Shape) {
    let clean = |name: &mut String| *name = harmless(name.as_bytes());
    match &mut shape.kind {
        ShapeKind::Enum { values, .. } => values.iter_mut().for_each(|it| clean(&mut it.name)),
        ShapeKind::Array { element, .. } => make_harmless(element),
        ShapeKind::Struct { members, .. } => {
            for member in members {
                clean(&mut member.name);
                make_harmless(&mut member.shape);
            }
        }
        _ => {}
    }
}

/// Returns whether a value of this shape contains addresses that may have names.
fn has_symbols(shape: &Shape) -> bool {
    match &shape.kind {
        ShapeKind::Symbol => true,
        ShapeKind::Array { element, .. } => has_symbols(element),
        ShapeKind::Struct { members, .. } => members.iter().any(|it| has_symbols(&it.shape)),
        _ => false,
    }
}

/// Maximum number of registers of a value.
const REGISTERS: usize = 2;

/// Returns the value of `argument` at `event`.
fn value<'a>(argument: &'a Argument, event: &v1::Event, items: &[ItemData<'_>]) -> Value<'a> {
    let read = |bytes: &[u8]| Value::read(&argument.shape, argument.bits, bytes);
    let call = event.call.as_ref();
    match &argument.source {
        Source::Registers { registers, entry } => {
            let regs = match entry {
                true => call.and_then(|call| call.entry.as_ref()),
                false => event.registers.as_ref(),
            };
            let words: Option<Vec<[u8; 8]>> = regs.and_then(|regs| {
                let wanted = registers.iter().take(REGISTERS);
                let values = wanted.map(|register| registers::value(regs, *register));
                values.map(|value| value.map(u64::to_le_bytes)).collect()
            });
            words.map_or(Value::Unknown, |words| read(&words.concat()))
        }
        Source::Item(at) => match items.get(*at).map(|item| item.data) {
            None | Some(Some(Data::StackTrace { .. })) => Value::Unknown,
            Some(None) => Value::Fault,
            Some(Some(Data::Bytes(bytes))) => read(bytes),
            Some(Some(Data::Text { bytes, truncated })) => decode::text(bytes, truncated),
        },
        Source::Constant(bytes) => read(bytes),
        Source::Common(common) => {
            let regs = event.registers.as_ref();
            let number = match common {
                Common::Comm => {
                    let task = event.task.as_ref();
                    return task.map_or(Value::Fault, |task| decode::text(&task.comm, false));
                }
                Common::Ip => regs.map(|regs| regs.rip),
                Common::Flags => regs.map(|regs| regs.rflags),
                Common::Retval => call.map(|call| call.value),
            };
            number.map_or(Value::Unknown, |number| read(&number.to_le_bytes()))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
