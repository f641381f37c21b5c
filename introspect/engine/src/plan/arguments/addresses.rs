//! Which addresses a function has, for filters by it.

use hvprobe_arch::Gva;
use hvprobe_linux::symbols::{LookupError, Symbol};
use hvprobe_spec::fetch::Value;

use crate::plan::kernel::Probeable;

/// The first and the last address of the function that `value` names, or that has this address, or why there is none.
pub(super) fn of_function(kernel: &Probeable<'_>, value: &Value) -> Result<(u64, u64), String> {
    let symbol = match value {
        Value::Name(name) => named(kernel, name)?,
        Value::Number { value, .. } => at(kernel, Gva(*value))?,
        Value::Text(_) | Value::Cpus(_) => return Err("a function is named without quotes".into()),
    };
    let last = symbol.addr.0.saturating_add(symbol.size.max(1) - 1);
    Ok((symbol.addr.0, last))
}

fn named<'a>(kernel: &Probeable<'a>, name: &str) -> Result<Symbol<'a>, String> {
    let unknown = match kernel.image.symbols().lookup(name) {
        Err(unknown @ LookupError::Unknown { .. }) => unknown,
        found => return found.map_err(|why| why.to_string()),
    };
    let in_module = kernel.modules.map(|modules| modules.lookup(name));
    match in_module {
        Some(Ok((module, symbol))) if kernel.is_loaded(module) => Ok(symbol),
        _ => Err(unknown.to_string()),
    }
}

fn at<'a>(kernel: &Probeable<'a>, at: Gva) -> Result<Symbol<'a>, String> {
    let symbols = match kernel.module_at(at) {
        Some(module) => module.symbols(),
        None => kernel.image.symbols(),
    };
    let found = symbols.containing(at).map(|(symbol, _)| symbol);
    found.ok_or_else(|| format!("no symbol contains {at}"))
}
