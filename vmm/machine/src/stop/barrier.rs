//! Which virtual CPU may run, decided: no locks, no threads, no waiting.
//!
//! ```text
//!             park                       proceed: run
//!   starting ──────► parked ◄──────────────────────────► running
//!                      │              park                  │
//!                      │ proceed: end                       │ leave
//!                      └───────────────► ended ◄────────────┘
//! ```
//! A parked virtual CPU stays while something keeps it: a *transaction* (text is being changed), a
//! *pause* of the machine, or a *hold* of its own. The *end* makes it leave whatever else keeps it.
//! These are independent of each other. An *NMI* keeps nobody; it only wants attention, and waits
//! until the virtual CPU takes it, which it does when asked and when it goes on.
//!
//! Invariants, whatever the order of calls:
//! - from the moment [`Barrier::stopped`] said so until [`Barrier::finish`], nothing runs;
//! - a running virtual CPU that something wants to keep, or that an NMI waits for, has been asked, by
//!   [`Barrier::asks`], since it began to run; one that nothing wants is not asked;
//! - once ended, a virtual CPU stays so, and after [`Barrier::end`] each is ended by its next
//!   `park` and `proceed`.

use hvprobe_engine::Standing;

/// Where a virtual CPU is in the picture above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Its thread has not begun; it parks before it runs anything.
    Starting,
    /// It may be executing the guest.
    Running,
    /// It waits. It has no standing if it has not run yet.
    Parked(Option<Standing>),
    /// Its thread has left its loop.
    Ended,
}

/// What becomes of a parked virtual CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proceed {
    /// It runs.
    Run,
    /// It leaves its loop.
    End,
    /// Something keeps it.
    Stay,
}

/// Whether everything stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// No virtual CPU runs.
    Yes,
    /// This one does.
    Not(usize),
    /// The machine ends or has ended.
    Over,
}

#[derive(Clone, Copy, Debug)]
struct Vcpu {
    presence: Presence,
    held: bool,
    nmi: bool,
    asked: bool,
}

/// The state of all virtual CPUs of a machine.
#[derive(Clone, Debug)]
pub(crate) struct Barrier {
    transaction: bool,
    paused: bool,
    ending: bool,
    vcpus: Vec<Vcpu>,
}

impl Barrier {
    /// `vcpus` virtual CPUs that are starting; nothing keeps them.
    pub(crate) fn new(vcpus: usize) -> Self {
        let vcpu = Vcpu {
            presence: Presence::Starting,
            held: false,
            nmi: false,
            asked: false,
        };
        Self {
            transaction: false,
            paused: false,
            ending: false,
            vcpus: vec![vcpu; vcpus],
        }
    }

    /// Virtual CPU `index` does not run any more.
    pub(crate) fn park(&mut self, index: usize, standing: Option<Standing>) {
        self.vcpus[index].presence = Presence::Parked(standing);
    }

    /// Whether parked virtual CPU `index` may go on; if so, it has.
    pub(crate) fn proceed(&mut self, index: usize) -> Proceed {
        let kept = self.keeps(index);
        let vcpu = &mut self.vcpus[index];
        if self.ending {
            vcpu.presence = Presence::Ended;
            Proceed::End
        } else if kept {
            Proceed::Stay
        } else {
            vcpu.presence = Presence::Running;
            Proceed::Run
        }
    }

    /// Virtual CPU `index` has left its loop.
    pub(crate) fn leave(&mut self, index: usize) {
        self.vcpus[index].presence = Presence::Ended;
    }

    /// A transaction wants everything to stand still. One at a time.
    pub(crate) fn begin(&mut self) {
        self.transaction = true;
    }

    /// The transaction is over, whether it came about or not.
    pub(crate) fn finish(&mut self) {
        self.transaction = false;
    }

    /// Pauses the machine; whether it was not paused before.
    pub(crate) fn pause(&mut self) -> bool {
        !std::mem::replace(&mut self.paused, true)
    }

    /// Ends a pause.
    pub(crate) fn resume(&mut self) {
        self.paused = false;
    }

    /// Whether the machine is paused, or about to be.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Keeps virtual CPU `index` from running after its next `park`.
    pub(crate) fn hold(&mut self, index: usize) {
        self.vcpus[index].held = true;
    }

    /// Ends its hold.
    pub(crate) fn release(&mut self, index: usize) {
        self.vcpus[index].held = false;
    }

    /// An NMI waits for virtual CPU `index`: one, even if one waits already.
    pub(crate) fn send_nmi(&mut self, index: usize) {
        self.vcpus[index].nmi = true;
    }

    /// Whether an NMI has waited for virtual CPU `index`, which takes it.
    pub(crate) fn take_nmi(&mut self, index: usize) -> bool {
        std::mem::take(&mut self.vcpus[index].nmi)
    }

    /// Whether running virtual CPU `index` is to park.
    pub(crate) fn must_park(&self, index: usize) -> bool {
        self.ending || self.keeps(index)
    }

    /// Makes every virtual CPU leave its loop.
    pub(crate) fn end(&mut self) {
        self.ending = true;
    }

    /// Whether every virtual CPU is to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending
    }

    /// Whether nothing runs, and nothing can before something is called that lets it.
    pub(crate) fn stopped(&self) -> Stopped {
        let all_ended = self.vcpus.iter().all(|v| v.presence == Presence::Ended);
        if self.ending || all_ended {
            return Stopped::Over;
        }
        let running = |vcpu: &Vcpu| vcpu.presence == Presence::Running;
        self.vcpus
            .iter()
            .position(running)
            .map_or(Stopped::Yes, Stopped::Not)
    }

    /// Where the parked virtual CPUs stand that have run.
    pub(crate) fn standings(&self) -> Vec<Standing> {
        let standing = |vcpu: &Vcpu| match vcpu.presence {
            Presence::Parked(standing) => standing,
            Presence::Starting | Presence::Running | Presence::Ended => None,
        };
        self.vcpus.iter().filter_map(standing).collect()
    }

    /// Calls `tell` for every virtual CPU whose attention is wanted now and was not when this was
    /// last called (`true`), or the other way round (`false`). To be called after every change.
    pub(crate) fn asks(&mut self, mut tell: impl FnMut(usize, bool)) {
        for index in 0..self.vcpus.len() {
            let wanted = self.must_park(index) || self.vcpus[index].nmi;
            if std::mem::replace(&mut self.vcpus[index].asked, wanted) != wanted {
                tell(index, wanted);
            }
        }
    }

    fn keeps(&self, index: usize) -> bool {
        self.transaction || self.paused || self.vcpus[index].held
    }
}

#[cfg(test)]
mod tests;
