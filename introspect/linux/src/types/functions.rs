//! Prototypes of functions.
//!
//! Invariants: nothing is guessed. A function that exists several times with different prototypes has none, and
//! neither has a variant that the compiler made under another name, such as `vfs_read.isra.0`. Among the types of a
//! module, the kernel's functions of a name count only if the module has none of that name: a function that is the
//! same in both is described only once, among the types of the kernel.

use super::error::PrototypeError;
use super::kinds::Kind;
use super::table::{TypeId, Types};

/// Maximum number of parameters; no function of a kernel has more.
const MOST_PARAMETERS: usize = 64;

/// The parameters and the return type of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prototype {
    /// The parameters, in the order of the declaration.
    pub parameters: Vec<Parameter>,
    /// The return type; `None` for `void`.
    pub returns: Option<TypeId>,
    /// Whether further arguments may follow the parameters (`...`).
    pub variadic: bool,
}

/// A parameter of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name; empty if the declaration gives none.
    pub name: String,
    /// The type.
    pub ty: TypeId,
}

impl Types {
    /// Returns the prototype of the function `name`, which must be the whole name of the function's symbol.
    ///
    /// # Errors
    /// If the types do not describe it, or describe several that differ.
    pub fn function(&self, name: &str) -> Result<Prototype, PrototypeError> {
        let mut found: Option<Prototype> = None;
        for id in self.functions(name) {
            let Some(Kind::Function(prototype)) = self.kind(id) else {
                continue;
            };
            let this = self
                .prototype(prototype)
                .ok_or_else(|| PrototypeError::Malformed(name.to_owned()))?;
            match &found {
                None => found = Some(this),
                Some(other) if this.takes_the_same(other) => {}
                Some(_) => return Err(PrototypeError::Ambiguous(name.to_owned())),
            }
        }
        found.ok_or_else(|| PrototypeError::Unknown(name.to_owned()))
    }

    /// Returns all functions called `name`: those of the module, or those of the kernel if the module has none.
    #[must_use]
    pub fn functions(&self, name: &str) -> Vec<TypeId> {
        let is_function = |id: &TypeId| matches!(self.kind(*id), Some(Kind::Function(_)));
        let own: Vec<_> = self.own_named(name).filter(is_function).collect();
        match &self.base {
            Some(base) if own.is_empty() => base.functions(name),
            _ => own,
        }
    }

    /// Returns the prototype whose id is `id`, such as the target of a function pointer. `None` if `id` is no
    /// prototype, or if the prototype makes no sense.
    #[must_use]
    pub fn prototype(&self, id: TypeId) -> Option<Prototype> {
        let Kind::Prototype {
            returns,
            parameters,
        } = self.kind(self.resolve(id)?)?
        else {
            return None;
        };
        let mut parameters: Vec<_> = parameters
            .take(MOST_PARAMETERS + 1)
            .map(|it| Parameter {
                name: it.name.to_owned(),
                ty: it.ty,
            })
            .collect();
        let last = parameters.last();
        let variadic = last.is_some_and(|it| it.ty == TypeId::VOID && it.name.is_empty());
        if variadic {
            parameters.pop();
        }
        if parameters.len() > MOST_PARAMETERS || parameters.iter().any(|it| it.ty == TypeId::VOID) {
            return None;
        }
        Some(Prototype {
            parameters,
            returns: (returns != TypeId::VOID).then_some(returns),
            variadic,
        })
    }
}

impl Prototype {
    /// Returns whether both are called in the same way; names of parameters may differ.
    fn takes_the_same(&self, other: &Self) -> bool {
        let types = |it: &Self| -> Vec<_> { it.parameters.iter().map(|it| it.ty).collect() };
        self.returns == other.returns
            && self.variadic == other.variadic
            && types(self) == types(other)
    }
}
