//! The modules of a crate, and the search for the file that defines a name. A name can be reached by a path,
//! through an imported module, from a parent that imports it, through a `*` import, or through re-exports.

use std::collections::BTreeMap;
use std::fs;
use std::path;

use syn::{File, Item};

use super::circles::Needs;
use super::modules::{self, Module, Path};

/// The modules of a crate, by their paths from its root.
pub(crate) struct Tree {
    modules: BTreeMap<Path, Module>,
    /// The files of the crate, by their paths from `base`.
    pub(crate) files: Vec<(String, File)>,
    base: path::PathBuf,
}

/// Maximum number of steps from a path to the definition of its name. Real names take fewer.
const STEPS: usize = 16;

/// Where a name is defined: the file, and the name there.
type Defined<'t> = (&'t str, String);

impl Tree {
    /// Reads the crate whose root module is the file `root`. Files are named by their paths from `base`.
    pub(crate) fn read(base: &path::Path, root: &path::Path) -> Self {
        let mut tree = Self {
            modules: BTreeMap::new(),
            files: Vec::new(),
            base: base.canonicalize().expect("a folder"),
        };
        let folder = root.parent().expect("a file in a folder");
        tree.add_file(root, folder, Vec::new());
        tree
    }

    /// Adds the module `path` in `file`, and the modules below it, whose files are in `folder`.
    fn add_file(&mut self, file: &path::Path, folder: &path::Path, path: Path) {
        let text =
            fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let syntax =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let whole = file.canonicalize().expect("a file");
        let name = whole.strip_prefix(&self.base).expect("a file below `base`");
        let name = name.display().to_string();
        self.add(&name, &syntax.items, folder, path);
        self.files.push((name, syntax));
    }

    fn add(&mut self, file: &str, items: &[Item], folder: &path::Path, path: Path) {
        let (module, children) = modules::read(file.to_owned(), items);
        self.modules.insert(path.clone(), module);
        for child in children {
            let below = folder.join(&child.name);
            let path = [&path[..], &[child.name]].concat();
            match child.items {
                Some(items) => self.add(file, items, &below, path),
                None => {
                    let beside = below.with_extension("rs");
                    match beside.exists() {
                        true => self.add_file(&beside, &below, path),
                        false => self.add_file(&below.join("mod.rs"), &below, path),
                    }
                }
            }
        }
    }

    /// Returns, for each file, the other files that it needs, and the names that it uses from each.
    pub(crate) fn needs(&self) -> Needs {
        let mut needs = Needs::new();
        for (path, module) in &self.modules {
            for named in &module.named {
                if let Some((file, name)) = self.defines(path, named)
                    && file != module.file
                {
                    let others = needs.entry(module.file.clone()).or_default();
                    others.entry(file.to_owned()).or_default().insert(name);
                }
            }
        }
        needs
    }

    /// Returns one line for each name that a module takes from the door of a folder around it, although another
    /// file of this folder defines the name and the door only imports it. The root of the crate does not count as a
    /// door, because its names are known everywhere in the crate.
    pub(crate) fn through_own_doors(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for (path, module) in &self.modules {
            for named in &module.named {
                let Some((at, name)) = self.handed_on(path, named) else {
                    continue;
                };
                let inside = self.modules.iter();
                let mut inside = inside.filter(|(it, _)| it.len() > at.len() && it.starts_with(at));
                if let Some((file, _)) = self.defines(path, named)
                    && inside.any(|(_, other)| other.file == file)
                {
                    let door = &self.modules[at].file;
                    wrong.push(format!(
                        "{} takes {name} from {door}: take it from {file}",
                        module.file
                    ));
                }
            }
        }
        wrong
    }

