//! Waiting for what may not be there.

use std::future::{Future, pending};

/// What comes of `future`; never, if there is none.
pub(crate) async fn or_never<F: Future>(future: Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => pending().await,
    }
}
