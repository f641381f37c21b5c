//! The supervisor of a machine: a thread that handles the notices of vCPUs.
//!
//! ```text
//!   notices ──► watch over ──► all vCPUs have ended, or it panicked ──► wind up ──► ended
//! ```
//! Invariants: if the supervisor, a vCPU or the collector fails, the machine ends, and all threads that wait for
//! its end get the reason. Nothing that takes long runs on this thread, as vCPUs wait for it.

use hvprobe_hit::table::HookSet;
use hvprobe_spec::Decision;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use hvprobe_arch::Gva;
use hvprobe_devices::DeviceEvent;
use hvprobe_engine::Retry;
use hvprobe_hit::event::Collector;
use tracing::{error, info};

use crate::config::{EndReason, Ending};
use crate::guest::Guest;
use crate::machine::Machine;
use crate::vcpu::run::{Notice, Why};

/// Interval of the periodic checks, such as whether the guest has rewritten text under probes, and whether probes
/// have exceeded their budgets.
const WATCH: Duration = Duration::from_secs(1);

/// Reason for the machine's end when the thread that scans guest memory panics.
const PANICKED: &str = "a look through the guest's memory panicked";

impl Machine {
    /// Handles notices until every vCPU has ended, then winds the machine up.
    pub(crate) fn supervise(
        &self,
        notices: &Receiver<Notice>,
        vcpus: Vec<JoinHandle<()>>,
        collector: Collector,
    ) {
        let watched = AssertUnwindSafe(|| {
            thread::scope(|scope| self.watch_over(notices, vcpus.len(), &collector, scope))
        });
        let first = catch_unwind(watched).unwrap_or_else(|_| {
            self.shared.control.end();
            Some(Why::Crash("the machine's supervisor panicked".to_owned()))
        });
        let mut panicked = false;
        for thread in vcpus {
            panicked |= thread.join().is_err();
        }
        let wound_up = catch_unwind(AssertUnwindSafe(|| {
            // The last events include the records of detours that are counted but not delivered yet.
            self.shared.detours.end();
            collector.finish();
            self.report_throttled();
        }));
        if wound_up.is_err() {
            error!(machine = self.config.name, "the last events are lost");
        }
        self.shared.devices.stop();
        self.hub.close();
        self.shared.decisions.close();
        let reason = match first {
            _ if panicked => EndReason::Crash("a virtual CPU's thread panicked".to_owned()),
            Some(Why::Device(DeviceEvent::Shutdown)) => EndReason::Shutdown,
            Some(Why::Device(DeviceEvent::Reset)) => EndReason::Reset,
            Some(Why::TripleFault(report)) => EndReason::TripleFault(report),
            Some(Why::Crash(report)) => EndReason::Crash(report),
            Some(Why::Requested) | None => EndReason::Stopped,
        };
        let ending = Ending {
            reason,
            guest_status: self.shared.devices.guest_status(),
        };
        info!(machine = self.config.name, reason = %ending.reason, "machine ended");
        self.life().ending = Some(ending);
        self.changed.notify_all();
    }

    /// Handles notices, and runs the periodic checks, until all vCPUs have ended. Returns the first reason for the
    /// machine's end.
    fn watch_over<'s>(
        &'s self,
        notices: &Receiver<Notice>,
        mut left: usize,
        collector: &Collector,
        scope: &'s Scope<'s, '_>,
    ) -> Option<Why> {
        let mut first = None;
        let mut looking: Option<ScopedJoinHandle<'_, ()>> = None;
        let mut watched = Instant::now();
        while left > 0 {
            // The checks run at their interval, even if notices arrive all the time.
            if watched.elapsed() >= WATCH {
                let mut registry = self.registry();
                registry.check_text(&Guest(&self.shared));
                registry.retry_ftrace(&Guest(&self.shared));
                let is_over = looking.take_if(|look| look.is_finished());
                if is_over.is_some_and(|look| look.join().is_err()) {
                    first.get_or_insert(Why::Crash(PANICKED.to_owned()));
                    self.shared.control.end();
                } else if looking.is_none() {
                    let retry = registry.retry();
                    looking = retry.and_then(|retry| self.look(retry, scope));
                }
                let replaced = registry.is_replaced();
                drop(registry);
                if replaced {
                    self.kernel_replaced();
                }
                self.shared.times.adjust();
                self.report_throttled();
                if collector.has_ended() && first.is_none() {
                    first = Some(Why::Crash("the collector of events panicked".to_owned()));
                    self.shared.control.end();
                }
                watched = Instant::now();
            }
            match notices.recv_timeout(WATCH.saturating_sub(watched.elapsed())) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Notice::Engine {
                    vcpu,
                    hooks,
                    argument,
                    answer,
                }) => {
                    let _ = answer.set(self.run_hooks(hooks, argument));
                    self.shared.control.release(vcpu);
                }
                Ok(Notice::Paused) => self.notify_change(),
                Ok(Notice::TextFinal { vcpu, sregs }) => {
                    if let Err(report) = self.text_final(vcpu, &sregs) {
                        first.get_or_insert(Why::Crash(report));
                        self.shared.control.end();
                    }
                }
                Ok(Notice::Ended(why)) => {
                    left -= 1;
                    if !matches!(why, Why::Requested) {
                        first.get_or_insert(why);
                    }
                    self.shared.control.end();
                }
                // All senders are gone: the threads have ended without a notice, because they panicked.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if looking.is_some_and(|look| look.join().is_err()) {
            first.get_or_insert(Why::Crash(PANICKED.to_owned()));
        }
        first
    }

    /// Starts a thread that scans the guest's memory for `retry`, and then completes the retry. Returns `None` if
    /// no thread can be started.
    fn look<'s>(
        &'s self,
        retry: Retry,
        scope: &'s Scope<'s, '_>,
    ) -> Option<ScopedJoinHandle<'s, ()>> {
        let look = move || {
            let guest = Guest(&self.shared);
            let looked = retry.look(&guest);
            self.registry().end_retry(looked, &guest);
        };
        let started = thread::Builder::new()
            .name("look".to_owned())
            .spawn_scoped(scope, look);
        // After a failure, the next periodic check tries again.
        started.ok()
    }

    /// Makes the engine run the `hooks` that were hit. Returns how the guest continues.
    fn run_hooks(&self, hooks: HookSet, argument: Gva) -> Decision {
        let mut registry = self.registry();
        let outcome = registry.run_hooks(hooks, argument, &Guest(&self.shared));
        self.report_refused(outcome.refused);
        let replaced = registry.is_replaced();
        drop(registry);
        if replaced {
            self.kernel_replaced();
        }
        outcome.decision
    }
}
