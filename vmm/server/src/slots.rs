//! Who has which name.
//!
//! ```text
//!              boot fails
//!   reserved ─────────────► (free), or what had ended there
//!      │ boot succeeds
//!      ▼
//!    live ───────► ended ─────► (free): the name is taken again, or too many have ended
//!          guest ends
//! ```
//! What is kept true: a name belongs to one machine at a time, and from the moment its boot begins.

use std::collections::BTreeMap;

use hvprobe_proto::v1::ErrorKind;
use tonic::{Code, Status};

use super::allowed::Limits;
use super::handle::Handle;
use super::identity::{Asked, reused};
use super::limits;
use super::status::{self, Failure};

/// The names of a server.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// Nothing can be booted any more.
    pub(crate) closed: bool,
    next_number: u64,
    named: BTreeMap<String, Slot>,
}

#[derive(Debug)]
enum Slot {
    /// A boot is under way. Until it has succeeded, what ended before under the name is kept.
    Reserved {
        before: Option<Handle>,
        /// What the request for it said.
        asked: Asked,
    },
    Taken(Handle),
}

/// What has come of a request for a machine.
#[derive(Debug)]
pub(crate) enum Made {
    Nothing,
    /// It is being booted.
    UnderWay,
    Machine(Handle),
}

impl Slot {
    fn is_live(&self) -> bool {
        match self {
            Self::Reserved { .. } => true,
            Self::Taken(handle) => handle.is_live(),
        }
    }

    fn asked(&self) -> &Asked {
        match self {
            Self::Reserved { asked, .. } => asked,
            Self::Taken(handle) => handle.identity.asked(),
        }
    }
}

impl Slots {
    /// The machine called `name`.
    pub(crate) fn get(&self, name: &str) -> Result<Handle, Status> {
        match self.named.get(name) {
            Some(Slot::Taken(handle)) => Ok(handle.clone()),
            Some(Slot::Reserved { .. }) => Err(status::booting(name)),
            None => Err(no_such_machine(name)),
        }
    }

    /// All machines, by name.
    pub(crate) fn all(&self) -> Vec<Handle> {
        let taken = self.named.values().filter_map(|slot| match slot {
            Slot::Taken(handle) => Some(handle.clone()),
            Slot::Reserved { before, .. } => before.clone(),
        });
        taken.collect()
    }

    /// Whether a boot is under way.
    pub(crate) fn is_booting(&self) -> bool {
        let reserved = |slot: &Slot| matches!(slot, Slot::Reserved { .. });
        self.named.values().any(reserved)
    }

    /// What has come of this request before. One without an id is like no other.
    ///
    /// # Errors
    /// When another request had its id, too.
    pub(crate) fn made_by(&self, wanted: &Asked) -> Result<Made, Status> {
        let of_its_id = self.named.iter().find(|(_, slot)| {
            !wanted.request_id.is_empty() && slot.asked().request_id == wanted.request_id
        });
        match of_its_id {
            None => Ok(Made::Nothing),
            Some((_, slot)) if slot.asked() != wanted => Err(reused(&wanted.request_id)),
            Some((_, Slot::Taken(handle))) => Ok(Made::Machine(handle.clone())),
            Some((_, Slot::Reserved { .. })) => Ok(Made::UnderWay),
        }
    }

    /// That `name`, or if it is empty one that it is given, can be taken for one machine more.
    pub(crate) fn can_reserve(&self, name: &mut String, limits: &Limits) -> Result<(), Status> {
        if self.closed {
            return Err(status::stopping());
        }
        let most = limits.machines;
        if self.named.values().filter(|slot| slot.is_live()).count() >= most {
            let message = format!("there are {most} machines already: stop one first");
            let kind = ErrorKind::TooManyMachines;
            return Err(Failure::new(Code::ResourceExhausted, kind, message)
                .bound("machines", most, 0)
                .into());
        }
        if name.is_empty() {
            let mut free = (0_u64..).map(|number| format!("vm{number}"));
            // Among more names than there can be machines, one is free.
            if let Some(free) = free.find(|name| !self.named.contains_key(name)) {
                *name = free;
            }
        }
        limits::machine_name(name).map_err(|bad| bad.on("name"))?;
        match self.named.get(name) {
            Some(taken) if taken.is_live() => {
                let message = format!("there is a machine `{name}` already");
                let kind = ErrorKind::MachineExists;
                Err(Failure::new(Code::AlreadyExists, kind, message)
                    .on("name")
                    .into())
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Takes `name`, which can be, for the boot that this request asks for; returns its number.
    pub(crate) fn reserve(&mut self, name: &str, asked: &Asked) -> u64 {
        let before = match self.named.remove(name) {
            Some(Slot::Taken(ended)) => Some(ended),
            Some(Slot::Reserved { .. }) | None => None,
        };
        let asked = asked.clone();
        let reserved = Slot::Reserved { before, asked };
        self.named.insert(name.to_owned(), reserved);
        self.next_number += 1;
        self.next_number
    }

    /// Ends the reservation of `name`, which becomes `machine`'s, or what it was before.
    pub(crate) fn settle(&mut self, name: &str, machine: Option<&Handle>) {
        let before = match self.named.remove(name) {
            Some(Slot::Reserved { before, .. }) => before,
            Some(Slot::Taken(handle)) => Some(handle),
            None => None,
        };
        if let Some(handle) = machine.cloned().or(before) {
            self.named.insert(name.to_owned(), Slot::Taken(handle));
        }
    }

    /// Forgets the machine called `name`, which has ended.
    pub(crate) fn forget(&mut self, name: &str) -> Result<(), Status> {
        match self.named.get(name) {
            None => Err(no_such_machine(name)),
            Some(slot) if slot.is_live() => Err(Failure::new(
                Code::FailedPrecondition,
                ErrorKind::MachineRunning,
                format!("machine `{name}` has not ended: stop it first"),
            )
            .into()),
            Some(_) => {
                self.named.remove(name);
                Ok(())
            }
        }
    }

    /// Forgets the oldest ended machines beyond those that are remembered; returns how many.
    pub(crate) fn forget_oldest(&mut self, limits: &Limits) -> usize {
        let ended = self.named.iter().filter_map(|(name, slot)| match slot {
            Slot::Taken(handle) => {
                let bytes = handle.kept_bytes()?;
                Some((handle.changed(), handle.number, name.clone(), bytes))
            }
            Slot::Reserved { .. } => None,
        });
        let mut ended: Vec<_> = ended.collect();
        // The one that ended last comes first.
        ended.sort_unstable_by(|one, other| other.cmp(one));
        let (mut kept, mut bytes, mut forgotten) = (0, 0_usize, 0);
        for (_, _, name, more) in ended {
            bytes = bytes.saturating_add(more);
            let fits = kept == 0 || bytes <= limits.ended_bytes;
            if kept < limits.ended_machines && fits && forgotten == 0 {
                kept += 1;
            } else {
                self.named.remove(&name);
                forgotten += 1;
            }
        }
        forgotten
    }
}

/// Nobody is called `name`.
fn no_such_machine(name: &str) -> Status {
    // A name that cannot be one is not worth repeating.
    let failure = match limits::machine_name(name) {
        Ok(()) => Failure::new(
            Code::NotFound,
            ErrorKind::NoSuchMachine,
            format!("there is no machine `{name}`"),
        ),
        Err(bad) => bad,
    };
    failure.on("machine").into()
}
