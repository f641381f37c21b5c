//! Arrows between the files of a crate, read from its syntax.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, File, Item, ItemMod, ItemUse};

use super::circles::Needs;
use super::names::{Module, Tree};

/// Returns which other files each file below `src` needs.
pub(crate) fn needs(src: &Path) -> Needs {
    let tree = read(src);
    let mut needs = Needs::new();
    for (path, module) in &tree.modules {
        let mut found = Found {
            tree: &tree,
            path,
            names: BTreeSet::new(),
        };
        found.visit_file(&module.syntax);
        for (file, name) in found.names {
            if file != module.file {
                let others = needs.entry(module.file.clone()).or_default();
                others.entry(file).or_default().insert(name);
            }
        }
    }
    needs
}

/// Reads a crate's modules, from `lib.rs` or `main.rs` on.
pub(crate) fn read(src: &Path) -> Tree {
    let mut tree = Tree {
        modules: BTreeMap::new(),
    };
    for start in ["lib.rs", "main.rs"] {
        let file = src.join(start);
        if file.exists() {
            add(src, &file, Vec::new(), &mut tree);
        }
    }
    assert!(!tree.modules.is_empty(), "no crate in {}", src.display());
    tree
}

fn add(src: &Path, file: &Path, path: Vec<String>, tree: &mut Tree) {
    let text =
        fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let syntax =
        syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let children: Vec<_> = syntax
        .items
        .iter()
        .filter_map(|item| match item {
            Item::Mod(child) if child.content.is_none() && !is_test(&child.attrs) => {
                Some(child.ident.to_string())
            }
            _ => None,
        })
        .collect();
    let relative = file.strip_prefix(src).expect("below src");
    let module = Module::new(relative.display().to_string(), syntax);
    tree.modules.insert(path.clone(), module);
    for child in children {
        let mut inner = path.clone();
        inner.push(child);
        add(src, &place(src, &inner), inner, tree);
    }
}

/// Returns the file of the module `path`: `a/b.rs` or `a/b/mod.rs`.
fn place(src: &Path, path: &[String]) -> PathBuf {
    let folder: PathBuf = src.join(path.iter().collect::<PathBuf>());
    let file = folder.with_extension("rs");
    if file.exists() {
        file
    } else {
        folder.join("mod.rs")
    }
}

/// Returns whether an item is for tests only.
pub(crate) fn is_test(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|attr| {
        let list = attr.meta.require_list().ok();
        attr.path().is_ident("cfg") && list.is_some_and(|list| list.tokens.to_string() == "test")
    })
}

/// Collects the names of its own crate that a module uses.
struct Found<'t> {
    tree: &'t Tree,
    path: &'t [String],
    names: BTreeSet<(String, String)>,
}

impl Found<'_> {
    fn note(&mut self, segments: &[String]) {
        if let Some(found) = self.tree.defines(self.path, segments) {
            self.names.insert(found);
        }
    }
}

impl<'ast> Visit<'ast> for Found<'_> {
    fn visit_file(&mut self, file: &'ast File) {
        // Attributes and the crate's own docs name nothing.
        for item in &file.items {
            self.visit_item(item);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !is_test(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        // A name that is only handed on is not needed here.
        if !is_test(&item.attrs) && !super::names::is_handed_on(item) {
            for segments in super::names::leaves(&item.tree) {
                self.note(&segments);
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> = path
            .segments
            .iter()
            .map(|it| it.ident.to_string())
            .collect();
        match &segments[..] {
            // A name that is handed on here, and used as well.
            [name] => {
                if let Some(path) = self.tree.handed_on(self.path, name) {
                    self.note(&path);
                }
            }
            _ => self.note(&segments),
        }
        visit::visit_path(self, path);
    }
}
