//! Address ranges of functions, for filters. Only functions of the kernel's own text are accepted: their addresses
//! never change, whereas the addresses of an unloaded module may be reused for another one.

use hvprobe_arch::Gva;
use hvprobe_linux::symbols::Symbols;
use hvprobe_spec::fetch::Value;

/// Returns the first and the last address of a function, or why there is no such function. `value` is its name in
/// `symbols`, or an address in the function.
pub(super) fn of_function(symbols: &Symbols, value: &Value) -> Result<(u64, u64), String> {
    let symbol = match value {
        Value::Name(name) => symbols.lookup(name).map_err(|why| why.to_string())?,
        Value::Number { value, .. } => {
            let at = Gva(*value);
            let found = symbols.containing(at).map(|(symbol, _)| symbol);
            found.ok_or_else(|| format!("no symbol of the kernel's contains {at}"))?
        }
        Value::Text(_) => return Err("a function is named without quotes".into()),
        Value::Cpus(_) => return Err("processors are no function".into()),
    };
    let last = symbol.addr.0.saturating_add(symbol.size.max(1) - 1);
    Ok((symbol.addr.0, last))
}
