//! The types that fetch arguments name.

use crate::column::Column;

/// The most elements of an array, as in the kernel (`MAX_ARRAY_LEN` in kernel/trace/trace_probe.h).
pub const ARRAY_MAX: u8 = 64;

/// What a fetch argument is shown as: `:u32`, `:string`, `:x8[16]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TypeName {
    /// Where it begins, behind the `:`.
    pub column: Column,
    /// The type; of an array, that of its elements.
    pub element: Element,
    /// How many elements there are, 1 to [`ARRAY_MAX`], if it is an array.
    pub count: Option<u8>,
}

/// A type, or that of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// `u8` to `u64`, `s8` to `s64`, `x8` to `x64`.
    Integer {
        /// How it is shown.
        shown: Shown,
        /// Its size in bits: 8, 16, 32 or 64.
        bits: u8,
    },
    /// `u`, `s`, `x`, `d`: a number as wide as its own type in C has it, 64 bits if that is no integer or not known.
    /// The kernel has none of these; `perf probe` has all but the last.
    Own {
        /// How it is shown; if nothing is said (`d`), in decimal: with a sign where its own type has one, and what is
        /// in a register and has none there as `s64`, as that may be an error.
        shown: Option<Shown>,
    },
    /// `char`: a character.
    Char,
    /// `string`: a text in the kernel's memory.
    String,
    /// `ustring`: a text in the user's memory.
    UserString,
    /// `symbol`: an address of the kernel, shown as a symbol with an offset.
    Symbol,
    /// `symstr`: the same as a text, made at the hit.
    SymbolString,
    /// `b4@2/8`: some bits of a number.
    Bitfield {
        /// How many bits; at least one.
        width: u8,
        /// The first of them, from the lowest.
        offset: u8,
        /// The number's size in bits: 8, 16, 32 or 64, and enough for the others.
        container: u8,
    },
    /// `%pd`: the path of the `dentry` that the value points to.
    DentryName,
    /// `%pD`: the path of the `file` that the value points to.
    FileName,
}

/// How a number is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shown {
    /// `u`: in decimal, without a sign.
    Unsigned,
    /// `s`: in decimal, with a sign.
    Signed,
    /// `x`: in hexadecimal.
    Hex,
}
