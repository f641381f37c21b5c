//! Search for cyclic dependencies among files or folders.

use std::collections::{BTreeMap, BTreeSet};

/// Dependencies: for each file or folder, the others that it needs, and the names that it uses from each.
pub(crate) type Needs = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Where the door of a folder counts. The door is the module's own file: `x.rs` beside the folder `x`, or
/// `x/mod.rs`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Door {
    /// The door counts as a file of the folder, so what it needs from outside counts as a need of the folder.
    Inside,
    /// The door counts as a file beside the folder, so the door and the folder can need each other.
    Beside,
}

/// Returns, for every folder, the needs among the files and folders that are directly in it.
pub(crate) fn of_folders(files: &Needs, door: Door) -> Needs {
    let all = files
        .iter()
        .flat_map(|(from, others)| others.keys().chain([from]));
    let with_files: BTreeSet<&str> = all
        .flat_map(|file| file.match_indices('/').map(move |(at, _)| &file[..at]))
        .collect();
    let place = |file: &String| match (door, file.strip_suffix(".rs"), file.strip_suffix("/mod.rs"))
    {
        (Door::Inside, Some(module), _) if with_files.contains(module) => {
            format!("{module}/mod.rs")
        }
        (Door::Beside, _, Some(module)) => format!("{module}.rs"),
        _ => file.clone(),
    };
    let mut folders = Needs::new();
    for (from, others) in files {
        for (to, names) in others {
            if let Some((from, to)) = neighbours(&place(from), &place(to)) {
                let known = folders.entry(from).or_default().entry(to).or_default();
                known.extend(names.iter().cloned());
            }
        }
    }
    folders
}

/// Returns two entries of the innermost folder that contains both `one` and `other`: the entry that is or contains
/// `one`, and the entry that is or contains `other`. Returns `None` if one path is inside the other.
fn neighbours(one: &str, other: &str) -> Option<(String, String)> {
    let (mut ones, mut others) = (one.split('/'), other.split('/'));
    let mut at = String::new();
    loop {
        let (mine, theirs) = (ones.next()?, others.next()?);
        if mine != theirs {
            return Some((format!("{at}{mine}"), format!("{at}{theirs}")));
        }
        at.push_str(mine);
        at.push('/');
    }
}

/// Returns one message for each group of files or folders with cyclic dependencies in `needs`.
pub(crate) fn report(needs: &Needs) -> Vec<String> {
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
            "files or folders in a circle; move what they share into one below them:\n{}",
            arrows.join("\n")
        ));
        done.extend(circle);
    }
    lines
}

/// Returns all files or folders that `start` needs, directly or through others. They include `start` only if its
/// dependencies are cyclic.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes needs of arrows such as `a/b.rs -> c.rs`.
    fn needs(arrows: &[&str]) -> Needs {
        let mut needs = Needs::new();
        for arrow in arrows {
            let (from, to) = arrow.split_once(" -> ").expect("an arrow");
            let others = needs.entry(from.to_owned()).or_default();
            others.insert(to.to_owned(), BTreeSet::from(["X".to_owned()]));
        }
        needs
    }

    #[test]
    fn circles_are_found_and_lines_are_not() {
        let line = needs(&["a -> b", "b -> c", "a -> c"]);
        assert_eq!(report(&line), [""; 0]);
        let found = report(&needs(&["a -> b", "b -> c", "c -> b"]));
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("b needs X of c") && !found[0].contains("a needs"));
    }

    /// Returns the numbers of messages about files, about folders with [`Door::Inside`], and about folders with
    /// [`Door::Beside`].
    fn circles(arrows: &[&str]) -> [usize; 3] {
        let files = needs(arrows);
        let of = |door| report(&of_folders(&files, door)).len();
        [report(&files).len(), of(Door::Inside), of(Door::Beside)]
    }

    #[test]
    fn folders_are_in_a_circle_at_any_depth_though_no_files_are() {
        let top = ["x/a.rs -> y/b.rs", "y/c.rs -> x/d.rs"];
        assert_eq!(circles(&top), [0, 1, 1]);
        let deep = ["s/t/x/a.rs -> s/t/y/b.rs", "s/t/y/c.rs -> s/t/x/d.rs"];
        assert_eq!(circles(&deep), [0, 1, 1]);
        assert_eq!(
            circles(&["s/a.rs -> s/t/b.rs", "s/t/c.rs -> s/d.rs"]),
            [0; 3]
        );
    }

    #[test]
    fn a_folder_is_one_with_its_door_towards_others() {
        for door in ["x.rs", "x/mod.rs"] {
            let arrows = [format!("{door} -> y.rs"), "y.rs -> x/a.rs".to_owned()];
            let arrows = arrows.each_ref().map(String::as_str);
            assert_eq!(circles(&arrows)[1], 1, "{door}");
        }
    }

    #[test]
    fn a_door_that_needs_its_folder_is_not_needed_from_below() {
        for door in ["x.rs", "x/mod.rs"] {
            let arrows = [format!("{door} -> x/a.rs"), format!("x/b/c.rs -> {door}")];
            let arrows = arrows.each_ref().map(String::as_str);
            assert_eq!(circles(&arrows), [0, 0, 1], "{door}");
        }
    }
}
