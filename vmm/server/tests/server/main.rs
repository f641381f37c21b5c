//! A server as its clients meet it, over real sockets: one program, as each takes half a minute to build.

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
