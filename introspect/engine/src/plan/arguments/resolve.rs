//! Resolves the arguments of a probe.

use hvprobe_arch::regs::{Gpr, RegisterSet};
use hvprobe_linux::types::{Returned, TypeId};
use hvprobe_spec::definition::Target;
use hvprobe_spec::fetch::{Element, ExprKind, FetchArg, TypeName, words};
use hvprobe_spec::{
    Actions, Argument, Column, Common, ITEMS_MAX, Item, ParseError, ProbeSpec, Source,
};

use super::chain::{Around, Chain, Start};
use super::filter;
use super::function::Function;
use super::parameter::Parameter;
use super::refused::refused;
use super::syscall::Call;
use super::types::{self, Characters};
use super::value::{From, Value, plain, share, value};
use crate::info::Shown;
use crate::plan::kernel::Probeable;
use crate::plan::probepoint::Probepoint;
use crate::refusal::Refused;

/// A probe's resolved arguments, and the actions that they need.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    pub(crate) shown: Shown,
    pub(crate) actions: Actions,
    /// Whether some arguments are resolved only once the probe's module is loaded.
    pub(crate) awaited: bool,
}

impl Resolved {
    /// Returns the result for a probe whose arguments are known only once its module is loaded.
    fn awaited(spec: &ProbeSpec) -> Self {
        Self {
            shown: Shown {
                registers: spec.actions.registers,
                ..Shown::default()
            },
            actions: spec.actions.clone(),
            awaited: true,
        }
    }

    /// Returns the result for a probe without arguments.
    fn without(spec: &ProbeSpec, kernel: &Probeable<'_>) -> Result<Self, Refused> {
        let mut resolved = Self {
            awaited: false,
            ..Self::awaited(spec)
        };
        add_filter(spec, &[], &mut resolved.actions, kernel)?;
        Ok(resolved)
    }
}

/// An argument whose item has no position in the event yet.
struct Unpositioned {
    name: String,
    value: Value,
}

/// Resolves the arguments of `spec`. `point` is its probepoint; `None` if the probe waits for its module.
pub(crate) fn resolve(
    spec: &ProbeSpec,
    point: Option<&Probepoint>,
    kernel: &Probeable<'_>,
) -> Result<Resolved, Refused> {
    let definition = &spec.definition;
    let wanted = &definition.arguments;
    let by_default = wanted.is_empty() && spec.default_arguments;
    let has_function = spec.is_return() || point.is_none_or(|point| point.entry);
    if wanted.is_empty() && !(by_default && has_function) {
        return Resolved::without(spec, kernel);
    }
    let named = match &definition.target {
        target if target.is_from_beginning() => None,
        Target::Symbol { name, .. } => Some(name.as_str()),
        Target::Functions { .. } | Target::Address(_) => None,
    };
    let function = Function::at(point, named, kernel);
    let around = Around {
        function: &function,
        kernel,
        is_entry: has_function,
        returns: spec.is_return(),
    };
    let (found, call) = if by_default {
        let texts = definition.filter.as_ref().map(filter::texts);
        match by_types(&around, &texts.unwrap_or_default()) {
            Some(found) => (found, true),
            None if function.is_awaited() => return Ok(Resolved::awaited(spec)),
            None => return Resolved::without(spec, kernel),
        }
    } else {
        match written(wanted, &around) {
            Ok(found) => (found, false),
            Err(_) if function.is_awaited() => return Ok(Resolved::awaited(spec)),
            Err(why) => return Err(Refused::Argument(why)),
        }
    };
    let mut actions = spec.actions.clone();
    // Show no registers, unless the user has chosen some.
    let registers = if by_default && actions.registers == RegisterSet::default() {
        RegisterSet::from_iter([])
    } else {
        actions.registers
    };
    let arguments = capture(found, spec.is_return(), &mut actions);
    let items = actions
        .capture
        .iter_mut()
        .chain(&mut actions.capture_at_return);
    share(items).map_err(Refused::Arguments)?;
    actions.check_capture().map_err(Refused::Arguments)?;
    actions.registers = registers.iter().chain(used(&arguments)).collect();
    add_filter(spec, &arguments, &mut actions, kernel)?;
    Ok(Resolved {
        shown: Shown {
            registers,
            arguments,
            call,
        },
        actions,
        awaited: false,
    })
}