    /// Returns the innermost module around `from` that the path `segments` leads through, and the name after it in
    /// the path. Returns `None` unless the module is the door of a folder around `from`, and imports the name.
    fn handed_on<'p>(
        &self,
        from: &'p [String],
        segments: &'p [String],
    ) -> Option<(&'p [String], &'p str)> {
        let shared = |(one, other): &(&String, &String)| one == other;
        let ups = segments.iter().take_while(|it| *it == "super").count();
        let (depth, next) = match segments.first()?.as_str() {
            "crate" => {
                let depth = segments[1..].iter().zip(from).take_while(shared).count();
                (depth, depth + 1)
            }
            "super" => (from.len().checked_sub(ups)?, ups),
            _ => return None,
        };
        let (at, name) = (&from[..depth], segments.get(next)?);
        let is_module = segments.len() > next + 1 && self.modules.contains_key(&below(at, name));
        let is_door = (1..from.len()).contains(&depth) && !is_module;
        let imports = &self.modules.get(at)?.imports;
        (is_door && imports.contains_key(name)).then_some((at, name.as_str()))
    }

    /// Returns the definition of the name to which the path `segments` leads from the module `from`. Returns `None`
    /// if the path leads to a module, or out of this crate.
    fn defines(&self, from: &[String], segments: &[String]) -> Option<Defined<'_>> {
        self.resolve(from, segments, STEPS)
    }

    fn resolve(&self, from: &[String], segments: &[String], left: usize) -> Option<Defined<'_>> {
        let left = left.checked_sub(1)?;
        let (first, rest) = segments.split_first()?;
        match first.as_str() {
            "crate" => self.walk(&[], rest, left),
            "self" => self.walk(from, rest, left),
            "super" => {
                let (_, parent) = from.split_last()?;
                match rest.first() {
                    Some(next) if next == "super" => self.resolve(parent, rest, left),
                    _ => self.walk(parent, rest, left),
                }
            }
            name => self.look_up(from, name, rest, left),
        }
    }

    /// Follows the path `rest` from the module `at`.
    fn walk(&self, at: &[String], rest: &[String], left: usize) -> Option<Defined<'_>> {
        let module = self.modules.get(at)?;
        let (name, more) = rest.split_first()?;
        if name == "*" {
            // All names of the module. If it has items of its own, presumably some of them are used.
            let has_own = !module.items.is_empty();
            return has_own.then(|| (module.file.as_str(), name.clone()));
        }
        let is_elsewhere = self.modules.contains_key(&below(at, name)[..])
            || module.imports.contains_key(name)
            || module.items.contains(name);
        match self.look_up(at, name, more, left) {
            None if !is_elsewhere => Some((module.file.as_str(), name.clone())),
            found => found,
        }
    }

    /// Looks up `name` in the module `at`, and follows the path `rest` from there.
    fn look_up(
        &self,
        at: &[String],
        name: &str,
        rest: &[String],
        left: usize,
    ) -> Option<Defined<'_>> {
        let left = left.checked_sub(1)?;
        let module = self.modules.get(at)?;
        let child = below(at, name);
        if self.modules.contains_key(&child) {
            return self.walk(&child, rest, left);
        }
        if module.items.contains(name) {
            return Some((module.file.as_str(), name.to_owned()));
        }
        if let Some(path) = module.imports.get(name) {
            return self.resolve(at, &[&path[..], rest].concat(), left);
        }
        let globs = module.globs.iter();
        let globs = globs.filter_map(|path| self.module(at, path, left));
        globs
            .filter(|to| to != at)
            .find_map(|to| self.look_up(&to, name, rest, left))
    }

    /// Returns the module that `path` names in the module `from`, if it names one.
    fn module(&self, from: &[String], path: &[String], left: usize) -> Option<Path> {
        let left = left.checked_sub(1)?;
        let mut at = from.to_vec();
        for (n, name) in path.iter().enumerate() {
            match name.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => {
                    at.pop()?;
                }
                name => {
                    let child = below(&at, name);
                    if !self.modules.contains_key(&child) {
                        let import = self.modules.get(&at)?.imports.get(name)?;
                        return self.module(&at, &[&import[..], &path[n + 1..]].concat(), left);
                    }
                    at = child;
                }
            }
        }
        self.modules.contains_key(&at).then_some(at)
    }
}

/// Returns the path of the module `name` below `at`.
fn below(at: &[String], name: &str) -> Path {
    [at, &[name.to_owned()]].concat()
}
