//! The supervisor of a machine: a thread that virtual CPUs tell what is not theirs to do.
//!
//! ```text
//!   notices ──► watch over ──► all virtual CPUs have ended, or it panicked ──► wind up ──► ended
//! ```
//! Invariants: whatever happens to it, to a virtual CPU or to the collector, the machine ends, and
//! whoever waits for its end is told, with the reason; nothing that takes long is done on this thread, as virtual
//! CPUs wait for it.

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

/// How often text under probes is looked at, whether the guest has rewritten it, and their budgets,
/// whether one was exceeded.
const WATCH: Duration = Duration::from_secs(1);

/// Why a machine ended.
const PANICKED: &str = "a look through the guest's memory panicked";

impl Machine {
    /// Takes notices until every virtual CPU has ended, then winds up.
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
            // What detours only counted, or have begun, is told with the last events.
            self.shared.detours.end();
            collector.finish();
            self.tell_throttled();
        }));
        if wound_up.is_err() {
            error!(machine = self.config.name, "the last events are lost");
        }
        self.console.close();
        self.hub.close();
        self.shared.decisions.close();
        let reason = match first {
            _ if panicked => EndReason::Crash("a virtual CPU's thread panicked".to_owned()),
            Some(Why::Device(DeviceEvent::Shutdown)) => EndReason::Shutdown,
            Some(Why::Device(DeviceEvent::Reset)) => EndReason::Reset,
            Some(Why::TripleFault(report)) => EndReason::TripleFault(report),
            Some(Why::Crash(report)) => EndReason::Crash(report),
            Some(Why::Told) | None => EndReason::Stopped,
        };
        let ending = Ending {
            reason,
            guest_status: self.shared.ports.guest_status(),
        };
        info!(machine = self.config.name, reason = %ending.reason, "machine ended");
        self.life().ending = Some(ending);
        self.changed.notify_all();
    }

    /// Sees to the machine while any of its virtual CPUs is there; returns what ended the first.
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
            // However many notices there are.
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
                self.tell_throttled();
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
                    let _ = answer.set(self.told(hooks, argument));
                    self.shared.control.release(vcpu);
                }
                Ok(Notice::Paused) => self.tell_change(),
                Ok(Notice::TextFinal { vcpu, sregs }) => {
                    if let Err(report) = self.text_final(vcpu, &sregs) {
                        first.get_or_insert(Why::Crash(report));
                        self.shared.control.end();
                    }
                }
                Ok(Notice::Ended(why)) => {
                    left -= 1;
                    if !matches!(why, Why::Told) {
                        first.get_or_insert(why);
                    }
                    self.shared.control.end();
                }
                // All senders are gone: the threads ended without a word, so they panicked.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if looking.is_some_and(|look| look.join().is_err()) {
            first.get_or_insert(Why::Crash(PANICKED.to_owned()));
        }
        first
    }

    /// Looks through the guest's memory on a thread of its own.
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
        // Without a thread it is for the next time.
        started.ok()
    }

    /// Has the engine see to what it is told of; how the guest goes on.
    fn told(&self, hooks: HookSet, argument: Gva) -> Decision {
        let mut registry = self.registry();
        let told = registry.told(hooks, argument, &Guest(&self.shared));
        self.report_refused(told.refused);
        let replaced = registry.is_replaced();
        drop(registry);
        if replaced {
            self.kernel_replaced();
        }
        told.decision
    }
}
