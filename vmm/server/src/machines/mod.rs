//! The machines of a server: their names and identities, their boots and ends, and the calls into them.
//!
//! A machine knows neither the connections of its clients nor the services that call it.

pub(crate) mod arrivals;
mod change_counter;
pub(crate) mod fleet;
mod handle;
pub(crate) mod identity;
mod port;
mod requests;
mod session_view;
mod slots;

pub(crate) use fleet::Fleet;
pub(crate) use handle::Handle;
pub(crate) use port::Port;
