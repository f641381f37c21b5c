//! Kernel stacks as text.

use hvprobe_proto::v1;
use hvprobe_sources::SourceLine;
use hvprobe_spec::FRAME;

use super::names::Names;
use super::value_json::Json;

/// Kernel stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StackTrace {
    /// Addresses, the innermost first.
    pub(crate) addresses: Vec<u64>,
    /// Whether the stack has more addresses.
    pub(crate) goes_on: bool,
}

impl From<&v1::StackTrace> for StackTrace {
    fn from(stack: &v1::StackTrace) -> Self {
        Self {
            addresses: stack.addresses.clone(),
            goes_on: false,
        }
    }
}

impl StackTrace {
    /// Makes a stack from the lower 32 bits of each address.
    pub(in crate::output) fn of(halves: &[u8], goes_on: bool) -> Self {
        /// Upper 32 bits of each address.
        const HIGH: u64 = 0xffff_ffff_0000_0000;
        let (halves, _) = halves.as_chunks::<FRAME>();
        let address = |half: &[u8; FRAME]| u64::from(u32::from_le_bytes(*half)) | HIGH;
        Self {
            addresses: halves.iter().map(address).collect(),
            goes_on,
        }
    }

    /// Formats the stack as ftrace does with `sym-offset`: each address on a line of its own, after a line break,
    /// with its source line if that is known.
    pub(in crate::output) fn text(&self, names: &Names) -> String {
        let mut text = self.indented("\n => ", names);
        if self.goes_on {
            text.push_str("\n => ...");
        }
        text
    }

    /// Returns one address per line, each after `before`.
    pub(crate) fn indented(&self, before: &str, names: &Names) -> String {
        let frames = self.addresses.iter().enumerate();
        let text = |(depth, address): (usize, &u64)| {
            let line = line(depth, *address, names);
            let line = line.map(|it| format!(" ({}:{})", it.file, it.line));
            format!(
                "{before}{}{}",
                place(*address, names),
                line.unwrap_or_default()
            )
        };
        frames.map(text).collect()
    }

    /// Returns the addresses with their symbols as JSON.
    pub(in crate::output) fn json(&self, names: &Names) -> Json {
        let frame = |(depth, address): (usize, &u64)| {
            let symbol = names.symbol(*address);
            let name = symbol.map_or(Json::Null, |(name, _)| Json::Text(name.to_owned()));
            let offset = symbol.map_or(Json::Null, |(_, offset)| Json::Unsigned(offset));
            let mut fields = vec![
                ("addr".to_owned(), Json::Text(format!("{address:#x}"))),
                ("symbol".to_owned(), name),
                ("offset".to_owned(), offset),
            ];
            if names.has_lines() {
                let (file, number) = match line(depth, *address, names) {
                    Some(line) => (Json::Text(line.file), Json::Unsigned(line.line)),
                    None => (Json::Null, Json::Null),
                };
                fields.extend([("file".to_owned(), file), ("line".to_owned(), number)]);
            }
            Json::Object(fields)
        };
        Json::List(self.addresses.iter().enumerate().map(frame).collect())
    }

    /// Returns the innermost function.
    pub(in crate::output) fn innermost(&self, names: &Names) -> String {
        let first = self.addresses.first();
        first.map_or_else(String::new, |address| place(*address, names))
    }

    /// Returns the stack in the format of `flamegraph.pl`: functions from the outermost to the innermost,
    /// separated by semicolons.
    pub(in crate::output) fn folded(&self, names: &Names) -> String {
        let function = |address: &u64| match names.symbol(*address) {
            Some((symbol, _)) => in_module(symbol, ""),
            None => format!("{address:#x}"),
        };
        // In this format semicolons separate functions, and the count follows the last blank, so names must contain
        // neither.
        let functions = self.addresses.iter().rev();
        let functions: Vec<_> = functions
            .map(|address| function(address).replace([';', ' '], "_"))
            .collect();
        functions.join(";")
    }
}

/// Returns the source line of the frame at `depth`. In all frames but the innermost, `address` is a return address,
/// and the line is that of the call before it.
fn line(depth: usize, address: u64, names: &Names) -> Option<SourceLine> {
    names.line(address, depth > 0)
}

/// Returns `SYMBOL+OFFSET`, with ` [MODULE]` if the symbol is in a module, or the address if it has no known
/// symbol.
fn place(address: u64, names: &Names) -> String {
    match names.symbol(address) {
        Some((symbol, offset)) => in_module(symbol, &format!("+{offset:#x}")),
        None => format!("{address:#x}"),
    }
}

