//! What running a script changes: variables, functions, the menu, and what is to be booted.

use std::collections::BTreeMap;

use super::parser::Block;

/// Longest value of a variable. A longer one counts as unknown.
const MAX_VALUE: usize = 1 << 16;

/// Variables that depend on the machine.
const OF_THE_MACHINE: [&str; 9] = [
    "?",
    "chosen",
    "cmdpath",
    "fw_path",
    "gfxmode",
    "grub_cpu",
    "grub_platform",
    "lockdown",
    "shim_lock",
];

/// Features that GRUB 2 announces by variables with the value `y`.
const FEATURES: [&str; 9] = [
    "feature_200_final",
    "feature_all_video_module",
    "feature_chainloader_bpb",
    "feature_default_font_path",
    "feature_menuentry_id",
    "feature_menuentry_options",
    "feature_ntldr",
    "feature_platform_search_hint",
    "feature_timeout_style",
];

/// Names of the arguments of functions that are followed. More are unknown.
const ARGUMENTS: [&str; 9] = ["1", "2", "3", "4", "5", "6", "7", "8", "9"];

/// A value; `None` if it is unknown.
pub(super) type Value = Option<String>;

/// A variable.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Variable {
    value: Value,
    /// Whether submenus see it.
    is_exported: bool,
}

/// An item of the menu, not run.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) title: Value,
    pub(super) id: Value,
    pub(super) body: Block,
    pub(super) is_submenu: bool,
    /// Whether it depends on the machine that the item is there.
    pub(super) is_unsure: bool,
}

/// A file that is to be loaded: its device, and its path there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Loaded {
    pub(in super::super) device: String,
    pub(in super::super) path: String,
}

/// What the commands of an entry load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Load {
    pub(in super::super) kernel: Option<Loaded>,
    pub(in super::super) options: String,
    pub(in super::super) initrds: Vec<Loaded>,
    /// Why that is not all known.
    pub(in super::super) trouble: Option<String>,
}

/// Arguments of the function that calls another one.
#[derive(Debug)]
pub(super) struct Caller([Option<Variable>; 9]);

/// What running a script changes.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    variables: BTreeMap<String, Variable>,
    pub(super) functions: BTreeMap<String, Block>,
    pub(super) menu: Vec<Item>,
    pub(super) load: Load,
    /// Whether the menu gets the entries of the Boot Loader Specification, too.
    pub(super) uses_bls: bool,
}

impl State {
    /// Returns the state in which GRUB starts a script on `device` in `folder`.
    pub(super) fn new(device: &str, folder: &str) -> Self {
        let mut state = Self::default();
        for feature in FEATURES {
            state.set(feature, Some("y".to_owned()));
        }
        let here = format!("({device}){folder}");
        state.set("root", Some(device.to_owned()));
        state.set("prefix", Some(here.clone()));
        state.set("config_directory", Some(here.clone()));
        state.set("config_file", Some(format!("{here}/grub.cfg")));
        for name in ["root", "prefix", "config_directory", "config_file"] {
            state.export(name);
        }
        state
    }

    /// Returns the value of the variable `name`: empty if it is not set, `None` if it is unknown.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        match self.variables.get(name) {
            Some(variable) => variable.value.as_deref(),
            // Outside of functions, arguments are not followed; others never are.
            None if OF_THE_MACHINE.contains(&name) || !name.starts_with(is_start) => None,
            None => Some(""),
        }
    }

    pub(super) fn set(&mut self, name: &str, value: Value) {
        let value = value.filter(|value| value.len() <= MAX_VALUE);
        let variable = self.variables.entry(name.to_owned());
        let variable = variable.or_insert(Variable {
            value: None,
            is_exported: false,
        });
        variable.value = value;
    }

    pub(super) fn export(&mut self, name: &str) {
        if let Some(variable) = self.variables.get_mut(name) {
            variable.is_exported = true;
        }
    }

    /// Sets the arguments of a function. Returns those of its caller.
    pub(super) fn enter(&mut self, arguments: impl Iterator<Item = Value>) -> Caller {
        let mut arguments = arguments.fuse();
        let caller = ARGUMENTS.map(|name| self.variables.remove(name));
        for name in ARGUMENTS {
            self.set(
                name,
                arguments.next().unwrap_or_else(|| Some(String::new())),
            );
        }
        Caller(caller)
    }

    /// Sets the arguments of the caller again.
    pub(super) fn leave(&mut self, caller: Caller) {
        for (name, argument) in ARGUMENTS.into_iter().zip(caller.0) {
            match argument {
                Some(argument) => self.variables.insert(name.to_owned(), argument),
                None => self.variables.remove(name),
            };
        }
    }

    /// Returns the state in which a submenu starts: GRUB hides variables that are not exported.
    pub(super) fn for_submenu(&self) -> Self {
        let mut state = self.clone();
        state.variables.retain(|_, variable| variable.is_exported);
        state.menu.clear();
        state
    }

    /// Returns whether all variables have the values that they have in `other`.
    pub(super) fn has_values_of(&self, other: &Self) -> bool {
        self.variables == other.variables
    }

    /// Returns what is known if it is unknown which of two states comes after this one.
    pub(super) fn either(&self, mut one: Self, other: Self) -> Self {
        let names: Vec<String> = one
            .variables
            .keys()
            .chain(other.variables.keys())
            .cloned()
            .collect();
        for name in names {
            if one.get(&name) != other.get(&name) {
                one.set(&name, None);
            }
            if other.variables.get(&name).is_some_and(|it| it.is_exported) {
                one.export(&name);
            }
        }
        one.functions.extend(other.functions);
        // Items of both are kept, and marked.
        let before = self.menu.len();
        one.menu.extend(other.menu.into_iter().skip(before));
        for item in one.menu.iter_mut().skip(before) {
            item.is_unsure = true;
        }
        if one.load != other.load {
            let why = "what it boots depends on a condition that only the machine can decide";
            one.load.trouble.get_or_insert(why.to_owned());
        }
        one.uses_bls |= other.uses_bls;
        one
    }
}

/// Returns whether names of variables begin with `c`. Others are those of arguments.
fn is_start(c: char) -> bool {
    c.is_ascii_alphabetic() || c == '_'
}
