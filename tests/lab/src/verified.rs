//! The table in `docs/hosts.md` of what was verified where. It says which tests passed on which host, with which
//! kernel in the guests, at which commit.
//!
//! The table is stored only in the page: it is read from there, changed, and written back. Invariants: reading a
//! written table gives the same table, and setting a cell changes neither other cells nor the text around the
//! table.
//!
//! Between two marks there is a table for each host. The first line of a table has the host and the kernels. Each
//! other line has a group of tests, and for each kernel the results:
//!
//! ```text
//! | *tcg* | no Linux | 5.10-cloud | 6.1-cloud |
//! |---|---|---|---|
//! | `rig::stacks` | | 5 passed, 39a9bdaa | 4 passed, 1 failed, 39a9bdaa |
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::AddAssign;

use anyhow::{Context, Result, bail, ensure};

/// Mark before the table.
const BEGIN: &str = "<!-- verified: begin -->";
/// Mark after the table.
const END: &str = "<!-- verified: end -->";

/// Name of the column for tests that boot no Linux guest.
pub const NO_LINUX: &str = "no Linux";

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tests that passed, at the first try or a later one.
    pub passed: u64,
    /// Tests that failed.
    pub failed: u64,
    /// Tests that were skipped, because they cannot run on the machine.
    pub skipped: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Results of a group of tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Numbers of tests.
    pub counts: Counts,
    /// Hash of the commit that was tested, shortened.
    pub commit: String,
}

impl fmt::Display for Cell {
    /// Formats the cell as `5 passed, 1 failed, 39a9bdaa`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts {
            passed,
            failed,
            skipped,
        } = self.counts;
        if passed > 0 || failed + skipped == 0 {
            write!(f, "{passed} passed, ")?;
        }
        if failed > 0 {
            write!(f, "{failed} failed, ")?;
        }
        if skipped > 0 {
            write!(f, "{skipped} skipped, ")?;
        }
        f.write_str(&self.commit)
    }
}

impl Cell {
    fn parse(text: &str) -> Result<Self> {
        let mut counts = Counts::default();
        let (numbers, commit) = text.rsplit_once(", ").unwrap_or(("", text));
        for part in numbers.split(", ") {
            let (number, what) = part.split_once(' ').unwrap_or((part, ""));
            let number = number.parse();
            let slot = match what {
                "passed" => &mut counts.passed,
                "failed" => &mut counts.failed,
                "skipped" => &mut counts.skipped,
                _ => bail!("`{text}` is no result: it is like `5 passed, 1 failed, 39a9bdaa`"),
            };
            *slot = number.with_context(|| format!("`{part}` has no number"))?;
        }
        let cell = Self {
            counts,
            commit: commit.to_owned(),
        };
        let is_hash = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        ensure!(
            (7..=40).contains(&commit.len()) && commit.bytes().all(is_hash),
            "`{commit}` is no commit's hash"
        );
        // This refuses numbers in another order, or that are there twice.
        ensure!(cell.to_string() == text, "`{text}` should be `{cell}`");
        Ok(cell)
    }
}

/// Position of a cell in the table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Machine that the tests ran on.
    pub host: String,
    /// Name of a group of tests.
    pub tests: String,
    /// Kernel of the guests, or [`NO_LINUX`].
    pub kernel: String,
}

/// Results on one host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Host {
    kernels: BTreeSet<String>,
    /// Cells of each group of tests, by kernel.
    tests: BTreeMap<String, BTreeMap<String, Cell>>,
}

/// The table of what was verified where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    hosts: BTreeMap<String, Host>,
}

impl Table {
    /// Reads the table from `page`.
    ///
    /// # Errors
    ///
    /// If the page does not have the marks, each once, or if the text between the marks is not a valid table.
    pub fn of_page(page: &str) -> Result<Self> {
        let (before, text, _) = split(page)?;
        let first = before.lines().count() + 1;
        let mut table = Self::default();
        let mut reader = Reader::Outside;
        for (number, line) in (first..).zip(text.lines()) {
            reader = table
                .read(reader, line)
                .with_context(|| format!("line {number}"))?;
        }
        ensure!(
            !matches!(reader, Reader::Headed(..)),
            "the last table has a heading only"
        );
        Ok(table)
    }

