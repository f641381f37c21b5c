//! What the bytes of a value mean: a type of C, taken apart as far as it is needed to print it.
//!
//! Invariant: a shape is finite, and says everything. It refers to no types of a kernel, so that a client
//! that knows no kernel prints values by it.

/// A type, with its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The type as C writes it without a variable: `unsigned int`, `struct file *`, `char[16]`.
    pub name: String,
    /// Its size in bytes.
    pub size: u32,
    /// How its bytes are to be taken.
    pub kind: ShapeKind,
}

/// How the bytes of a value are to be taken. Numbers are little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShapeKind {
    /// An unsigned number, shown in decimal.
    Unsigned,
    /// A number in two's complement.
    Signed,
    /// An unsigned number, shown in hexadecimal.
    Hex,
    /// A character.
    Char,
    /// `_Bool`.
    Bool,
    /// An address.
    Pointer,
    /// An address of the kernel, shown as a symbol with an offset.
    Symbol,
    /// A number some values of which have names.
    Enum {
        /// Whether the number is in two's complement.
        signed: bool,
        /// The names, in the order of the declaration.
        values: Vec<Enumerator>,
    },
    /// Elements one behind the other.
    Array {
        /// What each is.
        element: Box<Shape>,
        /// How many there are.
        count: u32,
    },
    /// Members of a structure, or of a union.
    Struct {
        /// Whether the members lie in the same place.
        union: bool,
        /// In the order of the declaration; members of anonymous members are in their place.
        members: Vec<Member>,
    },
    /// Bytes up to a NUL.
    String,
    /// Something that cannot be shown but as bytes.
    Bytes,
}

/// A value that has a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enumerator {
    /// The name.
    pub name: String,
    /// The value; of an unsigned enumeration, its bits.
    pub value: i64,
    /// The bits that tell, if not all of them do: of a number made of flags.
    pub mask: Option<u64>,
}

/// A member of a structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name; never empty.
    pub name: String,
    /// Bits from the beginning of the structure.
    pub offset: u32,
    /// How many bits it has, if it is a bit field.
    pub width: Option<u8>,
    /// Its type.
    pub shape: Shape,
}
