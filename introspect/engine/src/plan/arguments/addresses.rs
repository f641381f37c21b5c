//! Which addresses a function has, for filters by it. Only those of the kernel's own text are taken: they stay where they
//! are, while what is loaded at a module's may be another's tomorrow.

use hvprobe_arch::Gva;
use hvprobe_linux::symbols::Symbols;
use hvprobe_spec::fetch::Value;

/// The first and the last address of the function, one of these `symbols`, that `value` names, or that has this address,
/// or why there is none.
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
