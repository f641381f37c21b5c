//! Format of a value's bytes: a type of C, resolved as far as is necessary for printing.
//!
//! Invariant: a shape is finite and complete. It refers to no types of a kernel, so a client can print values
//! without access to the kernel.

/// Type with its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Type in C syntax, without a variable: `unsigned int`, `struct file *`, `char[16]`.
    pub name: String,
    /// Size in bytes.
    pub size: u32,
    /// Interpretation of the bytes.
    pub kind: ShapeKind,
}

/// Interpretation of a value's bytes. Numbers are little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShapeKind {
    /// Unsigned number, shown in decimal.
    Unsigned,
    /// Number in two's complement.
    Signed,
    /// Unsigned number, shown in hexadecimal.
    Hex,
    /// Character.
    Char,
    /// `_Bool`.
    Bool,
    /// Address.
    Pointer,
    /// Kernel address, shown as a symbol with an offset.
    Symbol,
    /// Number with names for some of its values.
    Enum {
        /// Whether the number is in two's complement.
        signed: bool,
        /// Names, in the order of the declaration.
        values: Vec<Enumerator>,
    },
    /// Array.
    Array {
        /// Type of the elements.
        element: Box<Shape>,
        /// Number of elements.
        count: u32,
    },
    /// Structure or union.
    Struct {
        /// Whether it is a union, whose members overlap.
        union: bool,
        /// Members in the order of the declaration. The members of an anonymous member replace it.
        members: Vec<Member>,
    },
    /// Text up to a NUL.
    String,
    /// Type that can only be shown as bytes.
    Bytes,
    /// Type that a server sent and this program does not understand. Its values cannot be shown.
    Unknown,
}

/// Value with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enumerator {
    /// Name of the value.
    pub name: String,
    /// The value. If the enumeration is unsigned, this field has the bits of the value.
    pub value: i64,
    /// Mask of the bits that are compared with `value`; if `None`, all bits are compared. `Some` if the enumerators
    /// are flags.
    pub mask: Option<u64>,
}

/// Member of a structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name; never empty.
    pub name: String,
    /// Offset from the start of the structure, in bits.
    pub offset: u32,
    /// Number of bits, if the member is a bit field.
    pub width: Option<u8>,
    /// Type of the member.
    pub shape: Shape,
}
