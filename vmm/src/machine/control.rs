//! Stopping the world, and everything else that decides whether a virtual CPU may run.
//!
//! ```text
//!              attention                      go
//!   running ─────────────► parked ─────────────────► running
//!      │                     │ ending
//!      └──────── ended ◄─────┘
//! ```
//! A virtual CPU parks when something asks for attention: a *transaction* (text is being changed),
//! a *pause* by the user, a *hold* (boot waits until probes are planted), or the *end*. A
//! transaction runs when every virtual CPU that has not ended is parked.
//!
//! Invariants: `attention` is set before a virtual CPU is kicked and looked at after it cleared its
//! `immediate_exit`, so a kick between the check and `KVM_RUN` is not lost; the state lock is never
//! held while guest code runs or while a transaction's change is applied; lock order is
//! `transaction`, then `state`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hvprobe_introspect::probe::hit::KernelView;
use hvprobe_introspect::probe::table::ProbeTable;
use hvprobe_introspect::world::StopError;

use super::kick::Kickable;

/// How long a virtual CPU may take to acknowledge a stop. Far beyond any host's scheduling delay:
/// past it something is broken, and the caller is told.
const ACKNOWLEDGE: Duration = Duration::from_secs(10);

/// What a virtual CPU takes over when it goes on.
#[derive(Clone, Debug, Default)]
pub(super) struct Outfit {
    pub(super) table: Arc<ProbeTable>,
    pub(super) view: Option<KernelView>,
}

/// What a parked virtual CPU is told.
#[derive(Debug)]
pub(super) enum Order {
    /// Go on with this.
    Run(Outfit),
    /// Leave the loop.
    End,
}

#[derive(Debug)]
enum Presence {
    /// Its thread has not begun; it will look at `attention` before it runs anything.
    Starting,
    Running(Kickable),
    Parked,
    Ended,
}

#[derive(Debug)]
struct State {
    transaction: bool,
    paused: bool,
    ending: bool,
    held: Option<usize>,
    vcpus: Vec<Presence>,
    outfit: Outfit,
}

impl State {
    fn attention(&self) -> bool {
        self.transaction || self.paused || self.ending || self.held.is_some()
    }

    fn running(&self) -> Option<usize> {
        self.vcpus
            .iter()
            .position(|vcpu| matches!(vcpu, Presence::Running(_)))
    }
}

/// Decides which virtual CPUs of a machine may run.
#[derive(Debug)]
pub(super) struct Control {
    attention: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    transaction: Mutex<()>,
}