/// Adds the conditions and the predicate of the definition's filter to `actions`.
fn add_filter(
    spec: &ProbeSpec,
    arguments: &[Argument],
    actions: &mut Actions,
    kernel: &Probeable<'_>,
) -> Result<(), Refused> {
    let Some(filter) = &spec.definition.filter else {
        return Ok(());
    };
    let (conditions, rest) =
        filter::resolve(filter, arguments, spec.is_return(), kernel).map_err(Refused::Argument)?;
    actions.when.extend(conditions);
    actions.filter = rest;
    Ok(())
}

/// Resolves the arguments that a definition lists.
fn written(wanted: &[FetchArg], around: &Around<'_>) -> Result<Vec<Unpositioned>, ParseError> {
    let mut found: Vec<Unpositioned> = Vec::with_capacity(wanted.len());
    let given: Vec<_> = wanted.iter().filter_map(|it| it.name.as_deref()).collect();
    let is_variable = |name: &str| {
        let same = |it: &FetchArg| matches!(&it.expr.kind, ExprKind::Variable { name: of, .. } if of == name);
        wanted.iter().any(same)
    };
    for argument in wanted {
        let column = argument.column.0;
        let new = match &argument.expr.kind {
            ExprKind::Arguments => {
                around.check_entry(column)?;
                let (parameters, _) = around
                    .function
                    .whole()
                    .map_err(|why| refused(column, format!("{}; {why}", words::NO_BTF_ENTRY)))?;
                let all = parameters.iter();
                all.map(|it| parameter(it, around, column, None))
                    .collect::<Result<Vec<_>, _>>()?
            }
            kind => {
                let typed = match kind {
                    ExprKind::Argument(number) => around.function.by_number(column, *number)?.0,
                    _ => None,
                };
                // Use the parameter's own name, unless another argument of the definition uses that name.
                let typed = typed.map(|parameter| &*parameter.name);
                let is_free = |name: &&str| {
                    !given.contains(name)
                        && !is_variable(name)
                        && found.iter().all(|other| other.name != *name)
                };
                let name = match (&argument.name, typed.filter(is_free)) {
                    (None, Some(name)) => name.to_owned(),
                    _ => argument.shown_name(found.len()),
                };
                let chain = around.chain(&argument.expr)?;
                let value = of_chain(column, chain, argument.ty.as_ref(), around)?;
                vec![Unpositioned { name, value }]
            }
        };
        for new in new {
            if found.iter().any(|other| other.name == new.name) {
                let why = format!("{}; `{}`", words::USED_ARG_NAME, new.name);
                return Err(refused(column, why));
            }
            found.push(new);
        }
    }
    Ok(found)
}

/// Returns the parameters of the function and, for a return probe, its return value; `None` if the types do not
/// describe all of them. A pointer to characters is shown as text if its name is in `texts`, or if it is a text
/// ([`is_text`]) and reading it costs no exit.
fn by_types(around: &Around<'_>, texts: &[&str]) -> Option<Vec<Unpositioned>> {
    if let Some(call) = around.function.call.as_ref().filter(|_| !around.returns) {
        return of_call(call, around, texts);
    }
    let (parameters, returns) = around.function.whole().ok()?;
    if parameters.len() > ITEMS_MAX {
        return None;
    }
    let free = around.kernel.readable && !around.returns;
    let found = parameters.iter().enumerate().map(|(number, it)| {
        let next = parameters.get(number + 1);
        let as_text = texts.contains(&it.name.as_str()) || free && is_text(it, next, around);
        let text = as_text.then(|| text(it, around)).flatten();
        text.or_else(|| parameter(it, around, 0, None).ok())
    });
    let mut found = found.collect::<Option<Vec<_>>>()?;
    if let Some(ty) = returns.filter(|_| around.returns) {
        let taken = found.iter().any(|other| other.name == RESULT);
        let name = if taken { "$retval" } else { RESULT };
        found.push(returned(name, ty, around)?);
    }
    Some(found)
}

/// Returns the arguments of a system call. Not for return probes: the arguments are in memory, and would have to be
/// read at the entry.
fn of_call(call: &Call, around: &Around<'_>, texts: &[&str]) -> Option<Vec<Unpositioned>> {
    let found = call.parameters.iter().map(|it| {
        let chain = around.of_call(call, it);
        let text =
            texts.contains(&it.name.as_str()) && it.characters || it.text && around.kernel.readable;
        let value = match text {
            true => of_chain(0, chain, Some(&STRING), around),
            false => plain(0, chain, it.shape.clone(), false),
        };
        Some(Unpositioned {
            name: it.name.clone(),
            value: value.ok()?,
        })
    });
    found.collect()
}

