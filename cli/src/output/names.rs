//! Names of addresses of the kernel, as far as they were asked for.
//!
//! Invariant: no more than [`MOST`] addresses are kept, whatever a guest's values are.

use std::collections::HashMap;

use super::harmless;

/// The most addresses whose names are kept.
const MOST: usize = 4096;

/// The names of addresses, and the addresses that have none.
#[derive(Debug, Default)]
pub(crate) struct Names(HashMap<u64, Option<String>>);

impl Names {
    /// `SYMBOL+OFFSET`, or the address where no symbol is known.
    pub(crate) fn of(&self, address: u64) -> String {
        let known = self.0.get(&address).and_then(Option::as_ref);
        known.map_or_else(|| format!("{address:#x}"), String::clone)
    }

    /// Those of `addresses` that have to be asked for, each once and so many as can be kept. Where there
    /// is no room for them all others are forgotten.
    pub(crate) fn missing(&mut self, addresses: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut wanted: Vec<u64> = addresses.into_iter().collect();
        wanted.sort_unstable();
        wanted.dedup();
        wanted.truncate(MOST);
        let is_missing = |address: &&u64| !self.0.contains_key(address);
        if self.0.len() + wanted.iter().filter(is_missing).count() > MOST {
            self.0.clear();
        }
        wanted.retain(|address| !self.0.contains_key(address));
        wanted
    }

    /// `address` is in the symbol of that name, which begins there, or in none.
    pub(crate) fn insert(&mut self, address: u64, symbol: Option<(&str, u64)>) {
        let name = symbol.and_then(|(name, start)| {
            let offset = address.checked_sub(start)?;
            Some(format!("{}+{offset:#x}", harmless(name.as_bytes())))
        });
        if self.0.len() < MOST {
            self.0.insert(address, name);
        }
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
            assert_eq!(names.0.len(), MOST);
        }
        // What is forgotten is asked for again.
        assert_eq!(names.missing([20_000, u64::MAX]), [20_000, u64::MAX]);
    }
}
