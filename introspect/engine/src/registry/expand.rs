//! Expansion of patterns in definitions to the matching functions.
//!
//! Invariant: every function is taken once, under the first of its names that matches, and every definition
//! made here means exactly that function, even if several share the name. Matches are functions only: not data,
//! padding before an entry, init text or, unless the pattern has a dot, parts and clones that the compiler
//! makes (`foo.cold`, `foo.part.0`, `foo.isra.0`).

use std::borrow::Cow;

use hvprobe_linux::symbols::{Symbol, SymbolKind};
use hvprobe_spec::ProbeSpec;
use hvprobe_spec::definition::{KERNEL, Kind, Target, is_event_name, is_symbol_name};

use crate::plan::kernel::{Owner, Probeable};
use crate::refusal::Refused;
use crate::registered::BATCH_MAX;

/// Expands `spec` for `kernel`: returns `spec` itself, or one specification per function that matches its
/// pattern. `room` is the number of probes that the batch may still get.
pub(crate) fn singles<'s>(
    kernel: &Probeable<'_>,
    spec: &'s ProbeSpec,
    room: usize,
) -> Result<Vec<Cow<'s, ProbeSpec>>, Refused> {
    let Target::Functions { module, pattern } = &spec.definition.target else {
        return Ok(vec![Cow::Borrowed(spec)]);
    };
    let mut targets = Vec::new();
    match module {
        Some(name) if name == KERNEL => {
            add(&mut targets, pattern, None, Owner::Image(kernel.image));
        }
        Some(name) => {
            let found = kernel.modules.and_then(|modules| modules.get(name));
            let module = found.filter(|module| kernel.is_loaded(module));
            let module = module.ok_or_else(|| Refused::ModuleNeeded {
                module: name.clone(),
                pattern: pattern.clone(),
            })?;
            add(&mut targets, pattern, Some(name), Owner::Module(module));
        }
        None => {
            add(&mut targets, pattern, None, Owner::Image(kernel.image));
            let modules = kernel.modules.into_iter().flatten();
            for module in modules.filter(|module| kernel.is_loaded(module)) {
                let name = Some(module.name());
                add(&mut targets, pattern, name, Owner::Module(module));
            }
        }
    }
    if targets.is_empty() {
        return Err(Refused::NoMatch {
            pattern: pattern.clone(),
            near: near(kernel, pattern),
        });
    }
    if targets.len() > room {
        return Err(Refused::TooManyMatches {
            pattern: pattern.clone(),
            matches: BATCH_MAX - room + targets.len(),
            max: BATCH_MAX,
        });
    }
    let single = |found: MatchedFunction<'_>| {
        let mut single = spec.clone();
        let definition = &mut single.definition;
        let (event, target) = found.named(definition.kind);
        // With a pattern, the definition's name can only be a group.
        definition.name = match (definition.name.take(), event) {
            (Some(group), Some(event)) => Some(group + &event),
            (group, event) => group.or(event),
        };
        definition.target = target;
        Cow::Owned(single)
    };
    Ok(targets.into_iter().map(single).collect())
}

/// A matching function.
struct MatchedFunction<'a> {
    symbol: Symbol<'a>,
    module: Option<&'a str>,
    /// Whether no other function has its name.
    unique: bool,
}

impl MatchedFunction<'_> {
    /// Returns the name and the target of a definition of this function. If the function's name is ambiguous,
    /// the target is the address, and the event is named after the function.
    fn named(&self, kind: Kind) -> (Option<String>, Target) {
        let name = self.symbol.name;
        if self.unique && is_symbol_name(name) {
            let target = Target::Symbol {
                module: self.module.map(str::to_owned),
                name: name.to_owned(),
                offset: 0,
            };
            return (None, target);
        }
        let letter = match kind {
            Kind::Probe => 'p',
            Kind::Return { .. } => 'r',
        };
        let event = format!("{letter}_{}_0", name.replace('.', "_"));
        let event = is_event_name(&event).then_some(event);
        (event, Target::Address(self.symbol.addr))
    }
}

/// Adds the functions of `owner` whose names match `pattern`, in the order of their addresses.
fn add<'a>(
    found: &mut Vec<MatchedFunction<'a>>,
    pattern: &str,
    module: Option<&'a str>,
    owner: Owner<'a>,
) {
    let symbols = owner.symbols();
    // A pattern from a parsed definition is valid.
    let Ok(matching) = symbols.glob(pattern) else {
        return;
    };
    let with_parts = pattern.contains('.');
    let mut last = None;
    for symbol in matching {
        let is_function = symbol.kind == SymbolKind::Text
            && owner.is_text(symbol.addr)
            && (with_parts || !symbol.name.contains('.'))
            && !PADDING.iter().any(|mark| symbol.name.starts_with(mark));
        if is_function && last.replace(symbol.addr) != Some(symbol.addr) {
            let unique = matches!(symbols.candidates(symbol.name).as_slice(), [_]);
            found.push(MatchedFunction {
                symbol,
                module,
                unique,
            });
        }
    }
}

/// Prefixes of the symbols of the padding before a function.
const PADDING: [&str; 2] = ["__pfx_", "__cfi_"];

/// Returns names that are similar to the longest part of `pattern` without wildcards.
fn near(kernel: &Probeable<'_>, pattern: &str) -> Vec<String> {
    let parts = pattern.split(['*', '?', '[', ']']);
    let longest = parts.max_by_key(|part| part.len()).unwrap_or_default();
    kernel.image.symbols().near(longest.trim_matches('_'))
}
