//! Chooses the entry that is booted.

use super::entry::Entry;

/// The entry that is booted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Its index among the entries.
    pub entry: usize,
    /// Why it is this one.
    pub why: String,
}

/// A boot loader's menu: its name, its entries as indexes in its order, and its default with the reason, or why
/// that is unknown.
#[derive(Debug)]
pub(super) struct Loader {
    pub(super) name: &'static str,
    pub(super) order: Vec<usize>,
    pub(super) default: Result<(usize, String), String>,
}

/// Chooses the default entry of the first loader whose default can be used. If there is none, the first entry that
/// can be used is chosen: it may be one for recovery. Returns why there is no such entry, otherwise.
pub(super) fn choose(entries: &[Entry], loaders: &[Loader]) -> Result<Choice, String> {
    let mut reasons = Vec::new();
    let mut chosen = None;
    for Loader { name, default, .. } in loaders {
        match default {
            Ok((index, why)) => match entries.get(*index).map(|entry| &entry.boot) {
                Some(Ok(_)) => {
                    reasons.push(format!("{name}: {why}"));
                    chosen = Some(*index);
                    break;
                }
                Some(Err(why)) => {
                    reasons.push(format!("{name}: the default entry cannot be used ({why})"));
                }
                None => reasons.push(format!("{name}: there is no default entry")),
            },
            Err(why) => reasons.push(format!("{name}: {why}")),
        }
    }
    if chosen.is_none() {
        let usable = |index: &&usize| entries.get(**index).is_some_and(|it| it.boot.is_ok());
        let mut all = loaders.iter().flat_map(|loader| &loader.order);
        chosen = all.find(usable).copied();
        if chosen.is_some() {
            reasons.push("it is the first entry that can be used".to_owned());
        }
    }
    if reasons.is_empty() {
        reasons.push("there is no boot entry and no kernel in /boot".to_owned());
    }
    let why = reasons.join("; ");
    match chosen {
        Some(entry) => Ok(Choice { entry, why }),
        None => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::{Boot, Origin, Piece};
    use super::*;

    /// Makes entries of which only some can be used.
    fn entries(usable: &[bool]) -> Vec<Entry> {
        let piece = Piece {
            partition: None,
            path: "/linux".to_owned(),
            size: 1,
            section: None,
        };
        let boot = Boot {
            kernel: piece,
            initrds: Vec::new(),
            options: String::new(),
        };
        let entry = |usable: &bool| Entry {
            partition: None,
            origin: Origin::Fallback,
            title: String::new(),
            version: None,
            boot: usable.then(|| boot.clone()).ok_or("odd".to_owned()),
        };
        usable.iter().map(entry).collect()
    }

    fn loader(name: &'static str, order: &[usize], default: Option<usize>) -> Loader {
        Loader {
            name,
            order: order.to_vec(),
            default: default
                .map(|index| (index, "so".to_owned()))
                .ok_or("unknown".to_owned()),
        }
    }

    #[test]
    fn defaults_come_before_other_entries() {
        let two = |one: Option<usize>, other: Option<usize>| {
            [loader("A", &[0, 1], one), loader("B", &[2], other)]
        };
        for (usable, loaders, expected) in [
            ([true, true, true], two(Some(1), Some(2)), Ok((1, "A: so"))),
            (
                [true, false, true],
                two(Some(1), Some(2)),
                Ok((2, "A: the default entry cannot be used (odd); B: so")),
            ),
            (
                [false, true, false],
                two(None, Some(2)),
                Ok((
                    1,
                    "A: unknown; B: the default entry cannot be used (odd); it is the first entry that can be used",
                )),
            ),
            (
                [false; 3],
                two(Some(0), None),
                Err("A: the default entry cannot be used (odd); B: unknown"),
            ),
        ] {
            let found = choose(&entries(&usable), &loaders);
            let expected = expected.map(|(entry, why)| Choice {
                entry,
                why: why.to_owned(),
            });
            assert_eq!(found, expected.map_err(str::to_owned));
        }
        let error = choose(&[], &[]).unwrap_err();
        assert_eq!(error, "there is no boot entry and no kernel in /boot");
    }
}
