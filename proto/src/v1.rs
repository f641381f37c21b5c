//! Version 1 of the interface, as it was generated.

#![allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    rustdoc::all,
    clippy::all,
    reason = "generated code: documented where its .proto file is, formed as the generator forms it"
)]

tonic::include_proto!("hvprobe.v1");
