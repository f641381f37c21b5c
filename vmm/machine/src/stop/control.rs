//! Stops the world, and decides which vCPUs may run.
//!
//! [`Barrier`] makes the decisions. Here are the lock around it, the waiting, and the kicks. After every change of
//! the barrier, the [`Attention`] flag of each vCPU concerned is raised or lowered, a vCPU whose flag was raised is
//! kicked out of the guest, and waiting threads check the barrier again.
//!
//! Invariants: a kick goes only to a thread that is in its loop. The state lock is never held while guest code
//! runs or while a transaction's change is applied. Lock order is `transaction`, then `state`.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hvprobe_engine::{Standing, StopError};
use hvprobe_hit::KernelView;
use hvprobe_hit::table::ProbeTable;
use hvprobe_vm::vcpu::Kickable;

use super::attention::Attention;
use super::barrier::{Barrier, Proceed, Stopped};

/// Maximum time for a vCPU to acknowledge a stop. It is far longer than any host's scheduling delay. Beyond it
/// something is broken, and the caller gets an error.
const ACKNOWLEDGE: Duration = Duration::from_secs(10);

/// Interval of further kicks to vCPUs that do not park. A vCPU does not park in the middle of a step. It can
/// abandon a step, but only outside the guest, and a kick makes it leave the guest.
const KICK_AGAIN: Duration = Duration::from_millis(50);

/// State that a vCPU takes over when it continues.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outfit {
    pub(crate) table: Arc<ProbeTable>,
    pub(crate) view: Option<KernelView>,
}

/// Answer to a parked vCPU.
#[derive(Debug)]
pub(crate) enum Order {
    /// Continue with this outfit.
    Run(Outfit),
    /// Leave the loop.
    End,
}

#[derive(Debug)]
struct State {
    barrier: Barrier,
    /// Handles for kicking the vCPUs; `None` for each vCPU that is parked or whose thread is not in its loop.
    threads: Vec<Option<Kickable>>,
    outfit: Outfit,
}

/// Decides which vCPUs of a machine may run.
#[derive(Debug)]
pub(crate) struct Control {
    attention: Box<[Attention]>,
    state: Mutex<State>,
    changed: Condvar,
    transaction: Mutex<()>,
}

