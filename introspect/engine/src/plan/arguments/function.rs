//! The parameters of the function that a probe is at.
//!
//! What is kept true: of a function of a module its own types tell, and nothing else. While the module is not
//! loaded nothing does: what was asked for then is [noted](Function::is_awaited), and asked for again.

use std::cell::Cell;

use hvprobe_arch::regs::Gpr;
use hvprobe_linux::modules::NoModuleTypes;
use hvprobe_linux::types::{Place, PrototypeError, TypeId, Types};
use hvprobe_spec::ParseError;
use hvprobe_spec::fetch::words;

use super::parameter::Parameter;
use super::refused::refused;
use super::syscall::Call;
use crate::plan::kernel::Probeable;
use crate::plan::probepoint::Probepoint;

/// The function whose arguments can be had at a probe, as far as anything tells of it.
pub(super) struct Function<'a> {
    types: Result<&'a Types, String>,
    prototype: Result<Found, String>,
    /// Whether it is in a module that is not there yet, and will tell of it.
    awaited: bool,
    /// Whether something was asked for that nothing tells.
    asked: Cell<bool>,
    /// The system call that it is the kernel's entry of.
    pub(super) call: Option<Call>,
}

struct Found {
    parameters: Vec<Parameter>,
    returns: Option<TypeId>,
    /// Whether it takes any number of arguments more.
    variadic: bool,
}

impl Found {
    /// What it takes, in words, with what the system call was made with if it is the `call`'s.
    fn taken(&self, call: Option<&Call>) -> String {
        let own = call.into_iter().flat_map(|call| &call.parameters);
        let own = own.map(|it| &*it.name);
        let names = self.parameters.iter().map(|it| it.name.as_str());
        let names: Vec<_> = names.chain(own).collect();
        match names.as_slice() {
            [] => "the function takes nothing".to_owned(),
            names => format!("the function takes {}", names.join(", ")),
        }
    }
}

/// The registers that arguments are in where no types tell, as the kernel has it
/// (`regs_get_kernel_argument` in arch/x86/include/asm/ptrace.h).
const BY_NUMBER: [Gpr; 6] = [Gpr::Rdi, Gpr::Rsi, Gpr::Rdx, Gpr::Rcx, Gpr::R8, Gpr::R9];

/// Why nothing tells of a module's types yet.
const NOT_LOADED: &str = "its module is not loaded";

impl<'a> Function<'a> {
    /// What the types tell of the function at `point`, which is called `named` in the definition.
    pub(super) fn at(
        point: Option<&Probepoint>,
        named: Option<&str>,
        kernel: &Probeable<'a>,
    ) -> Self {
        let types = match point {
            Some(point) if point.module => of_module(point, kernel),
            _ => {
                let types = kernel.image.types().map(|types| &**types);
                types.map_err(|_| "the kernel has no type information".to_owned())
            }
        };
        let prototype = match (&types, point) {
            (Err(why), _) => Err(why.clone()),
            (Ok(_), None) if kernel.keeps_module_types => Err(NOT_LOADED.to_owned()),
            (Ok(_), None) => Err(NoModuleTypes::NotKept.to_string()),
            (Ok(types), Some(point)) => {
                let symbol = point.symbol.0.as_str();
                find(types, named.into_iter().chain([symbol]))
            }
        };
        let call = match (&types, &prototype, point) {
            (Ok(types), Ok(found), Some(Probepoint { symbol, .. })) => {
                let known = kernel.image.system_call(&symbol.0);
                known.and_then(|known| Call::at(&symbol.0, known, &found.parameters, types))
            }
            _ => None,
        };
        Self {
            types,
            prototype,
            awaited: point.is_none() && kernel.keeps_module_types,
            asked: Cell::new(false),
            call,
        }
    }

