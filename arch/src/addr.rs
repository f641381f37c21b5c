//! Newtypes for the kinds of address, so that mixing them does not compile.

use std::fmt;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// Returns the address `bytes` further on, or `None` past the end of the address space.
            #[must_use]
            pub fn checked_add(self, bytes: u64) -> Option<Self> {
                self.0.checked_add(bytes).map(Self)
            }

            /// Returns the address `bytes` further on, modulo 2^64, as the processor computes it.
            #[must_use]
            pub fn wrapping_add(self, bytes: u64) -> Self {
                Self(self.0.wrapping_add(bytes))
            }

            /// Returns the address `bytes` before this one, modulo 2^64.
            #[must_use]
            pub fn wrapping_sub(self, bytes: u64) -> Self {
                Self(self.0.wrapping_sub(bytes))
            }

            /// Returns the number of bytes from `earlier` to this address, or `None` if `earlier` is higher.
            #[must_use]
            pub fn offset_from(self, earlier: Self) -> Option<u64> {
                self.0.checked_sub(earlier.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }
    };
}

address! {
    /// A guest physical address.
    Gpa
}
address! {
    /// A guest virtual (linear) address.
    Gva
}
