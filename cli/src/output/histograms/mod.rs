//! Histograms as text and as JSON: entries, bars, and maps as bpftrace prints them. It formats what the server
//! has counted, and counts nothing.

pub(crate) mod bars;
mod entries;
pub(crate) mod key;
mod maps;
mod schema;

pub(crate) use entries::{Look, text};
pub(crate) use schema::{Key, Schema};
