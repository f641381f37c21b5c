//! Runs a script of GRUB.

use std::rc::Rc;

use super::budget::Budget;
use super::condition::test;
use super::environment::variables;
use super::expand::{Argument, expand};
use super::lexer::{Part, Word};
use super::loading::{initrd, linux};
use super::parser::{Block, Statement, parse};
use super::search::{Searched, search};
use super::state::{Item, State, Value};
use super::world::{Key, World, split};

/// Maximum depth of functions and other files in one another.
const MAX_CALLS: usize = 8;
/// Maximum number of times that the body of a loop is run.
const MAX_PASSES: usize = 8;
/// Maximum number of items of a menu, without those of its submenus.
const MAX_ITEMS: usize = 256;

/// Why a script cannot be run to its end.
pub(super) type Failure = String;

/// Runs scripts on a disk.
pub(super) struct Runner<'r> {
    pub(super) state: State,
    world: &'r dyn World,
    budget: &'r mut Budget,
    calls: usize,
}

impl<'r> Runner<'r> {
    pub(super) fn new(state: State, world: &'r dyn World, budget: &'r mut Budget) -> Self {
        Self {
            state,
            world,
            budget,
            calls: 0,
        }
    }

    /// Runs the statements of `block`. Returns the result of the last one: whether it was successful, `None` if
    /// that is unknown.
    pub(super) fn run(&mut self, block: &Block) -> Result<Option<bool>, Failure> {
        let mut status = Some(true);
        for statement in &**block {
            self.budget.step()?;
            status = match statement {
                Statement::Command { words, block } => {
                    let arguments = expand(words, &self.state);
                    let known = arguments.iter().filter_map(Argument::known);
                    self.budget.bytes(known.map(str::len).sum())?;
                    self.forget(words, &arguments);
                    let is_assignment = words.first().is_some_and(is_assignment);
                    self.command(&arguments, is_assignment, block.as_ref())?
                }
                Statement::If { arms, otherwise } => self.condition(arms, otherwise)?,
                Statement::Loop { variable, body } => {
                    // How often it runs is unknown, so what it changes is, too.
                    let name = variable.as_ref().and_then(|word| word.bare());
                    if let Some(name) = name {
                        self.state.set(name, None);
                    }
                    self.repeat(body)?;
                    None
                }
                Statement::Function { name, body } => {
                    self.state.functions.insert(name.clone(), Rc::clone(body));
                    Some(true)
                }
            };
        }
        Ok(status)
    }

    /// Runs the body of a loop until no more variables become unknown.
    fn repeat(&mut self, body: &Block) -> Result<(), Failure> {
        let mut menu = None;
        for _ in 0..MAX_PASSES {
            let before = self.state.clone();
            self.maybe(|this| this.run(body).map(|_| ()), |_| Ok(()))?;
            // Items of the menu are kept once.
            let menu = menu.get_or_insert_with(|| self.state.menu.clone());
            self.state.menu.clone_from(menu);
            if self.state.has_values_of(&before) {
                return Ok(());
            }
        }
        self.trouble("it has a loop that cannot be followed");
        Ok(())
    }

    fn condition(
        &mut self,
        arms: &[(Block, Block)],
        otherwise: &Block,
    ) -> Result<Option<bool>, Failure> {
        let Some(((condition, body), rest)) = arms.split_first() else {
            return self.run(otherwise);
        };
        match self.run(condition)? {
            Some(true) => self.run(body),
            Some(false) => self.condition(rest, otherwise),
            None => {
                self.maybe(
                    |this| this.run(body).map(|_| ()),
                    |this| this.condition(rest, otherwise).map(|_| ()),
                )?;
                Ok(None)
            }
        }
    }

    /// Runs one of two parts, where it is unknown which.
    fn maybe(
        &mut self,
        one: impl FnOnce(&mut Self) -> Result<(), Failure>,
        other: impl FnOnce(&mut Self) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.budget.unknown()?;
        let before = self.state.clone();
        one(self)?;
        let after_one = std::mem::replace(&mut self.state, before.clone());
        other(self)?;
        let after_other = std::mem::take(&mut self.state);
        self.state = before.either(after_one, after_other);
        Ok(())
    }

