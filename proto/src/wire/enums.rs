//! One table for each enum that values and messages share.
//!
//! Invariant: a value has the same name in our enum and in that of the messages. The compiler reports a value that
//! is missing in a table.

use hvprobe_arch::regs::Gpr;
use hvprobe_spec::{Common, Comparison, Excess, Mechanism, Memory};

use super::meaningless::Meaningless;
use crate::v1;

/// An enum whose values are numbers in messages. There, 0 stands for no value.
pub trait WireEnum: Copy + 'static {
    /// The enum of the messages.
    type Message: Into<i32> + TryFrom<i32>;

    /// All values, in the order of their numbers.
    const VALUES: &'static [Self];

    /// Name of the enum in errors.
    const WHAT: &'static str;

    /// Converts a value for a message.
    fn message(self) -> Self::Message;

    /// Converts a value of a message; `None` if it stands for no value.
    fn of(message: Self::Message) -> Option<Self>;

    /// Returns the number in a message.
    fn number(self) -> i32 {
        self.message().into()
    }

    /// Converts a number in a message; `None` for 0.
    ///
    /// # Errors
    /// When no value has that number.
    fn numbered(number: i32) -> Result<Option<Self>, Meaningless> {
        let what = Self::WHAT;
        let message = Self::Message::try_from(number);
        let message = message.map_err(|_| Meaningless::Unknown { what, number })?;
        Ok(Self::of(message))
    }
}

/// Defines the conversions of enums whose values have the same names in messages.
macro_rules! tables {
    ($($ours:ident = $theirs:ident, $what:literal: $($name:ident)+;)+) => {$(
        impl WireEnum for $ours {
            type Message = v1::$theirs;

            const VALUES: &'static [Self] = &[$(Self::$name),+];

            const WHAT: &'static str = $what;

            fn message(self) -> v1::$theirs {
                match self {
                    $(Self::$name => v1::$theirs::$name),+
                }
            }

            fn of(message: v1::$theirs) -> Option<Self> {
                match message {
                    v1::$theirs::Unspecified => None,
                    $(v1::$theirs::$name => Some(Self::$name)),+
                }
            }
        }
    )+};
}

tables! {
    Common = EventField, "field of an event": Comm Ip Flags Retval;
    Comparison = Comparison, "comparison": Equal NotEqual Less LessOrEqual Greater GreaterOrEqual AnyBit;
    Excess = Excess, "policy for what exceeds a budget": Sample Disable;
    Gpr = Register, "register": Rax Rbx Rcx Rdx Rsi Rdi Rsp Rbp R8 R9 R10 R11 R12 R13 R14 R15;
    Mechanism = Mechanism, "mechanism": Emulated Stepped Boosted Optimized;
    Memory = MemoryOf, "memory": Kernel User Either;
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;

    fn check<T: WireEnum + Debug + PartialEq>()
    where
        T::Message: Debug,
    {
        for (value, number) in T::VALUES.iter().zip(1..) {
            assert_eq!(value.number(), number, "{value:?}");
            assert_eq!(T::numbered(number), Ok(Some(*value)));
            assert_eq!(format!("{value:?}"), format!("{:?}", value.message()));
        }
        assert_eq!(T::numbered(0), Ok(None));
        let what = T::WHAT;
        let last = i32::try_from(T::VALUES.len()).unwrap();
        for number in [-1, last + 1, i32::MAX] {
            assert_eq!(
                T::numbered(number),
                Err(Meaningless::Unknown { what, number })
            );
        }
    }

    #[test]
    fn values_have_the_same_numbers_and_names_in_both_directions() {
        check::<Common>();
        check::<Comparison>();
        check::<Excess>();
        check::<Gpr>();
        check::<Mechanism>();
        check::<Memory>();
    }
}
