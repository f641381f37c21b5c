//! Types of fetch arguments.

use crate::column::Column;

/// Maximum number of elements of an array, as in the kernel (`MAX_ARRAY_LEN` in kernel/trace/trace_probe.h).
pub const ARRAY_MAX: u8 = 64;

/// Type of a fetch argument: `:u32`, `:string`, `:x8[16]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TypeName {
    /// Column of the type, after the `:`.
    pub column: Column,
    /// The type; for an array, that of its elements.
    pub element: Element,
    /// Number of elements, 1 to [`ARRAY_MAX`], if the type is an array.
    pub count: Option<u8>,
}

/// Type of a value or of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// `u8` to `u64`, `s8` to `s64`, `x8` to `x64`.
    Integer {
        /// Format of the number.
        shown: Shown,
        /// Size in bits: 8, 16, 32 or 64.
        bits: u8,
    },
    /// `u`, `s`, `x`, `d`: a number with the width of the value's own C type, or of 64 bits if the C type is
    /// unknown or no integer type. The kernel does not have these types; `perf probe` has all except `d`.
    Own {
        /// Format of the number. `None` (`d`) means decimal, with a sign if the C type has one. But an unsigned
        /// value in a register is shown as `s64`, because it may be a negative error number.
        shown: Option<Shown>,
    },
    /// `char`: a character.
    Char,
    /// `string`: a text in kernel memory.
    String,
    /// `ustring`: a text in user memory.
    UserString,
    /// `symbol`: a kernel address, shown as a symbol with an offset.
    Symbol,
    /// `symstr`: shown like `symbol`. The kernel makes this text at the hit.
    SymbolString,
    /// `b4@2/8`: a bit field of a number.
    Bitfield {
        /// Number of bits; at least one.
        width: u8,
        /// Position of the lowest bit.
        offset: u8,
        /// Size of the whole number in bits: 8, 16, 32 or 64. The bit field is within it.
        container: u8,
    },
    /// `%pd`: the path of the `dentry` that the value points to.
    DentryName,
    /// `%pD`: the path of the `file` that the value points to.
    FileName,
}

/// Format of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shown {
    /// `u`: in decimal, without a sign.
    Unsigned,
    /// `s`: in decimal, with a sign.
    Signed,
    /// `x`: in hexadecimal.
    Hex,
}
