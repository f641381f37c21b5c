//! The names in a module, read from its syntax: those that it imports, defines and uses.
//!
//! Tests do not count, because they may name everything. Macros are not expanded, but the paths in the tokens of
//! macros and attributes are read.

use std::collections::{BTreeMap, BTreeSet};

use syn::ext::IdentExt as _;
use syn::parse::{ParseStream, Parser as _};
use syn::visit::{self, Visit};
use syn::{Attribute, Ident, ImplItem, Item, ItemMod, ItemUse, Meta, Token, UseTree, Visibility};
use syn::{braced, bracketed, parenthesized, token};

/// A path, either as written or from the crate's root.
pub(crate) type Path = Vec<String>;

/// One module.
#[derive(Debug, Default)]
pub(crate) struct Module {
    /// Path of its file.
    pub(crate) file: String,
    /// Names that `use` brings in, each with its path as written.
    pub(crate) imports: BTreeMap<String, Path>,
    /// Modules that a `use` with `*` brings in.
    pub(crate) globs: Vec<Path>,
    /// Names of its own items.
    pub(crate) items: BTreeSet<String>,
    /// Paths that its code names. A re-export (`pub use`) does not count as naming.
    pub(crate) named: BTreeSet<Path>,
}

/// A module that is declared in another one.
pub(crate) struct Child<'s> {
    pub(crate) name: String,
    /// The items of the module, if they are in the file that declares it.
    pub(crate) items: Option<&'s [Item]>,
}

/// Reads the module with these `items`, and returns the modules that it declares.
pub(crate) fn read<'s>(file: String, items: &'s [Item]) -> (Module, Vec<Child<'s>>) {
    let mut reader = Reader {
        module: Module {
            file,
            ..Module::default()
        },
        children: Vec::new(),
    };
    for item in items {
        let (attributes, name) = described(item);
        if let Some(name) = name.filter(|_| !is_test(attributes)) {
            reader.module.items.insert(name.unraw().to_string());
        }
        reader.visit_item(item);
    }
    (reader.module, reader.children)
}

/// Returns an item's attributes, and its name if it is not a module.
fn described(item: &Item) -> (&[Attribute], Option<&Ident>) {
    match item {
        Item::Const(item) => (&item.attrs, Some(&item.ident)),
        Item::Enum(item) => (&item.attrs, Some(&item.ident)),
        Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
        Item::Impl(item) => (&item.attrs, None),
        Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
        Item::Mod(item) => (&item.attrs, None),
        Item::Static(item) => (&item.attrs, Some(&item.ident)),
        Item::Struct(item) => (&item.attrs, Some(&item.ident)),
        Item::Trait(item) => (&item.attrs, Some(&item.ident)),
        Item::Type(item) => (&item.attrs, Some(&item.ident)),
        Item::Union(item) => (&item.attrs, Some(&item.ident)),
        Item::Use(item) => (&item.attrs, None),
        _ => (&[], None),
    }
}

/// Returns whether an item is for tests only.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let list = attribute.meta.require_list().ok();
        attribute.path().is_ident("cfg")
            && list.is_some_and(|list| list.tokens.to_string() == "test")
    })
}

/// Returns the paths that a `use` names. If a path stands for all names of a module, its last segment is `*`.
pub(crate) fn leaves(tree: &UseTree) -> Vec<Path> {
    bound(tree).into_iter().map(|(path, _)| path).collect()
}

