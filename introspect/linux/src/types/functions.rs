//! What functions take and return.
//!
//! What is kept true: nothing is guessed. A function of which there are several with different
//! prototypes has none, and neither has what a compiler made of one under another name, such as
//! `vfs_read.isra.0`. Of a module its own functions are meant, whatever the kernel calls its: of the
//! kernel's only those are taken that the module has none of, as one that is the same in both is told once.

use super::error::PrototypeError;
use super::kinds::Kind;
use super::table::{TypeId, Types};

/// More parameters than any function of a kernel has.
const MOST_PARAMETERS: usize = 64;

/// What a function takes and returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prototype {
    /// What it takes, in the order of the declaration.
    pub parameters: Vec<Parameter>,
    /// What it returns; `None` for nothing.
    pub returns: Option<TypeId>,
    /// Whether it takes any number of arguments more.
    pub variadic: bool,
}

/// A parameter of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name; empty if the declaration gives none.
    pub name: String,
    /// Its type.
    pub ty: TypeId,
}

impl Types {
    /// The prototype of the function `name`, which is the whole name of its symbol.
    ///
    /// # Errors
    /// When the types do not tell of it, or of several that differ.
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

    /// All functions called `name`: a module's own, or those of its kernel if it has none.
    #[must_use]
    pub fn functions(&self, name: &str) -> Vec<TypeId> {
        let is_function = |id: &TypeId| matches!(self.kind(*id), Some(Kind::Function(_)));
        let own: Vec<_> = self.own_named(name).filter(is_function).collect();
        match &self.base {
            Some(base) if own.is_empty() => base.functions(name),
            _ => own,
        }
    }

    /// The prototype that `id` is, as that which a pointer to a function leads to.
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
    /// Whether a call of one is a call of the other; parameters may have other names.
    fn takes_the_same(&self, other: &Self) -> bool {
        let types = |it: &Self| -> Vec<_> { it.parameters.iter().map(|it| it.ty).collect() };
        self.returns == other.returns
            && self.variadic == other.variadic
            && types(self) == types(other)
    }
}