    /// What tells of types there; the reason when nothing does.
    pub(super) fn types(&self) -> Result<&'a Types, &str> {
        self.types.as_ref().copied().map_err(String::as_str)
    }

    /// Whether something was asked for that is known once the module is loaded.
    pub(super) fn is_awaited(&self) -> bool {
        self.awaited && self.asked.get()
    }

    /// Notes that something was asked for that nothing tells.
    pub(super) fn note_unknown(&self) {
        self.asked.set(true);
    }

    /// All parameters, and what the function returns; the reason when nothing tells.
    pub(super) fn whole(&self) -> Result<(&[Parameter], Option<TypeId>), &str> {
        let found = self.found()?;
        Ok((&found.parameters, found.returns))
    }

    fn found(&self) -> Result<&Found, &str> {
        self.prototype.as_ref().map_err(|why| {
            self.note_unknown();
            why.as_str()
        })
    }

    /// The parameter `name`.
    pub(super) fn by_name(&self, column: usize, name: &str) -> Result<&Parameter, ParseError> {
        let found = self.found().map_err(|why| {
            let words = match self.types {
                Ok(_) => words::NO_BTF_ENTRY,
                Err(_) => words::NOSUP_BTFARG,
            };
            refused(column, format!("{words}; {why}"))
        })?;
        let mut parameters = found.parameters.iter();
        parameters.find(|it| it.name == name).ok_or_else(|| {
            let there = found.taken(self.call.as_ref());
            refused(column, format!("{}; {there}", words::NO_BTFARG))
        })
    }

    /// The parameter at `number`, from 1, with its name and its type where these are known.
    ///
    /// # Errors
    /// When the function is known to have no such one: what is there means nothing.
    pub(super) fn by_number(
        &self,
        column: usize,
        number: u16,
    ) -> Result<(Option<&Parameter>, Place), ParseError> {
        let index = usize::from(number).saturating_sub(1);
        if let Ok(found) = &self.prototype {
            if let Some(parameter) = found.parameters.get(index) {
                return Ok((Some(parameter), parameter.place));
            }
            if !found.variadic {
                let there = found.taken(None);
                return Err(refused(column, format!("{}; {there}", words::NO_BTFARG)));
            }
        }
        // The kernel takes it to be there without types, and so is what is beyond a prototype with `...`.
        let place = match BY_NUMBER.get(index) {
            Some(register) => Place::Register(*register),
            // Behind the return address.
            None => u16::try_from(index + 1 - BY_NUMBER.len()).map_or(Place::Unknown, Place::Stack),
        };
        Ok((None, place))
    }

    /// What the function returns, if the types tell.
    ///
    /// # Errors
    /// When they tell that it returns nothing.
    pub(super) fn returns(&self, column: usize) -> Result<Option<TypeId>, ParseError> {
        match &self.prototype {
            Ok(Found { returns: None, .. }) => Err(refused(column, words::NO_RETVAL)),
            Ok(found) => Ok(found.returns),
            Err(_) => Ok(None),
        }
    }
}

/// The types of the module that `point` is in.
fn of_module<'a>(point: &Probepoint, kernel: &Probeable<'a>) -> Result<&'a Types, String> {
    let module = kernel.module_at(point.displaced.at());
    let module = module.ok_or_else(|| NOT_LOADED.to_owned())?;
    module
        .types()
        .map(|types| &**types)
        .map_err(|why| why.to_string())
}

/// The first of `names` that the types tell of.
fn find<'n>(types: &Types, names: impl Iterator<Item = &'n str>) -> Result<Found, String> {
    let mut why = None;
    for name in names {
        match types.function(name) {
            Ok(prototype) => {
                let places = types.places(&prototype);
                let parameters = prototype.parameters.iter().zip(places).zip(1..);
                let parameters = parameters.map(|((it, place), number)| Parameter {
                    name: match it.name.as_str() {
                        "" => format!("arg{number}"),
                        name => name.to_owned(),
                    },
                    ty: it.ty,
                    place,
                });
                return Ok(Found {
                    parameters: parameters.collect(),
                    returns: prototype.returns,
                    variadic: prototype.variadic,
                });
            }
            Err(error @ PrototypeError::Unknown(_)) => why = why.or(Some(error)),
            Err(error) => return Err(error.to_string()),
        }
    }
    Err(why.map_or_else(
        || "no function begins there".to_owned(),
        |why| why.to_string(),
    ))
}