/// Returns a parameter, shown as `ty` if that is given, or with its own type.
fn parameter(
    parameter: &Parameter,
    around: &Around<'_>,
    column: usize,
    ty: Option<&TypeName>,
) -> Result<Unpositioned, ParseError> {
    let chain = around.parameter(column, parameter.place, Some(parameter.ty))?;
    Ok(Unpositioned {
        name: parameter.name.clone(),
        value: of_chain(column, chain, ty, around)?,
    })
}

/// Returns the value of `chain`, with the types that apply to the function.
fn of_chain(
    column: usize,
    chain: Chain,
    ty: Option<&TypeName>,
    around: &Around<'_>,
) -> Result<Value, ParseError> {
    let types = around.function.types().ok();
    value(column, chain, ty, types, around.returns)
}

/// Returns whether a parameter that points to characters is a text: the function does not change the characters,
/// and the next parameter is not their number.
fn is_text(parameter: &Parameter, next: Option<&Parameter>, around: &Around<'_>) -> bool {
    let Ok(types) = around.function.types() else {
        return false;
    };
    let counts = |it: &Parameter| types::is_size(types, it.ty);
    types::is_constant_behind(types, parameter.ty) && !next.is_some_and(counts)
}

/// Returns a parameter as text; `None` if it does not point to characters.
fn text(it: &Parameter, around: &Around<'_>) -> Option<Unpositioned> {
    let types = around.function.types().ok()?;
    if types::characters(types, it.ty) != Some(Characters::Behind) {
        return None;
    }
    parameter(it, around, 0, Some(&STRING)).ok()
}

/// Type name of a text.
const STRING: TypeName = TypeName {
    column: Column(0),
    element: Element::String,
    count: None,
};

/// Returns the return value of a function: with its type if registers hold all of it, otherwise RAX.
fn returned(name: &str, ty: TypeId, around: &Around<'_>) -> Option<Unpositioned> {
    let result = |ty| {
        let chain = Chain::of(Start::Common(Common::Retval), ty);
        of_chain(0, chain, None, around)
    };
    // The definition does not ask for this value, so do not read it from memory, which would cost time at each
    // return.
    let types = around.function.types();
    let in_memory = types.is_ok_and(|types| types.returned(ty) == Returned::Memory);
    let whole = (!in_memory).then(|| result(Some(ty)).ok()).flatten();
    Some(Unpositioned {
        name: name.to_owned(),
        value: whole.or_else(|| result(None).ok())?,
    })
}

/// Name of the return value, unless a parameter has this name.
const RESULT: &str = "retval";

/// Adds the items of `found` to `actions`; returns the arguments with their locations.
fn capture(found: Vec<Unpositioned>, returns: bool, actions: &mut Actions) -> Vec<Argument> {
    let is_entry = |found: &Unpositioned| matches!(found.value.from, From::Entry(_));
    let at_entry = found.iter().filter(|found| is_entry(found)).count();
    // Items of the return follow all items of the entry.
    let before = actions.capture.len() + at_entry;
    let mut arguments = Vec::with_capacity(found.len());
    for Unpositioned { name, value } in found {
        let add = |to: &mut Vec<Item>, first: usize, item| {
            to.push(item);
            Source::Item(first + to.len() - 1)
        };
        let source = match value.from {
            From::Event(source) => source,
            From::Entry(item) => add(&mut actions.capture, 0, item),
            From::Hit(item) if returns => add(&mut actions.capture_at_return, before, item),
            From::Hit(item) => add(&mut actions.capture, 0, item),
        };
        arguments.push(Argument {
            name,
            source,
            bits: value.bits,
            shape: value.shape,
        });
    }
    arguments
}

/// Returns the registers that hold arguments.
fn used(arguments: &[Argument]) -> impl Iterator<Item = Gpr> + '_ {
    let registers = arguments.iter().filter_map(|it| match &it.source {
        Source::Registers { registers, .. } => Some(registers.iter().copied()),
        _ => None,
    });
    registers.flatten()
}
