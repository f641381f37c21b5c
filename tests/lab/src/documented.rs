//! Parser for the commands, options, headings of tables, paths and links in the documents. Tests compare these with
//! the programs and the repository.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

/// The page that has the tables of the benches.
pub const PERFORMANCE: &str = "docs/performance.md";

/// The page that has the table of what was verified where.
pub const HOSTS: &str = "docs/hosts.md";

/// The pages that show commands, from the repository's root.
pub const PAGES: [&str; 8] = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    HOSTS,
    PERFORMANCE,
    "docs/reference.md",
    "docs/security.md",
    "fuzz/README.md",
];

/// Reads the page called `name`.
///
/// # Errors
///
/// If it cannot be read.
pub fn page(name: &str) -> io::Result<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = fs::read_to_string(root.join(name));
    read.map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))
}

/// A command in a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Line number, from one.
    pub line: usize,
    /// Words, the program's name first.
    pub words: Vec<String>,
    /// Whether the command is in a block of code, complete and ready to type. A command in a sentence may leave
    /// words out, or have placeholders in capitals.
    pub example: bool,
}

/// Iterates over the lines of a document: number, text, and whether the line is in a block of code.
fn lines(document: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut code = false;
    document.lines().zip(1..).filter_map(move |(line, number)| {
        if line.starts_with("```") {
            code = !code;
            return None;
        }
        Some((number, line, code))
    })
}

/// Iterates over the texts between backquotes.
fn spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Returns the commands in `document` that begin with `program`, which may be several words.
#[must_use]
pub fn commands(document: &str, program: &str) -> Vec<Shown> {
    let mut found = Vec::new();
    let mut begun: Option<(usize, String)> = None;
    let is_it = |text: &str| text == program || text.starts_with(&format!("{program} "));
    for (line, text, code) in lines(document) {
        if !code {
            for span in spans(text).filter(|span| is_it(span) && !span.contains('…')) {
                found.push(Shown {
                    line,
                    words: words(span),
                    example: false,
                });
            }
            continue;
        }
        let (line, text) = match begun.take() {
            Some((line, before)) => (line, before + text.trim_start()),
            None => (line, text.strip_prefix("$ ").unwrap_or(text).to_owned()),
        };
        match text.strip_suffix('\\') {
            Some(part) if is_it(&text) => begun = Some((line, part.to_owned())),
            _ if is_it(&text) => found.push(Shown {
                line,
                words: words(&text),
                example: true,
            }),
            _ => {}
        }
    }
    found
}

/// Splits a command into words; quotes work as in a shell.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in command.chars() {
        match (letter, quote) {
            (_, Some(open)) if letter == open => quote = None,
            ('\'' | '"', None) => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (' ', None) => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// Returns the level of a heading, or zero if `line` is no heading.
fn level(line: &str) -> usize {
    let marks = line.bytes().take_while(|&byte| byte == b'#').count();
    match line[marks..].starts_with(' ') {
        true => marks,
        false => 0,
    }
}

/// Returns the long options that sentences name in the section under `heading`, including its subsections.
#[must_use]
pub fn options(document: &str, heading: &str) -> Vec<String> {
    let is_beyond = |line: &str| (1..=level(heading)).contains(&level(line));
    let section = lines(document)
        .skip_while(|(_, line, code)| *code || *line != heading)
        .skip(1)
        .take_while(|(_, line, code)| *code || !is_beyond(line))
        .filter(|(_, _, code)| !code);
    let spans = section.flat_map(|(_, line, _)| spans(line));
    let options = spans.filter_map(|span| span.strip_prefix("--")?.split([' ', '=']).next());
    options.map(str::to_owned).collect()
}

/// Endings that mark a name in a sentence as the name of a file.
const ENDINGS: [&str; 7] = [".rs", ".md", ".toml", ".proto", ".py", ".txt", ".config"];

/// Line number, from one, and a name on that line.
pub type Named<'a> = (usize, &'a str);

/// Returns the names in sentences that look like files or folders of the repository. Such a name has the ending of
/// a file, ends with a slash, or begins with one of `top`, the folders at the repository's root.
#[must_use]
pub fn paths<'a>(document: &'a str, top: &[String]) -> Vec<Named<'a>> {
    let is_path = |span: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte);
        let ends = |ending: &&str| span.len() > ending.len() && span.ends_with(*ending);
        let from_top = |(first, _): (&str, &str)| top.iter().any(|folder| folder == first);
        span.bytes().all(plain)
            && !span.starts_with('/')
            && (ENDINGS.iter().any(ends)
                || ends(&"/")
                || span.split_once('/').is_some_and(from_top))
    };
    let sentences = lines(document).filter(|(_, _, code)| !code);
    sentences
        .flat_map(|(number, line, _)| spans(line).map(move |span| (number, span)))
        .filter(|(_, span)| is_path(span))
        .collect()
}