    /// Makes variables unknown that get an unknown value: those in words that begin with `NAME=`.
    fn forget(&mut self, words: &[Word], arguments: &[Argument]) {
        if arguments.iter().all(|argument| argument.known().is_some()) {
            return;
        }
        for word in words.iter().filter(|word| is_assignment(word)) {
            if let Some(Part::Text(text)) = word.parts.first()
                && let Some((name, _)) = text.split_once('=')
            {
                self.state.set(name, None);
            }
        }
    }

    /// Carries out a command.
    fn command(
        &mut self,
        arguments: &[Argument],
        is_assignment: bool,
        block: Option<&Block>,
    ) -> Result<Option<bool>, Failure> {
        let Some((command, arguments)) = arguments.split_first() else {
            return Ok(Some(true));
        };
        let Some(command) = command.known() else {
            // An assignment of an unknown value, or a command that may do anything.
            if !is_assignment {
                self.trouble("it runs a command whose name is unknown");
            }
            return Ok(None);
        };
        if matches!(command, "[" | "test" | "load_env" | "source" | ".")
            || command.starts_with("search")
        {
            self.budget.lookup()?;
        }
        match command {
            "menuentry" | "submenu" => {
                if let Some(block) = block {
                    self.item(command == "submenu", arguments, block)?;
                }
                return Ok(Some(true));
            }
            "[" => {
                let condition = match arguments.split_last() {
                    Some((end, condition)) if end.known() == Some("]") => condition,
                    _ => return Ok(None),
                };
                return Ok(test(condition, &self.state, self.world));
            }
            "test" => return Ok(test(arguments, &self.state, self.world)),
            "true" => return Ok(Some(true)),
            "false" => return Ok(Some(false)),
            "set" => arguments.iter().for_each(|it| self.assign(it)),
            "unset" => {
                for name in arguments.iter().filter_map(Argument::known) {
                    self.state.set(name, Some(String::new()));
                }
            }
            "export" => {
                for name in arguments.iter().filter_map(Argument::known) {
                    self.state.export(name);
                }
            }
            "linux" | "linux16" | "linuxefi" => linux(arguments, &mut self.state),
            "initrd" | "initrd16" | "initrdefi" => initrd(arguments, &mut self.state),
            "search" => return Ok(self.search(None, arguments)),
            "search.fs_uuid" => return Ok(self.search(Some(Key::Uuid), arguments)),
            "search.fs_label" => return Ok(self.search(Some(Key::Label), arguments)),
            "search.file" => return Ok(self.search(Some(Key::File), arguments)),
            "load_env" => self.load_env(arguments)?,
            "source" | "." => return self.source(arguments),
            "blscfg" => self.state.uses_bls = true,
            // Their effects cannot be followed, or end the script.
            "eval" | "configfile" | "return" | "exit" | "break" | "continue" | "normal"
            | "normal_exit" | "boot" | "halt" | "reboot" | "chainloader" | "multiboot"
            | "multiboot2" | "module" | "module2" | "kexec" => {
                self.trouble(&format!("it uses `{command}`, which is not followed"));
            }
            _ => return self.other(command, arguments),
        }
        Ok(Some(true))
    }

    /// Carries out a function, an assignment, or a command that is not known here.
    fn other(&mut self, command: &str, arguments: &[Argument]) -> Result<Option<bool>, Failure> {
        if let Some(body) = self.state.functions.get(command).cloned() {
            let caller = self
                .state
                .enter(arguments.iter().cloned().map(Argument::into_value));
            let status = self.nested(|this| this.run(&body));
            self.state.leave(caller);
            return status;
        }
        if let Some((name, value)) = command.split_once('=') {
            self.state.set(name, Some(value.to_owned()));
            return Ok(Some(true));
        }
        // Commands such as `regexp` and `probe` set variables.
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next().and_then(Argument::known) {
            let named = match argument {
                "-s" | "--set" => rest.next().and_then(Argument::known),
                argument => argument.strip_prefix("--set="),
            };
            // `regexp` has a number in front.
            if let Some(name) = named.and_then(|name| name.rsplit(':').next()) {
                self.state.set(name, None);
            }
        }
        if command == "read"
            && let Some(name) = arguments.iter().filter_map(Argument::known).next_back()
        {
            self.state.set(name, None);
        }
        Ok(None)
    }

    fn nested(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<Option<bool>, Failure>,
    ) -> Result<Option<bool>, Failure> {
        if self.calls == MAX_CALLS {
            return Err(format!("functions are nested more than {MAX_CALLS} deep"));
        }
        self.calls += 1;
        let status = run(self);
        self.calls -= 1;
        status
    }

