//! Values of the hits and returns of a probe, and their sources in an event.
//!
//! Invariant: no name from a server or a guest contains control characters for a terminal.

use std::sync::Arc;

use hvprobe_proto::v1::{self, EventField, EventKind, TypeKind, argument};

use super::captured::{Captures, Data, Item};
use super::registers;
use crate::output::harmless;
use crate::output::values::{Value, decode};

/// Description of the values of a probe's hits. Clones share it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Arguments(Arc<Schema>);

#[derive(Debug, Default, PartialEq)]
struct Schema {
    arguments: Vec<v1::Argument>,
    call: bool,
    /// Whether some values are addresses that may have names.
    has_symbols: bool,
}

/// Values of one hit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HitValues<'a> {
    /// Values with their names.
    Values(Vec<(&'a str, Value<'a>)>),
    /// All arguments of a function, and at its return the result, if the function has one.
    Call {
        /// The arguments.
        arguments: Vec<(&'a str, Value<'a>)>,
        /// The result, with its name.
        result: Option<(&'a str, Value<'a>)>,
    },
}

impl Arguments {
    /// Returns the description for `probe`.
    pub(crate) fn of(probe: &v1::Probe) -> Self {
        let mut arguments = probe.arguments.clone();
        for argument in &mut arguments {
            make_harmless(&mut argument.name);
            if let Some(ty) = &mut argument.r#type {
                make_type_harmless(ty);
            }
        }
        let mut types = arguments.iter().filter_map(|each| each.r#type.as_ref());
        let has_symbols = types.any(has_symbols);
        Self(Arc::new(Schema {
            arguments,
            call: probe.call,
            has_symbols,
        }))
    }

    /// Calls `visit` with each address in `event`, an event of this probe, that may have a name.
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

    /// Returns the values of `event`, an event of this probe with the captured `items`. Returns `None` if there
    /// are none, as in events other than hits and returns.
    pub(crate) fn values_of<'a>(
        &'a self,
        event: &v1::Event,
        items: &[Item<'_>],
    ) -> Option<HitValues<'a>> {
        let Schema {
            arguments, call, ..
        } = &*self.0;
        if arguments.is_empty() && !call {
            return None;
        }
        match event.kind() {
            EventKind::Unspecified | EventKind::Hit | EventKind::Return => {}
            EventKind::Post | EventKind::Fault => return None,
        }
        let named = |each: &'a v1::Argument| (each.name.as_str(), value(each, event, items));
        let mut values: Vec<_> = arguments.iter().map(named).collect();
        if !call {
            return Some(HitValues::Values(values));
        }
        let returns = event.kind() == EventKind::Return;
        let is_result = |last: &v1::Argument| match &last.source {
            Some(argument::Source::Field(field)) => *field == i32::from(EventField::Retval),
            // The result is larger than one register. The arguments are those of the entry.
            Some(argument::Source::Registers(registers)) => returns && !registers.entry,
            _ => false,
        };
        let has_result = arguments.last().is_some_and(is_result);
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

fn make_harmless(name: &mut String) {
    *name = harmless(name.as_bytes());
}

fn make_type_harmless(ty: &mut v1::Type) {
    make_harmless(&mut ty.name);
    for each in &mut ty.enumerators {
        make_harmless(&mut each.name);
    }
    if let Some(element) = &mut ty.element {
        make_type_harmless(element);
    }
    for member in &mut ty.members {
        make_harmless(&mut member.name);
        if let Some(ty) = &mut member.r#type {
            make_type_harmless(ty);
        }
    }
}

/// Returns whether a value of type `ty` contains addresses that may have names.
fn has_symbols(ty: &v1::Type) -> bool {
    let mut members = ty.members.iter().filter_map(|each| each.r#type.as_ref());
    ty.kind() == TypeKind::Symbol
        || ty.element.as_deref().is_some_and(has_symbols)
        || members.any(has_symbols)
}

/// Returns the value of `argument` at `event`.
fn value<'a>(argument: &'a v1::Argument, event: &v1::Event, items: &[Item<'_>]) -> Value<'a> {
    let (Some(ty), Some(source)) = (&argument.r#type, &argument.source) else {
        return Value::Unknown;
    };
    let read = |bytes: &[u8]| Value::read(ty, argument.bits, bytes);
    match source {
        argument::Source::Registers(wanted) => {
            let entry = || event.call.as_ref()?.entry.as_ref();
            let regs = match wanted.entry {
                true => entry(),
                false => event.registers.as_ref(),
            };
            let values = regs.map(|regs| {
                let wanted = wanted.registers.iter().take(REGISTERS);
                let values = wanted.map(|number| registers::value(regs, *number));
                values.map(|value| value.map(u64::to_le_bytes)).collect()
            });
            match values {
                Some(Some::<Vec<[u8; 8]>>(values)) => read(&values.concat()),
                _ => Value::Unknown,
            }
        }
        argument::Source::Item(at) => {
            let item = usize::try_from(*at).ok().and_then(|at| items.get(at));
            match item.map(|item| item.data) {
                None | Some(Some(Data::StackTrace { .. })) => Value::Unknown,
                Some(None) => Value::Fault,
                Some(Some(Data::Bytes(bytes))) => read(bytes),
                Some(Some(Data::Text { bytes, truncated })) => decode::text(bytes, truncated),
            }
        }
        argument::Source::Constant(bytes) => read(bytes),
        argument::Source::Field(field) => field_value(*field, event, read),
    }
}

/// Maximum number of registers of a value.
const REGISTERS: usize = 2;

/// Returns the value of a field that every event has.
fn field_value<'a>(field: i32, event: &v1::Event, read: impl Fn(&[u8]) -> Value<'a>) -> Value<'a> {
    let number = match EventField::try_from(field) {
        Ok(EventField::Comm) => {
            let task = event.task.as_ref();
            return task.map_or(Value::Fault, |task| decode::text(&task.comm, false));
        }
        Ok(EventField::Ip) => event.registers.as_ref().map(|regs| regs.rip),
        Ok(EventField::Flags) => event.registers.as_ref().map(|regs| regs.rflags),
        Ok(EventField::Retval) => event.call.as_ref().map(|call| call.value),
        Ok(EventField::Unspecified) | Err(_) => None,
    };
    number.map_or(Value::Unknown, |number| read(&number.to_le_bytes()))
}

#[cfg(test)]
pub(crate) mod tests;
