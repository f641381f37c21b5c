//! Limits for requests and answers that are larger than most.
//!
//! ```text
//!   request ──complete──► small: served
//!      │                  large: waits for its connection's turn, then for a permit ──► served ──► permit returned
//!      └──incomplete after WHOLE, or no permit after PATIENCE──► refused, nothing was done
//!
//!   call with a long answer ──permit──► served ──► small answer: permit returned
//!      │                                     └──► large answer: permit returned when the socket has taken it
//!      └──no permit after PATIENCE──► refused, nothing was done
//! ```
//! Invariants:
//! - Unserved requests hold at most [`SMALL`] bytes each, besides those with a permit. A decoded request without a
//!   permit holds at most [`LIGHT`] bytes; nothing is decoded beyond [`HEAVIEST`].
//! - Each connection has at most one large request under way, so one client cannot take all permits. A waiting
//!   request holds no permit, and every permit comes back after [`request::WHOLE`] and the call.
//! - Each connection can always have one long answer under way, whatever others do.
//! - A call that was carried out is answered.

mod answer;
mod framing;
mod layer;
mod request;
mod weight;

pub(crate) use layer::LargeLayer;

/// Bytes of a small message.
const SMALL: usize = 128 << 10;
/// Bytes that a small message may take once decoded.
const LIGHT: usize = 1 << 20;
/// Bytes that any message may take once decoded: twice the largest batch of probes with 32 captures each.
const HEAVIEST: usize = 128 << 20;
