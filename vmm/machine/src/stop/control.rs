//! Stopping the world, and everything else that decides whether a virtual CPU may run.
//!
//! The decisions are [`Barrier`]'s. Here are the lock around it, the waiting, and the kicks: after
//! every change of the barrier, whose attention is wanted is told by its [`Attention`] and kicked
//! out of the guest; whoever waits looks again.
//!
//! Invariants: a kick goes only to a thread that is in its loop; the state lock is never held while
//! guest code runs or while a transaction's change is applied; lock order is `transaction`, then
//! `state`.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hvprobe_engine::{Standing, StopError};
use hvprobe_hit::KernelView;
use hvprobe_hit::table::ProbeTable;
use hvprobe_vm::vcpu::Kickable;

use super::attention::Attention;
use super::barrier::{Barrier, Proceed, Stopped};

/// How long a virtual CPU may take to acknowledge a stop. Far beyond any host's scheduling delay:
/// past it something is broken, and the caller is told.
const ACKNOWLEDGE: Duration = Duration::from_secs(10);

/// How often a virtual CPU that does not park is kicked again: it does not while an instruction is
/// half carried out, and can give up on that only outside of the guest.
const KICK_AGAIN: Duration = Duration::from_millis(50);

/// What a virtual CPU takes over when it goes on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outfit {
    pub(crate) table: Arc<ProbeTable>,
    pub(crate) view: Option<KernelView>,
}

/// What a parked virtual CPU is told.
#[derive(Debug)]
pub(crate) enum Order {
    /// Go on with this.
    Run(Outfit),
    /// Leave the loop.
    End,
}

#[derive(Debug)]
struct State {
    barrier: Barrier,
    /// How to kick each virtual CPU, while it is in its loop.
    threads: Vec<Option<Kickable>>,
    outfit: Outfit,
}

/// Decides which virtual CPUs of a machine may run.
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
        // The state is a handful of plain values that are whole at every step, so a panic
        // elsewhere does not spoil them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and lets everybody concerned know.
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

    /// Whether virtual CPU `index` has to park before it runs the guest again. Not for the hit path.
    pub(crate) fn must_park(&self, index: usize) -> bool {
        self.state().barrier.must_park(index)
    }

    /// Whether something wants the attention of virtual CPU `index`, asked by its thread before it
    /// enters the guest: it has to take an NMI, to park, or both. `forget_kicks` clears
    /// `immediate_exit`. One load, and no line that another virtual CPU writes to.
    pub(crate) fn look(&self, index: usize, forget_kicks: impl FnOnce()) -> bool {
        self.attention[index].look(forget_kicks)
    }

    /// Called by the thread of virtual CPU `index`, which stands at `standing` if it has run at
    /// all: waits until it may run.
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

    /// Called by the thread of virtual CPU `index` as the last thing it does.
    pub(crate) fn leave(&self, index: usize) {
        self.change(|state| {
            state.threads[index] = None;
            state.barrier.leave(index);
        });
    }

    /// Keeps virtual CPU `index` from running from its next [`Control::park`] on. Any number may be
    /// held.
    pub(crate) fn hold(&self, index: usize) {
        self.change(|state| state.barrier.hold(index));
    }

    /// Ends the hold of virtual CPU `index`.
    pub(crate) fn release(&self, index: usize) {
        self.change(|state| state.barrier.release(index));
    }

    /// Has an NMI wait for each of `vcpus` until it takes it.
    pub(crate) fn send_nmi(&self, vcpus: impl Iterator<Item = usize>) -> Result<(), StopError> {
        self.change(|state| {
            if state.barrier.is_ending() {
                return Err(StopError::Ended);
            }
            vcpus.for_each(|index| state.barrier.send_nmi(index));
            Ok(())
        })
    }

    /// Called by the thread of virtual CPU `index`: whether it has to give the guest an NMI now. Not
    /// for the hit path.
    pub(crate) fn take_nmi(&self, index: usize) -> bool {
        self.change(|state| state.barrier.take_nmi(index))
    }

    /// Gives every virtual CPU this view of the kernel with its next outfit.
    pub(crate) fn set_view(&self, view: KernelView) {
        self.state().outfit.view = Some(view);
    }

    /// The kernel of that view does not run any more.
    pub(crate) fn forget_view(&self) {
        self.state().outfit.view = None;
    }

    /// The view handed out last.
    pub(crate) fn view(&self) -> Option<KernelView> {
        self.state().outfit.view
    }

    /// Stops every virtual CPU, applies `change` to where they stand, hands out the table it
    /// returns, and lets them go on unless something else keeps them. One transaction at a time.
    /// Returns for how long they were stopped.
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

    /// Waits until nothing runs, as long as that is `wanted`; returns where they stand.
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

    /// Whether every virtual CPU is to leave its loop. Not for the hit path.
    pub(crate) fn is_ending(&self) -> bool {
        self.state().barrier.is_ending()
    }

    /// Stops every virtual CPU until [`Control::resume`], without waiting for them.
    pub(crate) fn pause_now(&self) {
        self.change(|state| state.barrier.pause());
    }

    /// Returns when a pause is complete, or when somebody has resumed the virtual CPUs meanwhile.
    pub(crate) fn wait_paused(&self) -> Result<(), StopError> {
        self.all_parked(Barrier::is_paused).map(|_| ())
    }

    /// Lets the virtual CPUs go on after a pause.
    pub(crate) fn resume(&self) {
        self.change(|state| state.barrier.resume());
    }

    /// Whether the machine is paused, or about to be.
    pub(crate) fn is_paused(&self) -> bool {
        self.state().barrier.is_paused()
    }

    /// Makes every virtual CPU leave its loop.
    pub(crate) fn end(&self) {
        self.change(|state| state.barrier.end());
    }
}

/// A transaction that has begun; over when dropped, even by a panic in the change it is for.
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
