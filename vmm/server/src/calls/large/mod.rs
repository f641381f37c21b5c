//! Limits for requests and answers that are larger than most.
//!
//! ```text
//!   request ──complete──► small: served
//!      │                  large: waits for its connection's turn, then for a permit ──► served ──► permit returned
//!      └──incomplete after WHOLE, or no permit after PATIENCE──► refused, nothing was done
//!
//!   call with a long answer ──permit──► served ──► small answer: permit returned
//!      │                                     └──► large answer: permit returned when the socket has taken it
//!      └──no permit after UNREAD──► refused, nothing was done
//! ```
//! Invariants:
//! - A request that is not served yet holds at most [`sizes::SMALL`] bytes, unless it has a permit. A decoded
//!   request without a permit holds at most [`sizes::LIGHT`] bytes; nothing is decoded beyond [`sizes::HEAVIEST`].
//! - Each connection has at most one large request under way, so one client cannot take all permits. A waiting
//!   request holds no permit. A request with a permit has at most [`request::WHOLE`] to arrive, and its permit is
//!   released when the call is done.
//! - Each connection can always have one long answer under way, even if others have taken all permits.
//! - A call that was carried out is answered.

mod answer;
mod framing;
mod layer;
mod request;
mod sizes;
mod weight;

pub(crate) use layer::LargeLayer;