/// Returns `symbol` and the suffix `behind` in the kernel's format: ` [MODULE]` follows if `symbol` is
/// `MODULE:SYMBOL`.
fn in_module(symbol: &str, behind: &str) -> String {
    match symbol.split_once(':') {
        Some((module, symbol)) => format!("{symbol}{behind} [{module}]"),
        None => format!("{symbol}{behind}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hvprobe_fixtures::module_file;
    use hvprobe_sources::Sources;
    use hvprobe_vmlinux::Kernel;

    use super::*;
    use crate::output::values::source_lines::Lines;

    const READ: u64 = 0xffff_ffff_8100_0010;
    const EXT4: u64 = 0xffff_ffff_c000_0020;
    const NOWHERE: u64 = 0xffff_ffff_c123_4567;

    fn names() -> Names {
        let mut names = Names::default();
        names.insert(READ, Some(("vfs_read", READ - 0x10)));
        names.insert(EXT4, Some(("ext4:a b;c", EXT4 - 0x20)));
        names
    }

    fn stack(goes_on: bool) -> StackTrace {
        let addresses = [READ, EXT4, NOWHERE];
        let halves: Vec<u8> = addresses
            .iter()
            .flat_map(|at| at.to_le_bytes().into_iter().take(FRAME))
            .collect();
        let stack = StackTrace::of(&halves, goes_on);
        assert_eq!(stack.addresses, addresses);
        stack
    }

    #[test]
    fn addresses_stand_below_one_another_with_their_symbols() {
        assert_eq!(
            stack(false).text(&names()),
            "\n => vfs_read+0x10\n => a b;c+0x20 [ext4]\n => 0xffffffffc1234567"
        );
        assert!(stack(true).text(&names()).ends_with("4567\n => ..."));
        assert_eq!(stack(false).innermost(&names()), "vfs_read+0x10");
    }

    #[test]
    fn folded_stacks_begin_with_the_outermost_function_and_part_by_semicolons_only() {
        assert_eq!(
            stack(false).folded(&names()),
            "0xffffffffc1234567;a_b_c_[ext4];vfs_read"
        );
    }

    #[test]
    fn lines_of_the_sources_stand_behind_of_callers_those_of_the_call() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("vmlinux");
        std::fs::write(&path, hvprobe_fixtures::dwarf::file()).unwrap();
        let sources = Sources::open(&Kernel::open(&path).unwrap(), &path, None).unwrap();
        let of_module = folder.path().join("test_drv.ko");
        std::fs::write(&of_module, module_file::file(b"build", true)).unwrap();
        let module = Sources::open_module(&of_module).unwrap();
        let mut names = Names::default();
        // Addresses at which the running kernel has its functions.
        names.know([
            (READ, 0x80, "vfs_test".to_owned()),
            (EXT4, 0x80, "elsewhere".to_owned()),
        ]);
        let lines = Lines::new(Some(sources), module.into_iter().collect());
        names.set_lines(Some(Arc::new(lines)));
        let stack = StackTrace {
            // Calls at the ends of lines 10 and 14, and one in a symbol that the debug information lacks.
            addresses: vec![READ + 0x50, READ + 0x38, READ + 4, EXT4 + 1],
            goes_on: false,
        };
        let expected = "\n => vfs_test+0x50 (fs/test.c:15)\n => vfs_test+0x38 (fs/test.c:14)\
                    \n => vfs_test+0x4 (fs/test.c:10)\n => elsewhere+0x1";
        assert_eq!(stack.text(&names), expected);
        // The second time the lines come from the cache.
        assert_eq!(stack.text(&names), expected);
        let builds = [Some(b"build".to_vec()), Some(b"other".to_vec()), None];
        for ((number, id), place) in (0..).zip(builds).zip([" (fs/test.c:10)", "", ""]) {
            let address = NOWHERE + 0x100 * number;
            let symbol = Some(("test_drv:vfs_test", address - 4));
            names.insert_of_build(address, symbol, id);
            let stack = StackTrace {
                addresses: vec![READ, address],
                goes_on: false,
            };
            let text = stack.text(&names);
            let frame = format!("=> vfs_test+0x4 [test_drv]{place}");
            assert!(text.ends_with(&frame), "{text}");
        }
        let json = serde_json::to_string(&stack.json(&names)).unwrap();
        assert!(
            json.ends_with(
                r#"{"addr":"0xffffffff81000014","symbol":"vfs_test","offset":4,"file":"fs/test.c","line":10},{"addr":"0xffffffffc0000021","symbol":"elsewhere","offset":1,"file":null,"line":null}]"#
            ),
            "{json}"
        );
    }

    #[test]
    fn json_has_each_address_with_its_symbol() {
        let json = serde_json::to_string(&stack(false).json(&names())).unwrap();
        assert_eq!(
            json,
            r#"[{"addr":"0xffffffff81000010","symbol":"vfs_read","offset":16},{"addr":"0xffffffffc0000020","symbol":"ext4:a b;c","offset":32},{"addr":"0xffffffffc1234567","symbol":null,"offset":null}]"#
        );
    }
}
