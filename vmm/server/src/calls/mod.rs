//! What every call passes on its way to a service and back: its deadline, the permits for streams and large
//! messages, and the containment of panics.
//!
//! Nothing here knows a service or a machine: the types of a call's request and answer are read from the
//! interface's descriptors.

pub(crate) mod deadline;
pub(crate) mod interface;
pub(crate) mod large;
pub(crate) mod panics;
pub(crate) mod streams;
