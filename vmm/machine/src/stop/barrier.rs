//! Decides which vCPUs may run. Here are only the decisions: no locks, no threads, no waiting.
//!
//! ```text
//!             park                       proceed: run
//!   starting ──────► parked ◄──────────────────────────► running
//!                      │              park                  │
//!                      │ proceed: end                       │ leave
//!                      └───────────────► ended ◄────────────┘
//! ```
//! A parked vCPU stays parked while something keeps it: a *transaction* (text is being changed), a *pause* of the
//! machine, or a *hold* of this vCPU alone. The *end* makes a vCPU leave its loop even if something keeps it. All
//! of these are independent of each other. An *NMI* keeps no vCPU. It only requests attention, and stays pending
//! until the vCPU takes it. A vCPU takes it when it is asked, and when it continues.
//!
//! Invariants, for any order of calls:
//! - from the moment [`Barrier::stopped`] returned `Yes` until [`Barrier::finish`], no vCPU runs;
//! - [`Barrier::asks`] has asked every running vCPU that must park or has an NMI pending, since the vCPU began to
//!   run; a vCPU to which neither applies is not asked;
//! - an ended vCPU stays ended, and after [`Barrier::end`] each vCPU ends by its next `park` and `proceed`.

use hvprobe_engine::Standing;

/// State of a vCPU in the diagram above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The vCPU's thread has not begun. It parks before it runs the guest.
    Starting,
    /// The vCPU may be executing the guest.
    Running,
    /// The vCPU waits. It has no standing if it has never run.
    Parked(Option<Standing>),
    /// The thread has left its loop.
    Ended,
}

/// Decision about a parked vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proceed {
    /// The vCPU runs.
    Run,
    /// The vCPU leaves its loop.
    End,
    /// The vCPU stays parked, because something keeps it.
    Stay,
}

/// Whether all vCPUs are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// No vCPU runs.
    Yes,
    /// This vCPU runs.
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

/// State of all vCPUs of a machine.
#[derive(Clone, Debug)]
pub(crate) struct Barrier {
    transaction: bool,
    paused: bool,
    ending: bool,
    vcpus: Vec<Vcpu>,
}

impl Barrier {
    /// Returns a barrier of `vcpus` starting vCPUs that nothing keeps.
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

    /// Marks vCPU `index` as parked.
    pub(crate) fn park(&mut self, index: usize, standing: Option<Standing>) {
        self.vcpus[index].presence = Presence::Parked(standing);
    }

    /// Decides whether parked vCPU `index` continues, and changes its state accordingly.
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

    /// Marks vCPU `index` as ended: it has left its loop.
    pub(crate) fn leave(&mut self, index: usize) {
        self.vcpus[index].presence = Presence::Ended;
    }

    /// Begins a transaction, for which all vCPUs must stop. There is at most one at a time.
    pub(crate) fn begin(&mut self) {
        self.transaction = true;
    }

    /// Ends the transaction, whether its change was made or not.
    pub(crate) fn finish(&mut self) {
        self.transaction = false;
    }

    /// Pauses the machine. Returns `false` if it was paused already.
    pub(crate) fn pause(&mut self) -> bool {
        !std::mem::replace(&mut self.paused, true)
    }

    /// Ends a pause.
    pub(crate) fn resume(&mut self) {
        self.paused = false;
    }

    /// Returns whether the machine is paused or pausing.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Keeps vCPU `index` from running after its next `park`.
    pub(crate) fn hold(&mut self, index: usize) {
        self.vcpus[index].held = true;
    }

    /// Ends the hold of vCPU `index`.
    pub(crate) fn release(&mut self, index: usize) {
        self.vcpus[index].held = false;
    }

    /// Makes an NMI pending for vCPU `index`, unless one already is.
    pub(crate) fn send_nmi(&mut self, index: usize) {
        self.vcpus[index].nmi = true;
    }

    /// Takes the pending NMI of vCPU `index`. Returns whether there was one.
    pub(crate) fn take_nmi(&mut self, index: usize) -> bool {
        std::mem::take(&mut self.vcpus[index].nmi)
    }

    /// Returns whether running vCPU `index` must park.
    pub(crate) fn must_park(&self, index: usize) -> bool {
        self.ending || self.keeps(index)
    }

    /// Makes every vCPU leave its loop.
    pub(crate) fn end(&mut self) {
        self.ending = true;
    }

    /// Returns whether every vCPU is to leave its loop.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending
    }

    /// Returns whether all vCPUs are stopped. A stopped vCPU runs only after [`Barrier::proceed`] has let it.
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

    /// Returns the standings of the parked vCPUs that have run.
    pub(crate) fn standings(&self) -> Vec<Standing> {
        let standing = |vcpu: &Vcpu| match vcpu.presence {
            Presence::Parked(standing) => standing,
            Presence::Starting | Presence::Running | Presence::Ended => None,
        };
        self.vcpus.iter().filter_map(standing).collect()
    }

    /// Calls `notify` for every vCPU whose attention was not requested at the last call and is requested at this
    /// one, or the other way round. Passes the vCPU's index, and whether its attention is requested. Must be called
    /// after every change.
    pub(crate) fn asks(&mut self, mut notify: impl FnMut(usize, bool)) {
        for index in 0..self.vcpus.len() {
            let wanted = self.must_park(index) || self.vcpus[index].nmi;
            if std::mem::replace(&mut self.vcpus[index].asked, wanted) != wanted {
                notify(index, wanted);
            }
        }
    }

    fn keeps(&self, index: usize) -> bool {
        self.transaction || self.paused || self.vcpus[index].held
    }
}

#[cfg(test)]
mod tests;