/// Returns the paths that a `use` names, each with the name that it gets in the module.
fn bound(tree: &UseTree) -> Vec<(Path, String)> {
    let text = |name: &Ident| name.unraw().to_string();
    match tree {
        UseTree::Path(path) => {
            let first = text(&path.ident);
            let mut found = bound(&path.tree);
            for (path, name) in &mut found {
                path.insert(0, first.clone());
                if name == "self" {
                    name.clone_from(&first);
                }
            }
            found
        }
        UseTree::Name(name) if name.ident == "self" => vec![(Vec::new(), "self".to_owned())],
        UseTree::Name(name) => vec![(vec![text(&name.ident)], text(&name.ident))],
        UseTree::Rename(name) if name.ident == "self" => vec![(Vec::new(), text(&name.rename))],
        UseTree::Rename(name) => vec![(vec![text(&name.ident)], text(&name.rename))],
        UseTree::Glob(_) => vec![(vec!["*".to_owned()], "*".to_owned())],
        UseTree::Group(group) => group.items.iter().flat_map(bound).collect(),
    }
}

/// Collects the names of one module.
struct Reader<'s> {
    module: Module,
    children: Vec<Child<'s>>,
}

/// Adds to `found` the paths in the tokens of a macro or an attribute that have at least two segments.
fn paths(input: ParseStream<'_>, found: &mut BTreeSet<Path>) -> syn::Result<()> {
    while !input.is_empty() {
        if input.peek(Ident::peek_any) {
            let mut path = vec![input.call(Ident::parse_any)?.unraw().to_string()];
            // `peek3` looks at the token after the `::`, which counts as two tokens.
            while input.peek(Token![::]) && input.peek3(Ident::peek_any) {
                input.parse::<Token![::]>()?;
                path.push(input.call(Ident::parse_any)?.unraw().to_string());
            }
            if path.len() > 1 {
                found.insert(path);
            }
            continue;
        }
        let inner;
        if input.peek(token::Paren) {
            parenthesized!(inner in input);
        } else if input.peek(token::Bracket) {
            bracketed!(inner in input);
        } else if input.peek(token::Brace) {
            braced!(inner in input);
        } else {
            input.step(|cursor| match cursor.token_tree() {
                Some((_, rest)) => Ok(((), rest)),
                None => Err(cursor.error("no token")),
            })?;
            continue;
        }
        paths(&inner, found)?;
    }
    Ok(())
}

impl<'s> Visit<'s> for Reader<'s> {
    fn visit_item(&mut self, item: &'s Item) {
        if !is_test(described(item).0) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'s ImplItem) {
        match item {
            ImplItem::Fn(function) if is_test(&function.attrs) => {}
            item => visit::visit_impl_item(self, item),
        }
    }

    fn visit_item_mod(&mut self, module: &'s ItemMod) {
        let is_included = module.attrs.iter().any(|it| it.path().is_ident("path"));
        // A file that is included by its path is checked in its own crate.
        if !is_included {
            self.children.push(Child {
                name: module.ident.unraw().to_string(),
                items: module.content.as_ref().map(|(_, items)| &items[..]),
            });
        }
    }

    fn visit_item_use(&mut self, item: &'s ItemUse) {
        let is_handed_on = !matches!(item.vis, Visibility::Inherited);
        for (path, name) in bound(&item.tree) {
            match path.split_last() {
                Some((last, module)) if last == "*" => self.module.globs.push(module.to_vec()),
                _ => {
                    self.module.imports.entry(name).or_insert(path.clone());
                }
            }
            if !is_handed_on {
                self.module.named.insert(path);
            }
        }
    }

    fn visit_path(&mut self, path: &'s syn::Path) {
        let segments = path.segments.iter();
        let segments = segments.map(|it| it.ident.unraw().to_string());
        self.module.named.insert(segments.collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'s syn::Macro) {
        let named = &mut self.module.named;
        let read = |input: ParseStream<'_>| paths(input, named);
        read.parse2(called.tokens.clone()).expect("tokens");
        visit::visit_macro(self, called);
    }

    fn visit_attribute(&mut self, attribute: &'s Attribute) {
        if let Meta::List(list) = &attribute.meta {
            let named = &mut self.module.named;
            let read = |input: ParseStream<'_>| paths(input, named);
            read.parse2(list.tokens.clone()).expect("tokens");
        }
    }
}
