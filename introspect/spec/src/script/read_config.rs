//! Parser for the block of settings at the start of a script.
//!
//! Invariant: a setting is ignored only if it would not change the effect of a script here. All others are refused
//! with an error that names them.

use super::cursor::Cursor;
use crate::parse_error::{ParseError, error, quoted};

/// Settings that concern only bpftrace itself: its memory, how it loads programs, and which symbols of
/// processes it keeps.
const HARMLESS: [&str; 13] = [
    "cache_user_symbols",
    "cpp_demangle",
    "lazy_symbolication",
    "license",
    "log_size",
    "max_ast_nodes",
    "max_bpf_progs",
    "max_map_keys",
    "max_probes",
    "max_strlen",
    "max_type_res_iterations",
    "on_stack_limit",
    "perf_rb_pages",
];

/// Skips `config = { NAME = VALUE; ... }`, if it comes next.
pub(super) fn read_config(cursor: &mut Cursor) -> Result<(), ParseError> {
    if !cursor.eat_word("config") {
        return Ok(());
    }
    cursor.blanks()?;
    cursor.expect("=", "`=` and `{` belong here: config = { NAME = VALUE; }")?;
    cursor.blanks()?;
    let opened = cursor.at();
    cursor.expect("{", "`{` belongs here: config = { NAME = VALUE; }")?;
    loop {
        cursor.blanks()?;
        if cursor.eat("}") {
            return cursor.blanks();
        }
        if cursor.eat(";") {
            continue;
        }
        if cursor.peek().is_none() {
            return error(opened, "these settings have no end: missing `}`");
        }
        let start = cursor.at();
        let name = cursor.word();
        if name.is_empty() {
            return error(start, "the name of a setting belongs here");
        }
        if !HARMLESS.contains(&name.to_ascii_lowercase().as_str()) {
            let message = format!("not supported: the setting {}; leave it out", quoted(&name));
            return error(start, message);
        }
        cursor.blanks()?;
        cursor.expect("=", "`=` and a value belong here")?;
        cursor.take(|c| !matches!(c, ';' | '}' | '\n'));
    }
}
