//! Tests of a server as its clients see it, over real sockets: one program, because each takes half a minute to
//! build.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

mod bounds;
mod deadlines;
mod keepalive;
mod loopback;
mod packages;
mod streams;
