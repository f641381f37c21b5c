//! Checks of this host, which need no machine. Servers answer `hvprobe doctor` with them.

pub use hvprobe_vm::host::{Fact, Finding, HostReport, SelfCheckError, Verdict, check, facts};
