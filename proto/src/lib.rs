//! The `hvprobe.v1` gRPC interface: messages, clients and servers, generated from `hvprobe/v1/*.proto`.
//!
//! The `.proto` files are the reference; their comments document what is generated here. The rest is written by
//! hand, for both ends or for clients only: it decodes messages ([`Whole`]), converts them ([`wire`]), makes errors
//! ([`Failure`]), reads the token that clients show ([`Token`]), and connects Rust clients ([`Client`], [`roomy`]).

mod client;
mod codec;
mod endpoint;
mod failure;
pub mod limits;
mod token;
pub mod v1;
pub mod wire;

pub use client::{Calls, Client, ConnectError, ExplainingChannel, TokenInterceptor};
pub use codec::{Whole, WholeDecoder};
pub use endpoint::roomy;
pub use failure::{Failure, detail};
pub use token::{NotAToken, Token, TokenError};

/// The encoded `google.protobuf.FileDescriptorSet` of the interface, for gRPC reflection and for tools that use the
/// interface without generated code.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hvprobe.v1.bin"));
