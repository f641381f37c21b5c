//! Names of machines.
//!
//! ```text
//!              boot fails
//!   reserved ─────────────► (free), or the machine that had ended under the name
//!      │ boot succeeds
//!      ▼
//!    live ───────► ended ─────► (free): the name is taken again, too many have ended, or a client deletes it
//!          guest ends
//! ```
//! Invariant: a name belongs to one machine at a time, from the moment its boot begins.

use std::collections::BTreeMap;

use hvprobe_proto::Failure;
use hvprobe_proto::v1::ErrorKind;
use tonic::{Code, Status};

use super::handle::Handle;
use super::identity::{Asked, reused};
use crate::bounds::limits;
use crate::bounds::server_limits::Limits;
use crate::status;

/// The names of a server's machines.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// Set once no machine can be booted any more.
    pub(crate) closed: bool,
    next_number: u64,
    named: BTreeMap<String, Slot>,
}

#[derive(Debug)]
enum Slot {
    /// A boot is under way. Until it has succeeded, the machine that ended under this name is kept.
    Reserved {
        before: Option<Handle>,
        /// The request for the machine.
        asked: Asked,
    },
    Taken(Handle),
}

/// Result of the same request, if it was made before.
#[derive(Debug)]
pub(crate) enum Made {
    Nothing,
    /// The machine is being booted.
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
    /// Returns the machine called `name`.
    pub(crate) fn get(&self, name: &str) -> Result<Handle, Status> {
        match self.named.get(name) {
            Some(Slot::Taken(handle)) => Ok(handle.clone()),
            Some(Slot::Reserved { .. }) => Err(status::booting(name)),
            None => Err(no_such_machine(name)),
        }
    }

    /// Returns all machines, ordered by name.
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

    /// Returns what the same request has created before. A request without an id is equal to no other.
    ///
    /// # Errors
    /// When another request has used its id.
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

    /// Checks that `name` can be reserved for one more machine. If `name` is empty, sets it to a free one.
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
            // There are more names than machines, so one is free.
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

    /// Reserves `name`, which has been checked, for the boot of this request. Returns the number of the boot.
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

    /// Ends the reservation of `name`. The name then belongs to `machine` or, if that is `None`, to the machine
    /// that had ended under it.
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

    /// Removes the ended machine called `name`.
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

    /// Removes the ended machines that exceed the limits, the oldest ones first. Returns the number of removed
    /// machines.
    pub(crate) fn forget_oldest(&mut self, limits: &Limits) -> usize {
        let ended = self.named.iter().filter_map(|(name, slot)| match slot {
            Slot::Taken(handle) => {
                let bytes = handle.kept_bytes()?;
                Some((handle.changed(), handle.number, name.clone(), bytes))
            }
            Slot::Reserved { .. } => None,
        });
        let mut ended: Vec<_> = ended.collect();
        // The machine that ended last comes first.
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

/// Returns the error that no machine is called `name`.
fn no_such_machine(name: &str) -> Status {
    // The error does not repeat an invalid name.
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
