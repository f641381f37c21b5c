//! Waiting for an optional future.

use std::future::{Future, pending};

/// Returns the output of `future`. Waits forever if there is no future.
pub(crate) async fn or_never<F: Future>(future: Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => pending().await,
    }
}