    fn trouble(&mut self, why: &str) {
        self.state
            .load
            .trouble
            .get_or_insert_with(|| why.to_owned());
    }

    /// Carries out `NAME=VALUE` of a `set`. [`Self::forget`] has seen to unknown values.
    fn assign(&mut self, argument: &Argument) {
        if let Some((name, value)) = argument.known().and_then(|text| text.split_once('=')) {
            self.state.set(name, Some(value.to_owned()));
        }
    }

    fn item(
        &mut self,
        is_submenu: bool,
        arguments: &[Argument],
        body: &Block,
    ) -> Result<(), Failure> {
        if self.state.menu.len() == MAX_ITEMS {
            return Err(format!("its menu has more than {MAX_ITEMS} entries"));
        }
        let mut title: Option<Value> = None;
        let mut id: Option<Value> = None;
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.known() {
                Some("--id") => id = rest.next().map(|it| it.clone().into_value()),
                Some("--class" | "--users" | "--hotkey" | "--source") => {
                    rest.next();
                }
                Some(text) if text.starts_with("--id=") => {
                    id = Some(text.strip_prefix("--id=").map(str::to_owned));
                }
                Some(text) if text.starts_with("--") => {}
                _ => {
                    title.get_or_insert_with(|| argument.clone().into_value());
                }
            }
        }
        let title = title.unwrap_or(None);
        self.state.menu.push(Item {
            // Without an identifier, the title is one.
            id: id.unwrap_or_else(|| title.clone()),
            title,
            body: Rc::clone(body),
            is_submenu,
            is_unsure: false,
        });
        Ok(())
    }

    fn search(&mut self, key: Option<Key>, arguments: &[Argument]) -> Option<bool> {
        match search(key, arguments, self.world) {
            Searched::Nothing => None,
            Searched::Found(variable, device) => {
                self.state.set(&variable, Some(device));
                Some(true)
            }
            Searched::NotFound => Some(false),
            Searched::Unknown(variable) => {
                self.state.set(&variable, None);
                None
            }
        }
    }

    /// Carries out `load_env [-f FILE] [NAME...]`.
    fn load_env(&mut self, arguments: &[Argument]) -> Result<(), Failure> {
        let mut rest = arguments.iter();
        let mut file = self
            .state
            .get("prefix")
            .map(|prefix| format!("{prefix}/grubenv"));
        let mut names = Vec::new();
        while let Some(argument) = rest.next() {
            match argument.known() {
                Some("-f" | "--file") => {
                    file = rest.next().and_then(Argument::known).map(str::to_owned);
                }
                Some(text) if text.starts_with("--file=") => {
                    file = text.strip_prefix("--file=").map(str::to_owned);
                }
                Some(text) if text.starts_with('-') => {}
                Some(name) => names.push(name.to_owned()),
                None => {}
            }
        }
        let content = match file.as_deref() {
            Some(file) => self.read(file)?,
            None => None,
        };
        for (name, value) in content.as_deref().map(variables).unwrap_or_default() {
            if names.is_empty() || names.contains(&name) {
                self.state.set(&name, Some(value));
            }
        }
        Ok(())
    }

    /// Reads a file that a script names.
    fn read(&mut self, file: &str) -> Result<Option<Vec<u8>>, Failure> {
        let (device, path) = split(file);
        let device = device.or_else(|| self.state.get("root"));
        let content = device.and_then(|device| self.world.read(device, path));
        self.budget.bytes(content.as_ref().map_or(0, Vec::len))?;
        Ok(content)
    }

    fn source(&mut self, arguments: &[Argument]) -> Result<Option<bool>, Failure> {
        let content = match arguments.first().map(Argument::known) {
            Some(Some(file)) => self.read(file)?,
            _ => None,
        };
        match content.as_deref().map(std::str::from_utf8) {
            Some(Ok(script)) => {
                let block = parse(script)?;
                self.nested(|this| this.run(&block))
            }
            Some(Err(_)) => Err("a file that it sources is not UTF-8".to_owned()),
            None => Ok(Some(false)),
        }
    }
}

/// Returns whether a word begins with `NAME=`.
fn is_assignment(word: &Word) -> bool {
    matches!(word.parts.first(), Some(Part::Text(text)) if text.contains('='))
}
