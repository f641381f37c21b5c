//! A snapshot of the guest's modules, with look-ups by name and address.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};

use hvprobe_arch::Gva;

use super::error::{ModuleLookupError, NoModuleTypes};
use crate::image::{Forbidden, Lists};
use crate::symbols::{Symbol, Symbols};
use crate::types::Types;

/// State of a module (`enum module_state` in include/linux/module.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModuleState {
    /// The module is in use.
    Live,
    /// The text is final; the init function is about to run, or running.
    Coming,
    /// The exit function is about to run, running or done, or the init function failed.
    Going,
    /// The module is being laid out: nothing in it is reliable.
    Unformed,
}

/// A module of the guest.
#[derive(Debug)]
pub struct Module {
    pub(super) name: String,
    pub(super) at: Gva,
    pub(super) state: ModuleState,
    pub(super) text: Range<Gva>,
    pub(super) init_text: Option<Range<Gva>>,
    pub(super) memory: Vec<Range<Gva>>,
    pub(super) symbols: Symbols,
    pub(super) lists: Lists,
    /// Name of the first list that could not be read.
    pub(super) unreadable: Option<&'static str>,
    /// Empty until the types are read.
    pub(super) types: OnceLock<Result<Arc<Types>, NoModuleTypes>>,
}

impl Module {
    /// Returns the name, as in `/proc/modules`; bytes that are not printable ASCII are escaped.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the address of the module's `struct module`.
    #[must_use]
    pub fn address(&self) -> Gva {
        self.at
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> ModuleState {
        self.state
    }

    /// Returns the text that stays until the module is unloaded. Empty while the module is unformed.
    #[must_use]
    pub fn text(&self) -> Range<Gva> {
        self.text.clone()
    }

    /// Returns the init text; `None` if the module has none, or it has been freed.
    #[must_use]
    pub fn init_text(&self) -> Option<Range<Gva>> {
        self.init_text.clone()
    }

    /// Returns whether `at` lies in the module's text or init text.
    #[must_use]
    pub fn is_text(&self, at: Gva) -> bool {
        self.text.contains(&at)
            || self
                .init_text
                .as_ref()
                .is_some_and(|text| text.contains(&at))
    }

    /// Returns whether `at` lies in the module's memory.
    pub(super) fn has(&self, at: Gva) -> bool {
        self.memory.iter().any(|memory| memory.contains(&at))
    }

    /// Returns the symbols. Those of init text are included until the kernel frees it.
    #[must_use]
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// Returns the types, if they [were read](super::ModuleReader::read_types).
    ///
    /// # Errors
    /// If there are no types; the error says why.
    pub fn types(&self) -> Result<&Arc<Types>, NoModuleTypes> {
        let read = self.types.get().ok_or(NoModuleTypes::NotRead)?;
        read.as_ref().map_err(Clone::clone)
    }

    /// Returns why `at`, an address in the module's text, must not be probed; `None` if nothing forbids it.
    #[must_use]
    pub fn forbidden(&self, at: Gva) -> Option<Forbidden> {
        if self.state == ModuleState::Unformed {
            return Some(Forbidden::Loading);
        }
        self.lists.find(at, &self.symbols).or_else(|| {
            let list = self.unreadable?;
            Some(Forbidden::Unreadable { list })
        })
    }

    /// Returns why `at` must not be probed while the byte there is `first`. For the reason, see
    /// [`KernelImage::forbidden_as_is`](crate::image::KernelImage::forbidden_as_is).
    #[must_use]
    pub fn forbidden_as_is(&self, at: Gva, first: u8) -> Option<Forbidden> {
        self.lists.lock_prefix(at, first)
    }

    /// Returns whether the module's exception table has an entry for the instruction at `at`.
    #[must_use]
    pub fn has_fixup(&self, at: Gva) -> bool {
        self.lists.has_fixup(at)
    }

    /// Returns whether a call to `__fentry__`, or the nop in its place, is at `at`.
    #[must_use]
    pub fn is_ftrace_site(&self, at: Gva) -> bool {
        self.lists.is_ftrace_site(at).unwrap_or(false)
    }
}

/// The modules that were loaded in a guest at the time when they were read.
#[derive(Debug)]
pub struct ModuleList {
    pub(super) modules: Vec<Module>,
    pub(super) restores_locks: bool,
    /// Number of bytes that may still be read for the types of all these modules together.
    pub(super) types_left: AtomicUsize,
}

impl ModuleList {
    /// Returns an iterator over all modules. The one loaded last comes first.
    pub fn iter(&self) -> std::slice::Iter<'_, Module> {
        self.modules.iter()
    }

    /// Returns whether the kernel may restore lock prefixes that it removed: it booted with one processor, and may
    /// get more. If not, ignore [`Forbidden::LockPrefix`] for addresses in the kernel image: there, it is derived
    /// only from the image's list and the current byte. When in doubt, returns true.
    #[must_use]
    pub fn restores_lock_prefixes(&self) -> bool {
        self.restores_locks
    }

    /// Returns the module called `name`. As for `modprobe`, `-` and `_` are the same.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Module> {
        let folded = |c: u8| if c == b'-' { b'_' } else { c };
        self.iter().find(|module| {
            module.name.len() == name.len()
                && module
                    .name
                    .bytes()
                    .zip(name.bytes())
                    .all(|(a, b)| folded(a) == folded(b))
        })
    }

    /// Returns the module whose text or init text contains `at`.
    #[must_use]
    pub fn containing(&self, at: Gva) -> Option<&Module> {
        self.iter().find(|module| module.is_text(at))
    }

    /// Looks up `MODULE:SYMBOL`: the only symbol called `symbol` in the module called `module`.
    ///
    /// # Errors
    /// If the module is not loaded, has no such symbol, or has several.
    pub fn lookup_in(
        &self,
        module: &str,
        symbol: &str,
    ) -> Result<(&Module, Symbol<'_>), ModuleLookupError> {
        let found = self
            .get(module)
            .ok_or_else(|| ModuleLookupError::NotLoaded {
                name: module.to_owned(),
            })?;
        match found.symbols.lookup(symbol) {
            Ok(symbol) => Ok((found, symbol)),
            Err(why) => Err(ModuleLookupError::Symbol {
                module: found.name.clone(),
                why,
            }),
        }
    }

    /// Looks up the only symbol called `symbol` in all modules. Meant for names that the kernel image does not
    /// have.
    ///
    /// # Errors
    /// If no module has such a symbol, or there are several.
    pub fn lookup(&self, symbol: &str) -> Result<(&Module, Symbol<'_>), ModuleLookupError> {
        let found: Vec<_> = self
            .iter()
            .flat_map(|module| {
                let candidates = module.symbols.candidates(symbol);
                candidates.into_iter().map(move |symbol| (module, symbol))
            })
            .collect();
        match found.as_slice() {
            [] => Err(ModuleLookupError::Unknown {
                name: symbol.to_owned(),
            }),
            [one] => Ok(*one),
            several => Err(ModuleLookupError::Ambiguous {
                name: symbol.to_owned(),
                at: several
                    .iter()
                    .map(|(module, symbol)| (module.name.clone(), symbol.addr))
                    .collect(),
            }),
        }
    }
}

impl<'a> IntoIterator for &'a ModuleList {
    type Item = &'a Module;
    type IntoIter = std::slice::Iter<'a, Module>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
