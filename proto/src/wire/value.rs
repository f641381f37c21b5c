//! The conversion of a value to its message and back.

use super::meaningless::Meaningless;

/// A value that can be converted to a message and back.
///
/// Invariant: [`from_wire`](Wire::from_wire) converts the result of [`to_wire`](Wire::to_wire) to the same value.
pub trait Wire: Sized {
    /// Type of the message.
    type Message;

    /// Converts the value to a message.
    fn to_wire(&self) -> Self::Message;

    /// Converts a message to the value.
    ///
    /// # Errors
    /// When a field of the message means nothing.
    fn from_wire(message: Self::Message) -> Result<Self, Meaningless>;
}

impl<T: Wire> Wire for Vec<T> {
    type Message = Vec<T::Message>;

    fn to_wire(&self) -> Self::Message {
        self.iter().map(T::to_wire).collect()
    }

    fn from_wire(messages: Self::Message) -> Result<Self, Meaningless> {
        messages.into_iter().map(T::from_wire).collect()
    }
}

/// Converts `number` to a smaller type. `what` names the number in the error.
pub(super) fn small<T: TryFrom<u32>>(what: &'static str, number: u32) -> Result<T, Meaningless> {
    T::try_from(number).map_err(|_| Meaningless::TooLarge { what, number })
}
