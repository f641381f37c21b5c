//! Check of the files that `docs/architecture.md` lists for its journeys.

use std::fs;

use super::workspace::root;

/// Headings of the sections with the tables of files. A row has a number, the crate, the file, and what the file
/// does.
const JOURNEYS: [&str; 2] = [
    "### A hit, file by file",
    "### A registration, file by file",
];
/// Minimum number of files of a journey.
const FEWEST: usize = 4;

/// Returns a line for each listed file that does not exist, and for each list that is missing or too short.
pub(crate) fn wrong_steps() -> Vec<String> {
    let page = root().join("docs/architecture.md");
    let page = fs::read_to_string(page).expect("docs/architecture.md");
    let mut wrong = Vec::new();
    for journey in JOURNEYS {
        let Some((_, rest)) = page.split_once(journey) else {
            wrong.push(format!("docs/architecture.md has no section `{journey}`"));
            continue;
        };
        let section = rest.split("\n#").next().unwrap_or_default();
        let rows = section.lines().filter(|line| line.starts_with("| "));
        let mut seen = 0;
        for row in rows {
            let cells: Vec<_> = row
                .split('|')
                .map(|cell| cell.trim().trim_matches('`'))
                .collect();
            let [_, number, of, file, ..] = cells[..] else {
                continue;
            };
            if number.parse::<usize>().is_err() {
                continue;
            }
            seen += 1;
            let folder = match of {
                "machine" | "vm" | "devices" | "server" | "storage" => format!("vmm/{of}"),
                "spec" | "vmlinux" | "linux" | "hit" | "engine" | "sources" => {
                    format!("introspect/{of}")
                }
                of => of.to_owned(),
            };
            if !root().join(&folder).join("src").join(file).is_file() {
                wrong.push(format!("`{journey}`: crate {of} has no file {file}"));
            }
        }
        if seen < FEWEST {
            wrong.push(format!("`{journey}` lists {seen} files only"));
        }
    }
    wrong
}
