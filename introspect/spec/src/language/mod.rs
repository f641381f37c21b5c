//! Text form of the actions and budgets of probes.
//!
//! ```text
//! capture   = register | memory [":" LENGTH] | "$stack" N
//! change    = register "=" value | place "=" bytes
//! condition = register ("==" | "!=" | "<" | "<=" | ">" | ">=" | "&") value
//! decision  = part {"," part}
//! part      = "proceed" | "return=" value | "jump=" ADDRESS | change
//! ask       = TIME ("ms" | "s") ["," decision]
//! rate      = HITS ["/s"]
//! share     = PERCENT ["%"]
//!
//! register  = "%" NAME                       %di or %rdi, %r8
//! memory    = ("+" | "-") OFFSET "(" register ")"
//! place     = memory | "@" ADDRESS
//! value     = ["-"] number | "-" ERROR       -5, 0x10, -ENOMEM
//! bytes     = "hex:" DIGITS | ("u8:" | "u16:" | "u32:" | "u64:") value
//! ```
//! Numbers are decimal, or hexadecimal after `0x`. Blanks are allowed around elements, not inside. Registers and
//! memory look as in the fetch arguments of the kernel's `kprobe_events`. Invariants: the output of [`text`] parses
//! to the value that was printed, unless it is an item for which this language has no form. An error points at the
//! character that it is about.
//!
//! The line with a probe's place is a [`definition`](crate::definition).

mod budget;
mod read;
pub mod text;

#[cfg(test)]
mod tests;

pub use budget::{rate, share};
pub use read::{Capture, address, ask, capture, change, condition, decision, value};
