//! Check that the server starts its tasks in a way that reports their panics.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};
use syn::{ExprMethodCall, ItemMod, ItemUse, Macro};

use super::modules::{is_test, leaves};
use super::names::Tree;
use super::workspace::root;

/// Folder whose files are checked.
const SERVER: &str = "vmm/server/src/";

/// Files of that folder that may begin tasks or threads without `panics::spawn`.
const MAY: [&str; 4] = [
    // Defines `panics::spawn`.
    "calls/panics.rs",
    // Waits for its task, and answers with an error if the task panics.
    "machines/requests.rs",
    // Answers no client. Its releases run on a lane, which reports panics.
    "sessions/keeper.rs",
    // Begins threads. Each call that runs on them reports panics.
    "bounds/threads.rs",
];

/// Returns a line for each file that starts tasks without `panics::spawn` although it may not, and for each entry
/// of [`MAY`] that starts none.
pub(crate) fn wrong() -> Vec<String> {
    let mut begin = BTreeSet::new();
    let root = root();
    for (file, syntax) in Tree::read(&root, &root.join(SERVER).join("lib.rs")).files {
        if begins(&syntax) {
            begin.insert(file.strip_prefix(SERVER).unwrap_or(&file).to_owned());
        }
    }
    let may = BTreeSet::from(MAY.map(str::to_owned));
    let must_not = begin.difference(&may).map(|file| {
        format!(
            "{SERVER}{file} begins a task whose panic nobody learns of: a stream would end as if that \
             had been all; use `panics::spawn`"
        )
    });
    let does_not = may
        .difference(&begin)
        .map(|file| format!("{SERVER}{file} begins no tasks any more: take it out of spawns.rs"));
    must_not.chain(does_not).collect()
}

/// Returns whether a file begins tasks other than with `panics::spawn`.
fn begins(file: &syn::File) -> bool {
    let mut found = Found(false);
    found.visit_file(file);
    found.0
}

struct Found(bool);

impl Found {
    fn note(&mut self, path: &[String]) {
        let ends = path.last().is_some_and(|name| name.starts_with("spawn"));
        self.0 |= ends && path.iter().any(|name| name == "tokio" || name == "task");
    }
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !is_test(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        for path in leaves(&item.tree) {
            self.note(&path);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let path = path.segments.iter().map(|it| it.ident.to_string());
        self.note(&path.collect::<Vec<_>>());
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        self.0 |= call.method == "spawn";
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        // The tokens of a macro are not parsed as syntax, so search their text.
        self.0 |= called.tokens.to_string().contains("tokio :: spawn");
    }
}

#[test]
fn tasks_are_found_however_they_are_begun_and_those_of_tests_are_not() {
    for (text, expected) in [
        ("fn f() { tokio::spawn(work()); }", true),
        ("fn f() { tokio::task::spawn_blocking(work); }", true),
        ("use tokio::{spawn, time};", true),
        ("use tokio::task; fn f() { task::spawn(work()); }", true),
        ("fn f() { self.runtime.spawn(work()); }", true),
        (
            "fn f() { tokio::select! { () = a => tokio::spawn(work()) } }",
            true,
        ),
        ("fn f() { panics::spawn(to_client, work()); }", false),
        (
            "#[cfg(test)] mod tests { fn f() { tokio::spawn(work()); } }",
            false,
        ),
        ("use tokio::sync::mpsc;", false),
    ] {
        let file = syn::parse_file(text).expect("a file");
        assert_eq!(begins(&file), expected, "{text}");
    }
}
