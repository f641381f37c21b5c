//! The command `search` (`grub-core/commands/search_wrap.c`).

use super::expand::Argument;
use super::world::{Key, World};

/// What a `search` does to a variable.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Searched {
    /// Nothing is searched, or the result is only printed.
    Nothing,
    /// The variable gets this device.
    Found(String, String),
    /// No device fits: the variable keeps its value.
    NotFound,
    /// What is searched is unknown, so the variable is, too.
    Unknown(String),
}

/// Carries out `search` or, with its key, `search.fs_uuid` and the like.
pub(super) fn search(key: Option<Key>, arguments: &[Argument], world: &dyn World) -> Searched {
    let mut rest = arguments.iter();
    let (mut by, mut variable, mut what) = (key, None, None);
    if key.is_some() {
        // NAME [VARIABLE] [HINTS]
        what = rest.next();
        variable = Some(rest.next().map_or(Some("root"), Argument::known));
    } else {
        while let Some(argument) = rest.next() {
            match argument.known() {
                Some("-u" | "--fs-uuid") => by = Some(Key::Uuid),
                Some("-l" | "--label" | "--fs-label") => by = Some(Key::Label),
                Some("--part-uuid") => by = Some(Key::PartUuid),
                Some("-f" | "--file") => by = Some(Key::File),
                Some("-s") => variable = Some(rest.next().and_then(Argument::known)),
                Some("--set") => variable = Some(Some("root")),
                // Hints with a separate value.
                Some("-h" | "--hint" | "--hint-ieee1275" | "--hint-bios" | "--hint-baremetal")
                | Some("--hint-efi" | "--hint-arc") => {
                    rest.next();
                }
                Some(text) if text.starts_with("--set=") => {
                    variable = Some(text.strip_prefix("--set="));
                }
                Some(text) if text.starts_with('-') => {}
                _ => what = what.or(Some(argument)),
            }
        }
    }
    let Some(variable) = variable else {
        return Searched::Nothing;
    };
    let Some(variable) = variable else {
        // Any variable may have changed; `root` is the one that matters.
        return Searched::Unknown("root".to_owned());
    };
    match (what.and_then(Argument::known), what) {
        (Some(what), _) => match world.find(by.unwrap_or(Key::File), what) {
            Some(device) => Searched::Found(variable.to_owned(), device),
            None => Searched::NotFound,
        },
        (None, Some(_)) => Searched::Unknown(variable.to_owned()),
        (None, None) => Searched::Nothing,
    }
}
