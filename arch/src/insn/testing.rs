//! Helpers for the tests of this module.

use super::displaced::Displaced;
use super::memory::{Memory, MemoryFault};
use super::policy::classify;
use crate::Gva;
use crate::paging::WalkError;
use std::collections::BTreeMap;

/// Address of the instructions that the tests displace.
pub(super) const AT: Gva = Gva(0xffff_ffff_8123_4567);

/// Address of the tests' slots.
pub(super) const SLOT: Gva = Gva(0xffff_ffff_8080_0040);

/// Memory of a few words; everything else faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Words(BTreeMap<u64, u64>);

impl Words {
    /// Makes memory that holds `words` from the address `top` on.
    pub(super) fn new(top: u64, words: &[u64]) -> Self {
        let addresses = (0..).map(|index| top + index * 8);
        Self(addresses.zip(words.iter().copied()).collect())
    }

    /// Adds a word.
    pub(super) fn add(&mut self, at: u64, word: u64) {
        self.0.insert(at, word);
    }

    /// Returns the word at `at`.
    pub(super) fn at(&self, at: u64) -> Option<u64> {
        self.0.get(&at).copied()
    }

    fn word(&mut self, at: Gva) -> Result<&mut u64, MemoryFault> {
        self.0.get_mut(&at.0).ok_or(MemoryFault {
            at,
            cause: WalkError::NotPresent { at, level: 1 },
        })
    }
}

impl Memory for Words {
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault> {
        self.word(at).copied()
    }

    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), MemoryFault> {
        self.word(at).map(|word| *word = value)
    }
}

/// Decodes bytes from hexadecimal digits; whitespace is ignored.
pub(crate) fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<char> = hex.chars().filter(|c| !c.is_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap())
        .collect()
}

/// Classifies the instruction in `hex`, at [`AT`].
pub(super) fn displaced(hex: &str) -> Displaced {
    classify(&bytes(hex), AT).unwrap()
}
