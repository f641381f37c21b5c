//! What this host can do, for those who have no machine yet: servers answer `hvprobe doctor` with it.

pub use hvprobe_vm::host::{Fact, Finding, HostReport, SelfCheckError, Verdict, check, facts};
