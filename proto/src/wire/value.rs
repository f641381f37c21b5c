//! The conversion of a value to its message and back.

use super::meaningless::Meaningless;

/// A value that has a message.
///
/// Invariant: what a value becomes means this value again.
pub trait Wire: Sized {
    /// Its message.
    type Message;

    /// Makes the message.
    fn to_wire(&self) -> Self::Message;

    /// Reads the message.
    ///
    /// # Errors
    /// When a field of it means nothing.
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

/// Converts `number`, of `what`, to a smaller type.
pub(super) fn small<T: TryFrom<u32>>(what: &'static str, number: u32) -> Result<T, Meaningless> {
    T::try_from(number).map_err(|_| Meaningless::TooLarge { what, number })
}