/// Returns the targets of a document's links, except links to other sites.
#[must_use]
pub fn links(document: &str) -> Vec<Named<'_>> {
    let sentences = lines(document).filter(|(_, _, code)| !code);
    let links = sentences.flat_map(|(number, line, _)| {
        let rests = line.split("](").skip(1);
        rests.filter_map(move |rest| Some((number, rest.split_once(')')?.0)))
    });
    links.filter(|(_, link)| !link.contains("://")).collect()
}

/// Returns the anchors of a document's headings.
#[must_use]
pub fn anchors(document: &str) -> Vec<String> {
    let headings = lines(document).filter(|(_, line, code)| !code && level(line) > 0);
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        words
            .chars()
            .filter(kept)
            .collect::<String>()
            .replace(' ', "-")
    };
    headings.map(|(_, line, _)| anchor(line)).collect()
}

/// Lists every file and folder of the repository, by its path from the root, except `.git` and `target`.
///
/// # Errors
///
/// If a folder cannot be read.
pub fn tree() -> io::Result<BTreeSet<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut found, mut folders) = (BTreeSet::new(), vec![String::new()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if matches!(name.as_str(), ".git" | "target") {
                continue;
            }
            let path = format!("{folder}{name}");
            if entry.file_type()?.is_dir() {
                folders.push(format!("{path}/"));
            }
            found.insert(path);
        }
    }
    Ok(found)
}

/// Returns the words of `line` if it is the heading of a table of a bench. Such a line begins with blanks (above
/// the names of the rows), has several columns, and contains no numbers.
#[must_use]
pub fn heading(line: &str) -> Option<String> {
    let words: Vec<_> = line.split_whitespace().collect();
    let numbers = words.iter().any(|word| {
        let first = word.trim_start_matches(['-', '+']);
        first.starts_with(|letter: char| letter.is_ascii_digit())
    });
    let several = line.trim().contains("  ");
    (line.starts_with("  ") && !numbers && several).then(|| words.join(" "))
}

/// Returns the headings of the tables in blocks of code, by bench. A table belongs to the bench that the text names
/// last before it (`cargo lab bench NAME`). `default` is the name of the bench that a command without a name runs.
#[must_use]
pub fn headings(document: &str, default: &str) -> BTreeMap<String, Vec<String>> {
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut bench = None;
    for (_, line, code) in lines(document) {
        if code {
            if let (Some(bench), Some(heading)) = (&bench, heading(line)) {
                all.entry(String::clone(bench)).or_default().push(heading);
            }
            continue;
        }
        for span in spans(line) {
            if let Some(rest) = span.strip_prefix("cargo lab bench") {
                let name = rest.split_whitespace().next().unwrap_or(default);
                bench = Some(name.to_owned());
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "\
# One
Say `prog run` or `other`, then `prog … --fast`.

```
$ prog run --to 'a b' \\
    -- \"c\"
program: words
   name  speed, us  at q35
   x           1.5       2
```

## Two
| `--fast` | `--slow=N`, see `--quick TIME` |
`cargo lab bench x` prints

```
             made/s  us/event
row               1         2
```

## Three
`--other`
";

    #[test]
    fn commands_are_found_in_sentences_and_blocks() {
        let shown = |line, words: &[&str], example| Shown {
            line,
            words: words.iter().map(|&word| word.to_owned()).collect(),
            example,
        };
        assert_eq!(
            commands(DOCUMENT, "prog"),
            [
                shown(2, &["prog", "run"], false),
                shown(5, &["prog", "run", "--to", "a b", "--", "c"], true),
            ]
        );
    }

    #[test]
    fn options_are_those_of_a_section() {
        assert_eq!(options(DOCUMENT, "## Two"), ["fast", "slow", "quick"]);
        assert_eq!(options(DOCUMENT, "## Three"), ["other"]);
        assert_eq!(options(DOCUMENT, "# One").len(), 4);
        assert!(options(DOCUMENT, "## Four").is_empty());
    }

    #[test]
    fn paths_and_links_are_found_in_sentences() {
        let document = "\
# A, b's `c`
`cli/src` and `main.rs`, but `a.rs b`, `target/x`, `/dev/kvm`, `$x.rs`, `.rs` and `h::y.rs`.
See [`probe/`](docs/x.md#a-bs-c), [y](#z) and [z](https://z.org/y.md).
```
`no.rs` [n](no.md)
```
";
        assert_eq!(
            paths(document, &["cli".to_owned()]),
            [(2, "cli/src"), (2, "main.rs"), (3, "probe/")]
        );
        assert_eq!(links(document), [(3, "docs/x.md#a-bs-c"), (3, "#z")]);
        assert_eq!(anchors(document), ["a-bs-c"]);
    }

    #[test]
    fn headings_belong_to_the_bench_named_before() {
        let expected = BTreeMap::from([("x".to_owned(), vec!["made/s us/event".to_owned()])]);
        assert_eq!(headings(DOCUMENT, "boot"), expected);
        assert_eq!(heading("   x           1.5       2"), None);
    }
}
