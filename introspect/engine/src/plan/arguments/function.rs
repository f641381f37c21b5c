//! The parameters of the probed function.
//!
//! Invariant: the function of a module is described only by the module's own types. While the module is not loaded,
//! a request for its types is [noted](Function::is_awaited), and made again later.

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

/// The function whose arguments a probe can show, as far as it is known.
pub(super) struct Function<'a> {
    types: Result<&'a Types, String>,
    prototype: Result<Prototype, String>,
    /// Whether the function is in a module that is not loaded yet. Once loaded, the module's types will describe
    /// it.
    awaited: bool,
    /// Whether anything was requested that is not known.
    asked: Cell<bool>,
    /// System call whose entry the function is.
    pub(super) call: Option<Call>,
}

/// The types of a function.
struct Prototype {
    parameters: Vec<Parameter>,
    returns: Option<TypeId>,
    /// Whether it takes further, unnamed arguments.
    variadic: bool,
}

impl Prototype {
    /// Returns a sentence that lists the function's parameters and those of the system call `call`.
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

/// Registers of the arguments where no types are known, as in the kernel (`regs_get_kernel_argument` in
/// arch/x86/include/asm/ptrace.h).
const BY_NUMBER: [Gpr; 6] = [Gpr::Rdi, Gpr::Rsi, Gpr::Rdx, Gpr::Rcx, Gpr::R8, Gpr::R9];

/// Reason why a module's types are not known yet.
const NOT_LOADED: &str = "its module is not loaded";

impl<'a> Function<'a> {
    /// Looks up the types of the function at `point`, which the definition calls `named`. Without `point`, the
    /// function is in a module that is not loaded.
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

    /// Returns the types that apply to the function, or why there are none.
    pub(super) fn types(&self) -> Result<&'a Types, &str> {
        self.types.as_ref().copied().map_err(String::as_str)
    }

    /// Returns whether something was requested that is known only once the module is loaded.
    pub(super) fn is_awaited(&self) -> bool {
        self.awaited && self.asked.get()
    }

    /// Notes that something was requested that is not known.
    pub(super) fn note_unknown(&self) {
        self.asked.set(true);
    }

    /// Returns all parameters and the return type, or why they are not known.
    pub(super) fn whole(&self) -> Result<(&[Parameter], Option<TypeId>), &str> {
        let found = self.prototype()?;
        Ok((&found.parameters, found.returns))
    }

    fn prototype(&self) -> Result<&Prototype, &str> {
        self.prototype.as_ref().map_err(|why| {
            self.note_unknown();
            why.as_str()
        })
    }

    /// Returns the parameter `name`.
    pub(super) fn by_name(&self, column: usize, name: &str) -> Result<&Parameter, ParseError> {
        let found = self.prototype().map_err(|why| {
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

    /// Returns the location of parameter `number`, from 1, with its name and type if they are known.
    ///
    /// # Errors
    /// When the function is known to have no such parameter, so that the location holds nothing meaningful.
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
        // Without types the kernel assumes these locations. They are also those of the arguments that `...` stands
        // for.
        let place = match BY_NUMBER.get(index) {
            Some(register) => Place::Register(*register),
            // On the stack, where the return address is word 0.
            None => u16::try_from(index + 1 - BY_NUMBER.len()).map_or(Place::Unknown, Place::Stack),
        };
        Ok((None, place))
    }

    /// Returns the return type of the function, if it is known.
    ///
    /// # Errors
    /// When the function is known to return nothing.
    pub(super) fn returns(&self, column: usize) -> Result<Option<TypeId>, ParseError> {
        match &self.prototype {
            Ok(Prototype { returns: None, .. }) => Err(refused(column, words::NO_RETVAL)),
            Ok(found) => Ok(found.returns),
            Err(_) => Ok(None),
        }
    }
}

/// Returns the types of the module that contains `point`.
fn of_module<'a>(point: &Probepoint, kernel: &Probeable<'a>) -> Result<&'a Types, String> {
    let module = kernel.module_at(point.displaced.at());
    let module = module.ok_or_else(|| NOT_LOADED.to_owned())?;
    module
        .types()
        .map(|types| &**types)
        .map_err(|why| why.to_string())
}

/// Returns the prototype of the first of `names` that has one in `types`, or why none has one.
fn find<'n>(types: &Types, names: impl Iterator<Item = &'n str>) -> Result<Prototype, String> {
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
                return Ok(Prototype {
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