impl Control {
    pub(super) fn new(vcpus: usize) -> Self {
        Self {
            attention: AtomicBool::new(false),
            state: Mutex::new(State {
                transaction: false,
                paused: false,
                ending: false,
                held: None,
                vcpus: (0..vcpus).map(|_| Presence::Starting).collect(),
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

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a virtual CPU has to park before it runs the guest again. One load.
    pub(super) fn wants_attention(&self) -> bool {
        self.attention.load(Ordering::SeqCst)
    }

    fn publish(&self, state: &State) {
        self.attention.store(state.attention(), Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn kick_all(state: &State) {
        for vcpu in &state.vcpus {
            if let Presence::Running(thread) = vcpu {
                thread.kick();
            }
        }
    }

    /// Called by the thread of virtual CPU `index`: waits until it may run.
    pub(super) fn park(&self, index: usize, thread: &Kickable) -> Order {
        let mut state = self.state();
        state.vcpus[index] = Presence::Parked;
        self.changed.notify_all();
        loop {
            if state.ending {
                state.vcpus[index] = Presence::Ended;
                self.changed.notify_all();
                return Order::End;
            }
            let stays = state.transaction || state.paused || state.held == Some(index);
            if !stays {
                state.vcpus[index] = Presence::Running(thread.clone());
                return Order::Run(state.outfit.clone());
            }
            state = self.wait(state);
        }
    }

    /// Called by the thread of virtual CPU `index` as the last thing it does.
    pub(super) fn leave(&self, index: usize) {
        self.state().vcpus[index] = Presence::Ended;
        self.changed.notify_all();
    }

    /// Keeps virtual CPU `index` from running from its next [`Control::park`] on.
    pub(super) fn hold(&self, index: usize) {
        let mut state = self.state();
        state.held = Some(index);
        self.publish(&state);
    }

    /// Ends a hold.
    pub(super) fn release(&self) {
        let mut state = self.state();
        state.held = None;
        self.publish(&state);
    }

    /// Gives every virtual CPU this view of the kernel with its next outfit.
    pub(super) fn set_view(&self, view: KernelView) {
        self.state().outfit.view = Some(view);
    }

    /// The view handed out last.
    pub(super) fn view(&self) -> Option<KernelView> {
        self.state().outfit.view
    }

    /// Stops every virtual CPU, applies `change`, hands out the table it returns, and lets them go
    /// on unless something else keeps them. One transaction at a time.
    pub(super) fn transact(
        &self,
        change: impl FnOnce() -> Option<Arc<ProbeTable>>,
    ) -> Result<(), StopError> {
        let _one = self
            .transaction
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state();
        state.transaction = true;
        self.publish(&state);
        let stopped = self.all_parked(state);
        let result = stopped.map(|state| {
            drop(state);
            change()
        });
        let mut state = self.state();
        state.transaction = false;
        if let Ok(Some(table)) = &result {
            state.outfit.table = Arc::clone(table);
        }
        self.publish(&state);
        result.map(|_| ())
    }

    fn all_parked<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> Result<MutexGuard<'a, State>, StopError> {
        let since = Instant::now();
        Self::kick_all(&state);
        loop {
            if state.ending || state.vcpus.iter().all(|v| matches!(v, Presence::Ended)) {
                return Err(StopError::Ended);
            }
            let Some(vcpu) = state.running() else {
                return Ok(state);
            };
            let waited = since.elapsed();
            if waited >= ACKNOWLEDGE {
                return Err(StopError::Unresponsive { vcpu, waited });
            }
            state = self
                .changed
                .wait_timeout(state, ACKNOWLEDGE - waited)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Stops every virtual CPU until [`Control::resume`]; returns when they have.
    pub(super) fn pause(&self) -> Result<(), StopError> {
        let mut state = self.state();
        state.paused = true;
        self.publish(&state);
        match self.all_parked(state) {
            Ok(_) => Ok(()),
            Err(error) => {
                let mut state = self.state();
                state.paused = false;
                self.publish(&state);
                Err(error)
            }
        }
    }

    /// Lets the virtual CPUs go on after a pause.
    pub(super) fn resume(&self) {
        let mut state = self.state();
        state.paused = false;
        self.publish(&state);
    }

    /// Makes every virtual CPU leave its loop.
    pub(super) fn end(&self) {
        let mut state = self.state();
        state.ending = true;
        self.publish(&state);
        Self::kick_all(&state);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use super::*;

    /// Virtual CPUs that do nothing but run, and park when asked.
    fn with_vcpus(count: usize, test: impl FnOnce(&Control, &[AtomicU64])) {
        let control = Control::new(count);
        let steps: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
        thread::scope(|scope| {
            for index in 0..count {
                let (control, steps) = (&control, &steps);
                scope.spawn(move || {
                    let thread = Kickable::none();
                    if let Order::End = control.park(index, &thread) {
                        return;
                    }
                    loop {
                        if control.wants_attention()
                            && let Order::End = control.park(index, &thread)
                        {
                            return;
                        }
                        steps[index].fetch_add(1, Ordering::Relaxed);
                        thread::yield_now();
                    }
                });
            }
            test(&control, &steps);
            control.end();
        });
    }

    fn total(steps: &[AtomicU64]) -> u64 {
        steps.iter().map(|s| s.load(Ordering::Relaxed)).sum()
    }

    #[test]
    fn nothing_runs_while_a_transaction_is_applied() {
        with_vcpus(4, |control, steps| {
            for _ in 0..200 {
                control
                    .transact(|| {
                        let before = total(steps);
                        thread::yield_now();
                        assert_eq!(total(steps), before);
                        None
                    })
                    .expect("the vCPUs park");
            }
        });
    }

    #[test]
    fn a_transaction_during_a_pause_leaves_the_pause_in_force() {
        with_vcpus(2, |control, steps| {
            control.pause().expect("the vCPUs park");
            let before = total(steps);
            control
                .transact(|| None)
                .expect("paused vCPUs count as stopped");
            assert_eq!(total(steps), before);
            control.resume();
            while total(steps) == before {
                thread::yield_now();
            }
        });
    }

    #[test]
    fn a_held_vcpu_does_not_run_until_released() {
        with_vcpus(1, |control, steps| {
            control.hold(0);
            control
                .transact(|| None)
                .expect("held vCPUs count as stopped");
            let before = total(steps);
            control
                .transact(|| None)
                .expect("held vCPUs count as stopped");
            assert_eq!(total(steps), before);
            control.release();
            while total(steps) == before {
                thread::yield_now();
            }
        });
    }

    #[test]
    fn an_ended_machine_refuses_transactions() {
        with_vcpus(2, |control, _| {
            control.end();
            assert_eq!(control.transact(|| None), Err(StopError::Ended));
        });
    }
}
