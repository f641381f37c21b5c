//! Who makes a call.
//!
//! Invariant: a call that reaches a handler has a caller, because the admission of calls adds it.

use std::fmt;

use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use tonic::{Code, Request, Status};

/// The client that makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Number of its connection, which no other connection of this process has.
    pub(crate) connection: u64,
    /// How the client is authenticated.
    pub(crate) credential: Credential,
}

/// What a client is authenticated by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Credential {
    /// Its connection, which only authenticated clients can make.
    Connection,
    /// The token of the server.
    Token,
}

impl Caller {
    /// Returns the caller of `request`.
    ///
    /// # Errors
    /// When the call was not admitted.
    pub(crate) fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        let caller = request.extensions().get::<Self>();
        caller.copied().ok_or_else(unknown)
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = match self.credential {
            Credential::Connection => "",
            Credential::Token => ", by token",
        };
        write!(f, "connection {}{by}", self.connection)
    }
}

/// Returns the error for a call whose connection is unknown.
pub(super) fn unknown() -> Status {
    let why = "it is not known where this call came from";
    Failure::new(Code::Unauthenticated, ErrorKind::Unauthenticated, why).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_that_was_not_admitted_has_no_caller() {
        let mut call = Request::new(());
        let refused = Caller::of(&call).unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let caller = Caller {
            connection: 7,
            credential: Credential::Token,
        };
        call.extensions_mut().insert(caller);
        assert_eq!(Caller::of(&call).unwrap(), caller);
        assert_eq!(caller.to_string(), "connection 7, by token");
    }
}
