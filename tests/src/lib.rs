//! Code that the tests share: the rig in which they may run, and the guests that they boot there.
//!
//! The tests in `tests/rig/` boot stock Linux guests, which needs a host whose KVM can run them. Where
//! `HVPROBE_RIG` names such a host (`cargo lab test` sets it), these tests run; elsewhere they are reported as
//! skipped. Tests named `micro_*` boot a kernel of a few hundred bytes, or run single instructions
//! ([`differential`]), on any KVM. The inputs that decoders must withstand are in [`fuzz`].

pub mod detour;
pub mod differential;
pub mod fuzz;
pub mod micro;
pub mod names;
pub mod program;
pub mod progress;
pub mod rig;
pub mod wait;
