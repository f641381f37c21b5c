//! Patterns with which a client searches the symbols.

use hvprobe_arch::Gva;
use hvprobe_linux::symbols::{RawSymbol, SymbolKind, Symbols};

/// Searches a few names for a shell-style pattern, and looks the pattern up as a name. The pattern ends at the
/// first zero byte; each part after it is a further name in the table.
pub fn pattern(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.split('\0');
    let wanted = parts.next().unwrap_or_default();
    let names = ["vfs_read", "vfs_write", "__x64_sys_read"]
        .into_iter()
        .chain(parts);
    let symbols = Symbols::new(
        (0..).zip(names).map(|(n, name)| RawSymbol {
            name,
            addr: Gva(n * 0x10),
            size: None,
            kind: SymbolKind::Text,
        }),
        &[],
    );
    match symbols.lookup(wanted) {
        Ok(symbol) => assert_eq!(symbol.name, wanted),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match symbols.glob(wanted) {
        Ok(found) => {
            let found = found.count();
            assert!(found <= symbols.len());
            found > 0
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}
