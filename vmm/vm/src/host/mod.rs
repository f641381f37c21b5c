//! Capabilities of this host.

mod check;
mod facts;
mod guests;
mod kvm;
mod micro_guest;
mod window;

pub use check::{Finding, HostReport, Verdict, catch_mode, check};
pub use facts::{Fact, facts};
pub use guests::OutRip;
pub use kvm::{SelfCheckError, open_kvm};
pub use micro_guest::MicroGuestError;