impl Control {
    pub(crate) fn new(vcpus: usize) -> Self {
        Self {
            attention: (0..vcpus).map(|_| Attention::new()).collect(),
            state: Mutex::new(State {
                barrier: Barrier::new(vcpus),
                threads: vec![None; vcpus],
                outfit: Outfit::default(),
            }),
            changed: Condvar::new(),
            transaction: Mutex::new(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is a few plain values that are valid after every step, so a panic elsewhere does not
        // corrupt it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, then kicks vCPUs and wakes threads that wait for it.
    fn change<T>(&self, how: impl FnOnce(&mut State) -> T) -> T {
        self.change_locked(&mut self.state(), how)
    }

    fn change_locked<T>(&self, state: &mut State, how: impl FnOnce(&mut State) -> T) -> T {
        let result = how(state);
        let State {
            barrier, threads, ..
        } = state;
        barrier.asks(|index, wanted| {
            let attention = &self.attention[index];
            if !wanted {
                attention.lower();
            } else {
                attention.raise(|| {
                    if let Some(thread) = &threads[index] {
                        thread.kick();
                    }
                });
            }
        });
        self.changed.notify_all();
        result
    }

    /// Returns whether vCPU `index` must park before it runs the guest again. Not for the hit path.
    pub(crate) fn must_park(&self, index: usize) -> bool {
        self.state().barrier.must_park(index)
    }

    /// Returns whether vCPU `index` must take an NMI, park, or both. Called by the vCPU's thread before it enters
    /// the guest. `forget_kicks` clears `immediate_exit`. Costs one load, from a cache line that no other vCPU
    /// writes to.
    pub(crate) fn look(&self, index: usize, forget_kicks: impl FnOnce()) -> bool {
        self.attention[index].look(forget_kicks)
    }

    /// Parks vCPU `index`, and waits until it may run or must leave its loop. Called by the vCPU's thread.
    /// `standing` is `None` if the vCPU has not run yet.
    pub(crate) fn park(
        &self,
        index: usize,
        thread: &Kickable,
        standing: Option<Standing>,
    ) -> Order {
        let mut state = self.state();
        self.change_locked(&mut state, |state| {
            state.threads[index] = None;
            state.barrier.park(index, standing);
        });
        loop {
            let proceed = state.barrier.proceed(index);
            match proceed {
                Proceed::Run => {
                    state.threads[index] = Some(thread.clone());
                    return Order::Run(state.outfit.clone());
                }
                Proceed::End => {
                    self.changed.notify_all();
                    return Order::End;
                }
                Proceed::Stay => {
                    state = self
                        .changed
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Marks vCPU `index` as ended. This is the last call of the vCPU's thread.
    pub(crate) fn leave(&self, index: usize) {
        self.change(|state| {
            state.threads[index] = None;
            state.barrier.leave(index);
        });
    }

    /// Keeps vCPU `index` from running after its next [`Control::park`]. Several vCPUs can be held at a time.
    pub(crate) fn hold(&self, index: usize) {
        self.change(|state| state.barrier.hold(index));
    }

    /// Ends the hold of vCPU `index`.
    pub(crate) fn release(&self, index: usize) {
        self.change(|state| state.barrier.release(index));
    }

    /// Makes an NMI pending for each of `vcpus`, until the vCPU takes it.
    pub(crate) fn send_nmi(&self, vcpus: impl Iterator<Item = usize>) -> Result<(), StopError> {
        self.change(|state| {
            if state.barrier.is_ending() {
                return Err(StopError::Ended);
            }
            vcpus.for_each(|index| state.barrier.send_nmi(index));
            Ok(())
        })
    }

    /// Takes the pending NMI of vCPU `index`. Returns whether there was one. Called by the vCPU's thread. Not for
    /// the hit path.
    pub(crate) fn take_nmi(&self, index: usize) -> bool {
        self.change(|state| state.barrier.take_nmi(index))
    }

    /// Adds `view`, the view of the kernel, to the outfit that vCPUs get when they continue.
    pub(crate) fn set_view(&self, view: KernelView) {
        self.state().outfit.view = Some(view);
    }

    /// Removes the view of the kernel, as that kernel does not run any more.
    pub(crate) fn forget_view(&self) {
        self.state().outfit.view = None;
    }

    /// Returns the view of the kernel in the current outfit.
    pub(crate) fn view(&self) -> Option<KernelView> {
        self.state().outfit.view
    }

    /// Stops every vCPU, calls `change` with their standings, and lets the vCPUs continue unless something else
    /// keeps them. They continue with the table that `change` returns, if it returns one. Runs one transaction at a
    /// time. Returns how long the vCPUs were stopped.
    pub(crate) fn transact(
        &self,
        change: impl FnOnce(&[Standing]) -> Option<Arc<ProbeTable>>,
    ) -> Result<Duration, StopError> {
        let _one = self
            .transaction
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let since = Instant::now();
        let open = Transaction::begin(self);
        let standings = self.all_parked(|_| true)?;
        if let Some(table) = change(&standings) {
            self.state().outfit.table = table;
        }
        drop(open);
        Ok(since.elapsed())
    }

    /// Waits until no vCPU runs, and returns their standings. Stops waiting, and returns no standings, when
    /// `wanted` returns false.
    fn all_parked(&self, wanted: impl Fn(&Barrier) -> bool) -> Result<Vec<Standing>, StopError> {
        let since = Instant::now();
        let mut state = self.state();
        loop {
            let vcpu = match state.barrier.stopped() {
                Stopped::Over => return Err(StopError::Ended),
                Stopped::Yes => return Ok(state.barrier.standings()),
                Stopped::Not(_) if !wanted(&state.barrier) => return Ok(Vec::new()),
                Stopped::Not(vcpu) => vcpu,
            };
            let waited = since.elapsed();
            if waited >= ACKNOWLEDGE {
                return Err(StopError::Unresponsive { vcpu, waited });
            }
            let (awake, timeout) = self
                .changed
                .wait_timeout(state, KICK_AGAIN.min(ACKNOWLEDGE - waited))
                .unwrap_or_else(PoisonError::into_inner);
            state = awake;
            if timeout.timed_out() {
                for thread in state.threads.iter().flatten() {
                    thread.kick();
                }
            }
        }
    }

    /// Returns whether every vCPU is to leave its loop. Not for the hit path.
    pub(crate) fn is_ending(&self) -> bool {
        self.state().barrier.is_ending()
    }

    /// Makes every vCPU stop until [`Control::resume`]. Does not wait until they have stopped.
    pub(crate) fn pause_now(&self) {
        self.change(|state| state.barrier.pause());
    }

    /// Waits until the pause is complete, or until another thread resumes the vCPUs.
    pub(crate) fn wait_paused(&self) -> Result<(), StopError> {
        self.all_parked(Barrier::is_paused).map(|_| ())
    }

    /// Lets the vCPUs continue after a pause.
    pub(crate) fn resume(&self) {
        self.change(|state| state.barrier.resume());
    }

    /// Returns whether the machine is paused or pausing.
    pub(crate) fn is_paused(&self) -> bool {
        self.state().barrier.is_paused()
    }

    /// Makes every vCPU leave its loop.
    pub(crate) fn end(&self) {
        self.change(|state| state.barrier.end());
    }
}

/// A transaction in progress. It ends when this value is dropped, even if its change panics.
struct Transaction<'a>(&'a Control);

impl<'a> Transaction<'a> {
    fn begin(control: &'a Control) -> Self {
        control.change(|state| state.barrier.begin());
        Self(control)
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.barrier.finish());
    }
}

#[cfg(test)]
mod tests;
