//! Circles among files or folders that need one another.

use std::collections::{BTreeMap, BTreeSet};

/// Needs of files or folders: for each one the others that it needs, and the names that it uses of them.
pub(crate) type Needs = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Merges the needs of files into those of the files and folders right below a crate's `src`.
pub(crate) fn of_folders(files: &Needs) -> Needs {
    let folder = |file: &str| file.split('/').next().unwrap_or(file).to_owned();
    let mut folders = Needs::new();
    for (from, others) in files {
        for (to, names) in others {
            let (from, to) = (folder(from), folder(to));
            if from != to && to != "lib.rs" && from != "lib.rs" {
                let known = folders.entry(from).or_default().entry(to).or_default();
                known.extend(names.iter().cloned());
            }
        }
    }
    folders
}

/// Returns one line for each circle among `needs`, which are of the crate in `room`.
pub(crate) fn report(room: &str, needs: &Needs) -> Vec<String> {
    let mut lines = Vec::new();
    let mut done = BTreeSet::new();
    for start in needs.keys() {
        if done.contains(start) {
            continue;
        }
        let forth = reached(start, needs);
        let circle: BTreeSet<_> = forth
            .into_iter()
            .filter(|other| reached(other, needs).contains(start))
            .collect();
        if circle.is_empty() {
            continue;
        }
        let arrows = circle.iter().flat_map(|from| {
            let others = needs.get(from).into_iter().flatten();
            others
                .filter(|(to, _)| circle.contains(*to))
                .map(move |(to, names)| {
                    let names: Vec<_> = names.iter().map(String::as_str).collect();
                    format!("  {from} needs {} of {to}", names.join(", "))
                })
        });
        let arrows: Vec<_> = arrows.collect();
        lines.push(format!(
            "{room}: files or folders in a circle; move what they share into one below them:\n{}",
            arrows.join("\n")
        ));
        done.extend(circle);
    }
    lines
}

/// Returns all that `start` needs, directly or through others; itself only if it is in a circle.
fn reached(start: &str, needs: &Needs) -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    let mut left = vec![start.to_owned()];
    while let Some(next) = left.pop() {
        for to in needs.get(&next).into_iter().flat_map(BTreeMap::keys) {
            if seen.insert(to.clone()) {
                left.push(to.clone());
            }
        }
    }
    seen
}

#[test]
fn circles_are_found_and_lines_are_not() {
    let needs = |arrows: &[(&str, &str)]| {
        let mut needs = Needs::new();
        for (from, to) in arrows {
            let others = needs.entry((*from).to_owned()).or_default();
            others.insert((*to).to_owned(), BTreeSet::from(["X".to_owned()]));
        }
        needs
    };
    assert_eq!(
        report("room", &needs(&[("a", "b"), ("b", "c"), ("a", "c")])),
        [""; 0]
    );
    let found = report("room", &needs(&[("a", "b"), ("b", "c"), ("c", "b")]));
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("b needs X of c") && !found[0].contains("a needs"));
    let folders = of_folders(&needs(&[("x/a", "y/b"), ("y/c", "x/d")]));
    assert_eq!(report("room", &folders).len(), 1);
}