    /// Reads one line in the state `reader`, and returns the next state.
    fn read(&mut self, reader: Reader, line: &str) -> Result<Reader> {
        if line.trim().is_empty() {
            ensure!(
                !matches!(reader, Reader::Headed(..)),
                "a table has a heading only"
            );
            return Ok(Reader::Outside);
        }
        let line = line.strip_prefix('|').and_then(|it| it.strip_suffix('|'));
        let line = line.context("is no line of a table")?;
        let mut cells = line.split('|').map(str::trim);
        let first = cells.next().unwrap_or_default();
        match reader {
            Reader::Outside => {
                let host =
                    within(first, '*').context("the host should stand first, as in `*tcg*`")?;
                let kernels: Vec<_> = cells.map(str::to_owned).collect();
                kernels.iter().try_for_each(|name| name_is_good(name))?;
                let known = Host {
                    kernels: kernels.iter().cloned().collect(),
                    tests: BTreeMap::new(),
                };
                ensure!(
                    known.kernels.len() == kernels.len(),
                    "a kernel is there twice"
                );
                let before = self.hosts.insert(host.to_owned(), known);
                ensure!(before.is_none(), "host {host} is there twice");
                Ok(Reader::Headed(host.to_owned(), kernels))
            }
            Reader::Headed(host, kernels) => {
                let is_rule =
                    |cell: &str| !cell.is_empty() && cell.bytes().all(|byte| byte == b'-');
                let rest: Vec<_> = cells.collect();
                ensure!(
                    is_rule(first)
                        && rest.len() == kernels.len()
                        && rest.iter().all(|it| is_rule(it)),
                    "the heading should be followed by a rule, `|---|`, of as many columns"
                );
                Ok(Reader::Inside(host, kernels))
            }
            Reader::Inside(host, kernels) => {
                let tests = within(first, '`').context("a test should be in backquotes")?;
                let cells: Vec<_> = cells.collect();
                ensure!(
                    cells.len() == kernels.len(),
                    "{tests} has {} cells, but there are {} kernels",
                    cells.len(),
                    kernels.len()
                );
                let mut row = BTreeMap::new();
                for (kernel, cell) in kernels
                    .iter()
                    .zip(cells)
                    .filter(|(_, cell)| !cell.is_empty())
                {
                    let cell = Cell::parse(cell).with_context(|| format!("{tests}, {kernel}"))?;
                    row.insert(kernel.clone(), cell);
                }
                ensure!(!row.is_empty(), "{tests} ran nowhere");
                let known = self.hosts.entry(host.clone()).or_default();
                let before = known.tests.insert(tests.to_owned(), row);
                ensure!(before.is_none(), "{tests} is there twice");
                Ok(Reader::Inside(host, kernels))
            }
        }
    }

    /// Sets one cell, and adds its row and column if they are missing. All other cells stay.
    ///
    /// # Errors
    ///
    /// If a name cannot stand in a table.
    pub fn set(&mut self, key: &Key, cell: Cell) -> Result<()> {
        for name in [&key.host, &key.tests, &key.kernel] {
            name_is_good(name)?;
        }
        let host = self.hosts.entry(key.host.clone()).or_default();
        host.kernels.insert(key.kernel.clone());
        let row = host.tests.entry(key.tests.clone()).or_default();
        row.insert(key.kernel.clone(), cell);
        Ok(())
    }

    /// Returns `page`, with this table in the place of the table that it has.
    ///
    /// # Errors
    ///
    /// If the page does not have the marks, each once.
    pub fn written_into(&self, page: &str) -> Result<String> {
        let (before, _, after) = split(page)?;
        Ok(format!("{before}{BEGIN}\n\n{self}{END}{after}"))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, host) in &self.hosts {
            let mut kernels: Vec<_> = host.kernels.iter().collect();
            kernels.sort_by_key(|name| version(name));
            write!(f, "| *{name}* |")?;
            for kernel in &kernels {
                write!(f, " {kernel} |")?;
            }
            writeln!(f, "\n|---|{}", "---|".repeat(kernels.len()))?;
            for (tests, row) in &host.tests {
                write!(f, "| `{tests}` |")?;
                for kernel in &kernels {
                    match row.get(*kernel) {
                        Some(cell) => write!(f, " {cell} |")?,
                        None => f.write_str(" |")?,
                    }
                }
                writeln!(f)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// State while the lines of a table are read. Within a table, it has the host and the kernels of the table.
enum Reader {
    Outside,
    /// After the heading, before the rule below it.
    Headed(String, Vec<String>),
    Inside(String, Vec<String>),
}

/// Splits a page at the marks. Returns the text before, between and after them.
fn split(page: &str) -> Result<(&str, &str, &str)> {
    let is_once = |mark: &str| page.matches(mark).count() == 1;
    let parts = page.split_once(BEGIN).and_then(|(before, rest)| {
        let (text, after) = rest.split_once(END)?;
        Some((before, text, after))
    });
    parts
        .filter(|_| is_once(BEGIN) && is_once(END))
        .with_context(|| format!("the page should have one table, between {BEGIN} and {END}"))
}

/// Returns the name in `text`, which must begin and end with `mark`.
fn within(text: &str, mark: char) -> Option<&str> {
    let name = text.strip_prefix(mark)?.strip_suffix(mark)?;
    name_is_good(name).is_ok().then_some(name)
}

/// Checks that `name` can stand in a table.
///
/// # Errors
/// If it cannot.
pub fn name_is_good(name: &str) -> Result<()> {
    let is_bad = |c: char| "|*`<>".contains(c) || c.is_control();
    ensure!(
        !name.is_empty() && name.trim() == name && !name.contains(is_bad),
        "`{name}` is no name for a table: it may not be empty, have blanks at its ends, or have `|`, `*`, `<`, \
         `>` or a backquote in it"
    );
    Ok(())
}

/// Returns the key by which kernels are sorted: the numbers at the beginning of the name, and the name.
fn version(name: &str) -> (Vec<u32>, &str) {
    let numbers = name.split('-').next().unwrap_or(name).split('.');
    (numbers.map_while(|it| it.parse().ok()).collect(), name)
}

#[cfg(test)]
mod tests;
