//! Histograms as text and as JSON: entries, bars, and maps as bpftrace prints them. It formats what the server
//! has counted, and counts nothing.

pub(crate) mod bars;
mod entries;
pub(crate) mod key;
mod maps;

pub(crate) use entries::{Look, text};
