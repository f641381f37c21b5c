//! Events of a machine: encoding, holding and sending them to clients.

pub(crate) mod broadcast;
pub(crate) mod codec;
mod encoded;
mod held;
mod position;
pub(crate) mod published;
pub(crate) mod subscription;
pub(crate) mod wanted;

pub(crate) use encoded::Encoded;
pub(crate) use position::{Lost, Position};
