//! Finds the file that defines a name, through the doors that hand it on.

use std::collections::BTreeMap;

use syn::{File, Item, ItemUse, UseTree, Visibility};

/// The modules of a crate, by their paths.
pub(crate) struct Tree {
    pub(crate) modules: BTreeMap<Vec<String>, Module>,
}

/// One module that has a file of its own.
pub(crate) struct Module {
    /// Path of the file, from `src` on.
    pub(crate) file: String,
    pub(crate) syntax: File,
    /// Names that the module hands on, each with its path as written.
    handed_on: BTreeMap<String, Vec<String>>,
}

impl Module {
    pub(crate) fn new(file: String, syntax: File) -> Self {
        let mut handed_on = BTreeMap::new();
        for item in &syntax.items {
            if let Item::Use(item) = item
                && is_handed_on(item)
            {
                for segments in leaves(&item.tree) {
                    if let Some(name) = segments.last() {
                        handed_on.insert(name.clone(), segments.clone());
                    }
                }
            }
        }
        Self {
            file,
            syntax,
            handed_on,
        }
    }
}

/// Returns whether a `use` makes its names available to other modules.
pub(crate) fn is_handed_on(item: &ItemUse) -> bool {
    !matches!(item.vis, Visibility::Inherited)
}

/// Returns the paths that a `use` names, without the names that they get here.
pub(crate) fn leaves(tree: &UseTree) -> Vec<Vec<String>> {
    let below = |name: String, tree: &UseTree| {
        let mut found = leaves(tree);
        for segments in &mut found {
            segments.insert(0, name.clone());
        }
        found
    };
    match tree {
        UseTree::Path(path) => below(path.ident.to_string(), &path.tree),
        UseTree::Name(name) if name.ident == "self" => vec![Vec::new()],
        UseTree::Name(name) => vec![vec![name.ident.to_string()]],
        UseTree::Rename(rename) if rename.ident == "self" => vec![Vec::new()],
        UseTree::Rename(rename) => vec![vec![rename.ident.to_string()]],
        UseTree::Glob(_) => vec![vec!["*".to_owned()]],
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
    }
}

/// Maximum number of doors on the path of a name; names go through fewer.
const DOORS: usize = 8;

impl Tree {
    /// Returns the file that defines what `segments` name in the module `from`, with the name; `None` for names
    /// that are not of this crate.
    pub(crate) fn defines(&self, from: &[String], segments: &[String]) -> Option<(String, String)> {
        let mut absolute = self.absolute(from, segments)?;
        for _ in 0..DOORS {
            let (module, rest) = self.split(&absolute);
            let here = self.modules.get(module)?;
            let Some(name) = rest.first() else {
                // The module itself.
                return None;
            };
            match here.handed_on.get(name) {
                Some(path) => {
                    let module = module.to_vec();
                    let mut next = self.absolute(&module, path)?;
                    next.extend(rest.iter().skip(1).cloned());
                    absolute = next;
                }
                None => return Some((here.file.clone(), name.clone())),
            }
        }
        None
    }

    /// Returns the path of what the module `from` hands on as `name`.
    pub(crate) fn handed_on(&self, from: &[String], name: &str) -> Option<Vec<String>> {
        self.modules.get(from)?.handed_on.get(name).cloned()
    }

    /// Splits `path` into the longest module that it begins with, and the rest.
    fn split<'p>(&self, path: &'p [String]) -> (&'p [String], &'p [String]) {
        let fits = |len: &usize| self.modules.contains_key(&path[..*len]);
        let len = (0..=path.len()).rev().find(fits).unwrap_or(0);
        path.split_at(len)
    }

    /// Returns the path of `segments`, as written in the module `from`, from the crate's root on.
    fn absolute(&self, from: &[String], segments: &[String]) -> Option<Vec<String>> {
        let (first, rest) = segments.split_first()?;
        let mut path = match first.as_str() {
            "crate" => Vec::new(),
            "self" => from.to_vec(),
            "super" => {
                let ups = segments.iter().take_while(|it| *it == "super").count();
                let base = from.get(..from.len().checked_sub(ups)?)?;
                return Some([base, &segments[ups..]].concat());
            }
            child => {
                // A module below this one, or a name from elsewhere.
                let mut path = from.to_vec();
                path.push(child.to_owned());
                self.modules.contains_key(&path).then_some(())?;
                path
            }
        };
        path.extend_from_slice(rest);
        Some(path)
    }
}
