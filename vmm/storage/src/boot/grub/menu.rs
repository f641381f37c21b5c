//! The menu of a `grub.cfg`, with what each entry boots, and its default.

use super::budget::Budget;
use super::parser::{Block, parse};
use super::run::Runner;
use super::state::{Load, State};
use super::world::World;

/// Maximum depth of submenus in one another.
const MAX_DEPTH: usize = 4;
/// Maximum number of entries, those of submenus included.
const MAX_ENTRIES: usize = 256;

/// An item of the menu.
#[derive(Debug)]
pub(in super::super) struct Node {
    /// Title; `None` if it is unknown.
    pub(in super::super) title: Option<String>,
    id: Option<String>,
    /// Whether it depends on the machine that the item is there.
    is_unsure: bool,
    pub(in super::super) content: Content,
}

/// Content of an item.
#[derive(Debug)]
pub(in super::super) enum Content {
    /// What an entry loads, or why that is not known.
    Entry(Result<Load, String>),
    Submenu(Vec<Node>),
}

/// The menu.
#[derive(Debug)]
pub(in super::super) struct Menu {
    pub(in super::super) nodes: Vec<Node>,
    /// Whether entries of the Boot Loader Specification are in it, too.
    pub(in super::super) uses_bls: bool,
    /// State after the script.
    state: State,
}

/// The place of the default entry in the menu: its index in each submenu, and why it is the default.
pub(in super::super) type DefaultEntry = Result<(Vec<usize>, String), String>;

/// Runs `script`, the `grub.cfg` in `folder` on `device`.
pub(in super::super) fn run(
    script: &str,
    device: &str,
    folder: &str,
    world: &dyn World,
) -> Result<Menu, String> {
    let block = parse(script)?;
    let mut budget = Budget::new();
    let state = ran(&block, State::new(device, folder), world, &mut budget)?;
    let mut left = MAX_ENTRIES;
    let nodes = nodes(&state, world, &mut budget, MAX_DEPTH, &mut left)?;
    Ok(Menu {
        nodes,
        uses_bls: state.uses_bls,
        state,
    })
}

/// Runs the items of a menu.
fn nodes(
    state: &State,
    world: &dyn World,
    budget: &mut Budget,
    depth: usize,
    left: &mut usize,
) -> Result<Vec<Node>, String> {
    let mut nodes = Vec::new();
    for item in &state.menu {
        *left = left
            .checked_sub(1)
            .ok_or_else(|| format!("its menus have more than {MAX_ENTRIES} entries"))?;
        let content = if item.is_submenu {
            let depth = depth.checked_sub(1);
            let depth =
                depth.ok_or_else(|| format!("submenus are nested more than {MAX_DEPTH} deep"))?;
            let inner = ran(&item.body, state.for_submenu(), world, budget)?;
            Content::Submenu(self::nodes(&inner, world, budget, depth, left)?)
        } else {
            let mut state = state.clone();
            state.menu.clear();
            // What the script loaded outside of entries does not count.
            state.load = Load {
                trouble: state.load.trouble.take(),
                ..Load::default()
            };
            Content::Entry(ran(&item.body, state, world, budget).map(|state| state.load))
        };
        nodes.push(Node {
            title: item.title.clone(),
            id: item.id.clone(),
            is_unsure: item.is_unsure,
            content,
        });
    }
    Ok(nodes)
}

/// Returns the state after `body`.
fn ran(
    body: &Block,
    state: State,
    world: &dyn World,
    budget: &mut Budget,
) -> Result<State, String> {
    let mut runner = Runner::new(state, world, budget);
    runner.run(body)?;
    Ok(runner.state)
}

impl Menu {
    /// Returns the value of a variable after the script: empty if it is not set, `None` if it is unknown.
    pub(in super::super) fn variable(&self, name: &str) -> Option<&str> {
        self.state.get(name)
    }

    /// Finds the default entry. GRUB takes the first entry if the variable `default` names none.
    pub(in super::super) fn default(&self) -> DefaultEntry {
        let Some(default) = self.variable("default") else {
            return Err("its default depends on the machine".to_owned());
        };
        let mut at = Vec::new();
        let mut nodes = &self.nodes;
        let mut rest = Some(default);
        let mut why = match default {
            "" => "it is the first entry, and `default` is not set".to_owned(),
            default => format!("`default` is `{default}`"),
        };
        loop {
            let (name, after) = match rest.map(|rest| rest.split_once('>')) {
                Some(Some((name, after))) => (name, Some(after)),
                _ => (rest.unwrap_or_default(), None),
            };
            let index = match position(nodes, name)? {
                Some(index) => index,
                None => {
                    if !name.is_empty() {
                        why = format!(
                            "`default` is `{default}`, which is no entry, so the first one counts"
                        );
                    }
                    0
                }
            };
            let Some(node) = nodes.get(index) else {
                return Err("its menu is empty".to_owned());
            };
            // Only the number of an entry depends on those before it.
            let is_named = name.parse::<usize>().is_err() && position(nodes, name)?.is_some();
            let before = if is_named { index } else { 0 };
            let mut nodes_up_to = nodes.iter().take(index + 1).skip(before);
            if nodes_up_to.any(|node| node.is_unsure) {
                return Err(
                    "its default depends on a condition that only the machine can decide"
                        .to_owned(),
                );
            }
            at.push(index);
            match &node.content {
                Content::Entry(_) => return Ok((at, why)),
                Content::Submenu(inner) if after.is_some() => nodes = inner,
                Content::Submenu(_) => return Err("its default is a submenu".to_owned()),
            }
            rest = after;
        }
    }
}

/// Returns the index of the node that `name` names: by its number, title or identifier.
fn position(nodes: &[Node], name: &str) -> Result<Option<usize>, String> {
    if let Ok(index) = name.parse::<usize>() {
        return Ok((index < nodes.len()).then_some(index));
    }
    if name.is_empty() {
        return Ok(None);
    }
    let is = |text: &Option<String>| text.as_deref() == Some(name);
    let found = nodes
        .iter()
        .position(|node| is(&node.title) || is(&node.id));
    let unknown = |node: &Node| node.title.is_none() || node.id.is_none();
    let before = nodes.iter().take(found.unwrap_or(nodes.len()));
    if before.clone().any(unknown) {
        return Err("names of its entries depend on the machine".to_owned());
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
