//! Names of kernel addresses that were looked up.
//!
//! Invariant: at most [`MOST`] looked-up addresses are kept. For stacks, all functions of the kernel are kept in
//! addition: stacks have many addresses, and are printed even after a machine has ended, when the server can no
//! longer look them up.

use std::collections::HashMap;
use std::sync::Arc;

use hvprobe_sources::SourceLine;

use super::source_lines::Lines;
use crate::output::printable::harmless;

/// Maximum number of addresses whose names are kept.
const MOST: usize = 4096;

/// Names of addresses. It also records which addresses have no name.
#[derive(Debug, Default)]
pub(crate) struct Names {
    asked: HashMap<u64, Option<Named>>,
    /// All functions of the kernel, sorted by address; empty until they are known.
    functions: Vec<Function>,
    /// Source lines of addresses, if there is debug information.
    lines: Option<Arc<Lines>>,
}

/// Function of the kernel.
#[derive(Debug)]
struct Function {
    start: u64,
    size: u64,
    name: String,
}

/// Position of an address in a symbol.
#[derive(Clone, Debug)]
struct Named {
    symbol: String,
    offset: u64,
    /// Build id of the address's module, if known.
    build_id: Option<Vec<u8>>,
}

impl Names {
    /// Sets the source lines of addresses, if there are any.
    pub(crate) fn set_lines(&mut self, lines: Option<Arc<Lines>>) {
        self.lines = lines;
    }

    /// Returns whether addresses may have source lines.
    pub(super) fn has_lines(&self) -> bool {
        self.lines.is_some()
    }

    /// Returns the source line of the code at `address`. With `is_after`, `address` is a return address, and the
    /// line is that of the call before it.
    pub(super) fn line(&self, address: u64, is_after: bool) -> Option<SourceLine> {
        let lines = self.lines.as_ref()?;
        let at = address.checked_sub(is_after.into())?;
        if let Some(function) = self.function(at) {
            return lines.at(at, &function.name, at - function.start, None);
        }
        let named = self.asked.get(&address)?.as_ref()?;
        let offset = named.offset.checked_sub(is_after.into())?;
        lines.at(at, &named.symbol, offset, named.build_id.as_deref())
    }

    /// Returns `SYMBOL+OFFSET`, or the address if it has no known symbol.
    pub(crate) fn of(&self, address: u64) -> String {
        match self.symbol(address) {
            Some((symbol, offset)) => format!("{symbol}+{offset:#x}"),
            None => format!("{address:#x}"),
        }
    }

    /// Returns the symbol that contains `address`, and the offset in it.
    pub(crate) fn symbol(&self, address: u64) -> Option<(&str, u64)> {
        if let Some(function) = self.function(address) {
            return Some((&function.name, address - function.start));
        }
        let named = self.asked.get(&address)?.as_ref()?;
        Some((&named.symbol, named.offset))
    }

    /// Returns the function that contains `address`, if all functions are known.
    fn function(&self, address: u64) -> Option<&Function> {
        let behind = self.functions.partition_point(|it| it.start <= address);
        let function = self.functions.get(behind.checked_sub(1)?)?;
        (address - function.start < function.size).then_some(function)
    }

    /// Returns whether all functions are known.
    pub(crate) fn has_functions(&self) -> bool {
        !self.functions.is_empty()
    }

    /// Sets all functions, in any order, each with its address, size and name. Of several names for one address
    /// the first one counts.
    pub(crate) fn know(&mut self, functions: impl IntoIterator<Item = (u64, u64, String)>) {
        let known = functions.into_iter().map(|(start, size, name)| Function {
            start,
            size,
            name: harmless(name.as_bytes()),
        });
        self.functions = known.collect();
        self.functions.sort_by_key(|function| function.start);
        self.functions.dedup_by_key(|function| function.start);
    }

    /// Returns the `addresses` that have to be looked up, each once, and at most [`MOST`]. If they do not fit
    /// beside the kept addresses, drops all kept addresses.
    pub(crate) fn missing(&mut self, addresses: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut wanted: Vec<u64> = addresses.into_iter().collect();
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|address| self.function(*address).is_none());
        wanted.truncate(MOST);
        let is_missing = |address: &&u64| !self.asked.contains_key(address);
        if self.asked.len() + wanted.iter().filter(is_missing).count() > MOST {
            self.asked.clear();
        }
        wanted.retain(|address| !self.asked.contains_key(address));
        wanted
    }

    /// Records that `address` is in `symbol`, which has a name and a start address, or that it is in no symbol.
    /// `build_id` is that of the symbol's module, if known.
    pub(crate) fn insert_of_build(
        &mut self,
        address: u64,
        symbol: Option<(&str, u64)>,
        build_id: Option<Vec<u8>>,
    ) {
        let name = symbol.and_then(|(name, start)| {
            Some(Named {
                offset: address.checked_sub(start)?,
                symbol: harmless(name.as_bytes()),
                build_id,
            })
        });
        if self.asked.len() < MOST {
            self.asked.insert(address, name);
        }
    }

    /// Like [`insert_of_build`](Self::insert_of_build), for an address outside modules.
    #[cfg(test)]
    pub(crate) fn insert(&mut self, address: u64, symbol: Option<(&str, u64)>) {
        self.insert_of_build(address, symbol, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_asked_for_once() {
        let mut names = Names::default();
        assert_eq!(names.missing([3, 1, 3]), [1, 3]);
        names.insert(1, Some(("f\x1b", 0)));
        names.insert(3, None);
        assert_eq!(names.missing([1, 2, 3]), [2]);
        assert_eq!((names.of(1), names.of(3)), ("f?+0x1".into(), "0x3".into()));
        names.insert(4, Some(("behind", 5)));
        assert_eq!(names.of(4), "0x4");
    }

    #[test]
    fn addresses_in_known_functions_are_not_asked_for() {
        let mut names = Names::default();
        let functions = [(0x20, 8, "b\x1b"), (0x10, 0x10, "a"), (0x20, 8, "alias")];
        names.know(functions.map(|(start, size, name)| (start, size, name.to_owned())));
        assert_eq!(names.missing([0xf, 0x10, 0x1f, 0x27, 0x28]), [0xf, 0x28]);
        let texts = [0xf, 0x1f, 0x27, 0x28].map(|address| names.of(address));
        assert_eq!(texts, ["0xf", "a+0xf", "b?+0x7", "0x28"]);
    }

    #[test]
    fn no_more_are_kept_than_there_is_room_for() {
        let mut names = Names::default();
        for round in 0..3 {
            let first = round * 10_000;
            let missing = names.missing(first..first + 5000);
            assert_eq!(missing.len(), MOST);
            for address in missing {
                names.insert(address, None);
            }
            names.insert(u64::MAX, None);
            assert_eq!(names.asked.len(), MOST);
        }
        // A dropped address is looked up again.
        assert_eq!(names.missing([20_000, u64::MAX]), [20_000, u64::MAX]);
    }
}
