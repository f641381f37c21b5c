//! The registry: which probes exist, where they are planted, and every change to them.
//!
//! ```text
//!             register                    text final                 unregister
//!  (booting) ──────────► pending ───────────────────► placed ──────────────────► removed
//!                            └─────► refused             │ ▲
//!  (live)    ──────────────────────────────────► placed ◄┘ │ enable / disable
//! ```
//! A *site* is one address with the probes at it, in the order of their registration. It carries our int3, or a
//! jump, while one of them is enabled, unless the global switch is off or the site is left to the guest.
//! Invariants: a batch is registered whole or not at all and costs one stop of the virtual CPUs; text is written
//! only in that stop; the virtual CPUs leave the stop with a table that matches the text.
//!
//! [`Registry`] is a set of values: probes, sites, code of ours in the guest, facts about the guest. Most
//! operations that need only some of these values are functions over them, so that their signatures say what they
//! can change: [`live_plan`] finds probepoints; [`place`] creates probes and assigns them to sites; [`optimize`]
//! decides and changes nothing; [`prepare`], [`recorders`] and [`slots`] make code; [`quiescence`],
//! [`guest_kprobes`], [`kprobe_registration`] and [`ftrace`] keep jumps and int3s away from where they must not be;
//! [`looks`] says when the next look is due, and [`release`] releases the ghosts that no task can reach; [`table`]
//! builds the table. The registry's own methods are the requests of clients and of the guest, its [`hooks`], and
//! the change in [`commit`], which calls all these functions.

pub(crate) mod change;
pub(crate) mod commit;
pub(crate) mod expand;
pub(crate) mod ftrace;
pub(crate) mod guest_kprobes;
pub(crate) mod hook_state;
pub(crate) mod hooks;
pub(crate) mod kprobe_registration;
pub(crate) mod list;
pub(crate) mod live;
pub(crate) mod live_plan;
pub(crate) mod looks;
pub(crate) mod module_loading;
pub(crate) mod modules;
pub(crate) mod optimize;
pub(crate) mod place;
pub(crate) mod plant;
pub(crate) mod prepare;
pub(crate) mod quiescence;
pub(crate) mod recorders;
pub(crate) mod register;
pub(crate) mod release;
pub(crate) mod replaced;
pub(crate) mod retry;
pub(crate) mod slots;
pub(crate) mod state;
pub(crate) mod switches;
pub(crate) mod table;
#[cfg(test)]
mod tests;
pub(crate) mod throttle;
pub(crate) mod usage;

pub use hooks::HookOutcome;
pub use retry::{Looked, Retry};
pub use state::Registry;
pub use usage::Usage;
