//! The thread of one vCPU: runs the guest, handles its exit, and repeats.
//!
//! Invariants: only this thread touches its `VcpuFd`. The thread parks, or ends, only outside a step and a device
//! access. So in a stopped world no instruction is half executed, and RIP is where the guest continues. A step that
//! the guest does not finish is abandoned after [`STEP_LIMIT`]. Every exit is handled completely before the next
//! check of [`Control`].

use hvprobe_hit::table::HookSet;
use std::mem;
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hvprobe_arch::{Gpa, Gva};
use hvprobe_devices::DeviceEvent;
use hvprobe_engine::Standing;
use hvprobe_hit::event::Headroom;
use hvprobe_hit::region::KERNEL_WINDOW;
use hvprobe_hit::{Held, Inquiry};
use hvprobe_spec::Decision;
use hvprobe_vm::CatchMode;
use hvprobe_vm::vcpu::Guard;
use hvprobe_vm::vcpu::{CpuFd, Exit};
use kvm_bindings::kvm_sregs;
use tracing::{debug, warn};

use super::catch::{Catcher, Waits};
use super::debug::Cause;
use crate::clock::times::monotonic_ns;
use crate::crash;
use crate::decide::Reply;
use crate::stop::control::{Control, Order};
use crate::vcpu::shared::Shared;

/// Maximum time that a stop waits for the end of a step or of a device access. The longest string operations take
/// milliseconds.
const STEP_LIMIT: Duration = Duration::from_secs(1);

/// Minimum length of a pause that is reported to the guest. Pauses for changes of the guest's text are shorter. The
/// shortest timeout that a kernel's watchdog can have is two seconds.
const PAUSE: Duration = Duration::from_millis(500);

/// CR0.PG (SDM vol. 3, 2.5).
const CR0_PG: u64 = 1 << 31;

/// Notice of a vCPU to the supervisor.
#[derive(Debug)]
pub(crate) enum Notice {
    /// A hit has paused the machine.
    Paused,
    /// The guest's boot has reached the point where the kernel's text is final; the vCPU is held.
    TextFinal { vcpu: usize, sregs: Box<kvm_sregs> },
    /// The guest has reached hooks of the engine; the vCPU is held.
    Engine {
        vcpu: usize,
        hooks: HookSet,
        /// First argument of the hooked function.
        argument: Gva,
        /// How the guest continues. Set before the vCPU is released.
        answer: Arc<OnceLock<Decision>>,
    },
    /// The vCPU has left its loop, with the reason.
    Ended(Why),
}

/// Next step after an exit.
enum Next {
    /// The guest continues.
    Run,
    /// The vCPU waits, because a hit is held.
    Wait(Held),
    /// The loop ends.
    End(Why),
}

impl From<Waits> for Next {
    fn from(waits: Waits) -> Self {
        waits.map_or(Self::Run, Self::Wait)
    }
}

/// Reason why a vCPU left its loop.
#[derive(Debug)]
pub(crate) enum Why {
    /// The vCPU was ordered to leave.
    Requested,
    /// The guest ended the machine.
    Device(DeviceEvent),
    /// The guest triple-faulted; with a report.
    TripleFault(String),
    /// The guest or the host failed; with a report.
    Crash(String),
}

/// One vCPU, ready to run.
#[derive(Debug)]
pub(crate) struct Vcpu {
    pub(crate) index: usize,
    pub(crate) cpu: CpuFd,
    pub(crate) catcher: Catcher,
    pub(crate) shared: Arc<Shared>,
    pub(crate) notices: Sender<Notice>,
    /// Start of the wait for the end of a step or of a device access; `None` unless the vCPU must park and waits
    /// for that.
    pub(crate) waited_since: Option<Instant>,
}

/// Reports the end of a vCPU's thread when this value is dropped, also by a panic. Otherwise stops would wait for
/// the vCPU in vain, and the machine would never end.
struct Farewell {
    index: usize,
    shared: Arc<Shared>,
    notices: Sender<Notice>,
    why: Why,
}

impl Drop for Farewell {
    fn drop(&mut self) {
        self.shared.control.leave(self.index);
        let why = mem::replace(&mut self.why, Why::Requested);
        // The supervisor outlives the vCPUs, unless it has panicked. Then its panic is the reason for the end.
        let _ = self.notices.send(Notice::Ended(why));
    }
}

impl Vcpu {
    /// Runs the guest until the vCPU is ordered to leave or the guest ends. Called on the vCPU's own thread.
    /// Not inlined, so that its instructions can be counted.
    #[inline(never)]
    pub(crate) fn run(mut self) {
        let guard = Guard::new(self.cpu.fd_mut());
        let mut farewell = Farewell {
            index: self.index,
            shared: Arc::clone(&self.shared),
            notices: self.notices.clone(),
            why: Why::Crash("a virtual CPU's thread panicked".to_owned()),
        };
        let why = self.run_until_end(&guard);
        debug!(vcpu = self.index, ?why, "virtual CPU ended");
        self.publish();
        farewell.why = why;
    }

    fn run_until_end(&mut self, guard: &Guard) -> Why {
        if let Order::End = self.park(guard, None) {
            return Why::Requested;
        }
        if self.index == 0 {
            let now = monotonic_ns();
            self.shared.metrics.set_first_entry(now);
        }
        // Cloned once, because a clone at each exit would write to a cache line that all vCPUs share.
        let shared = Arc::clone(&self.shared);
        loop {
            if shared.control.look(self.index, || guard.clear()) {
                match self.attend(&shared.control, guard) {
                    Ok(true) => {}
                    Ok(false) => return Why::Requested,
                    Err(error) => return self.refused(&error),
                }
            }
            if self.catcher.waits_for_room && self.catcher.handler.room() == Headroom::None {
                self.make_room(&shared);
            }
            let mut next = self.once(&shared);
            while let Ok(Next::Wait(held)) = next {
                next = match self.wait(&shared, guard, held) {
                    Some(decision) => {
                        let (cpu, ram) = (&mut self.cpu, &*shared.ram);
                        self.catcher.resume(cpu, ram, &decision).map(Next::from)
                    }
                    None => return Why::Requested,
                };
            }
            match next {
                Ok(Next::Run | Next::Wait(_)) => {}
                Ok(Next::End(why)) => return why,
                Err(error) => return self.refused(&error),
            }
        }
    }

    fn refused(&mut self, error: &kvm_ioctls::Error) -> Why {
        Why::Crash(self.report(&format!("KVM refused a request: {error}")))
    }

    /// Handles requests for attention. Returns whether the loop continues. An NMI need not wait for the end of a
    /// step, because the exception window catches it.
    fn attend(&mut self, control: &Control, guard: &Guard) -> Result<bool, kvm_ioctls::Error> {
        loop {
            if control.take_nmi(self.index) {
                self.cpu.raise_nmi()?;
            }
            if !control.must_park(self.index) || !self.may_stand(control) {
                return Ok(true);
            }
            // An NMI that was sent while the vCPU was parked has not kicked it, so check again.
            if let Order::End = self.stand(guard) {
                return Ok(false);
            }
        }
    }

    fn publish(&self) {
        let ioctls = self.cpu.ioctls();
        self.shared.metrics.set_ioctls(self.index, ioctls);
    }

    /// Returns whether the vCPU may park: it is in no step and no device access, or it abandons the one that it is
    /// in, because the machine ends or the guest does not finish it. If the vCPU may not park, makes the next run
    /// complete the device access without entering the guest. Called when the vCPU must park.
    fn may_stand(&mut self, control: &Control) -> bool {
        let is_stepping = self.catcher.handler.is_stepping();
        if !is_stepping && !self.cpu.owes_io() {
            self.waited_since = None;
            return true;
        }
        let since = *self.waited_since.get_or_insert_with(Instant::now);
        if !control.is_ending() && since.elapsed() < STEP_LIMIT {
            if self.cpu.owes_io() {
                self.cpu.run_no_further();
            }
            return false;
        }
        warn!(
            vcpu = self.index,
            is_stepping, "gave up on an instruction that did not end"
        );
        if is_stepping {
            self.catcher.abandon(&mut self.cpu, &self.shared.ram);
        }
        self.waited_since = None;
        true
    }

    /// Parks the vCPU between two instructions of the guest.
    fn stand(&mut self, guard: &Guard) -> Order {
        if let Some(gate) = self.shared.gate.get()
            && self.catcher.handler.knows_kernel()
        {
            Catcher::rewind(&mut self.cpu, &self.shared.ram, gate);
        }
        let regs = self.cpu.regs();
        let gs_base = if self.cpu.in_kernel() {
            self.catcher.kernel_gs(&mut self.cpu)
        } else {
            self.cpu.sregs().gs.base
        };
        let standing = Standing {
            regs,
            gs_base,
            text: self.kernel_text(Gva(regs.rip)),
        };
        self.park(guard, Some(standing))
    }

    /// Returns the physical address of the instruction at `rip`, from the page tables in use, if the instruction is
    /// in the kernel or a module.
    fn kernel_text(&mut self, rip: Gva) -> Option<Gpa> {
        let sregs = self.cpu.sregs();
        let (cr0, tables) = (sregs.cr0, crash::tables(sregs.cr3, sregs.cr4));
        if rip < KERNEL_WINDOW.start || cr0 & CR0_PG == 0 || !self.cpu.in_kernel() {
            return None;
        }
        let mapping = tables.translate(&*self.shared.ram, rip);
        Some(mapping.ok()?.gpa)
    }

    fn park(&mut self, guard: &Guard, standing: Option<Standing>) -> Order {
        self.publish();
        let has_run = standing.is_some();
        let since = Instant::now();
        let order = self
            .shared
            .control
            .park(self.index, &guard.kickable(), standing);
        if let Order::Run(outfit) = &order {
            if has_run {
                self.stood_since(since);
            }
            let table = Arc::clone(&outfit.table);
            self.catcher.adopt(&mut self.cpu, table, outfit.view);
            self.shared.times.adjust();
            self.catcher.clock.learn(|| self.cpu.counters());
        }
        order
    }

    /// Reports a pause that began at `since` to the guest, if it was long.
    fn stood_since(&mut self, since: Instant) {
        if since.elapsed() >= PAUSE {
            self.cpu.mark_paused();
        }
    }

    /// Waits until a held hit can continue. Returns how it continues; `None` when the machine ends.
    fn wait(&mut self, shared: &Shared, guard: &Guard, held: Held) -> Option<Decision> {
        match held {
            Held::Stop(probe) => {
                let mut claims = shared.claims();
                claims.stop(probe, self.index);
                shared.control.pause_now();
                drop(claims);
                let _ = self.notices.send(Notice::Paused);
            }
            Held::Engine { hooks, argument } => {
                shared.control.hold(self.index);
                let answer = Arc::new(OnceLock::new());
                let _ = self.notices.send(Notice::Engine {
                    vcpu: self.index,
                    hooks,
                    argument,
                    answer: Arc::clone(&answer),
                });
                return match self.stand(guard) {
                    Order::End => None,
                    Order::Run(_) => Some(answer.get().cloned().unwrap_or_default()),
                };
            }
            Held::Ask(_) => return self.ask(shared, guard),
        }
        match self.stand(guard) {
            Order::End => None,
            Order::Run(_) => Some(Decision::default()),
        }
    }

    /// Puts the question of a held hit to a client, and waits for the decision. Returns it, or the default; `None`
    /// when the machine ends.
    fn ask(&mut self, shared: &Shared, guard: &Guard) -> Option<Decision> {
        let Some(inquiry) = self.catcher.question(&mut self.cpu, &shared.ram) else {
            return Some(Decision::default());
        };
        let Inquiry {
            event,
            deadline,
            default,
        } = inquiry;
        let Some(mut asked) = shared.decisions.ask(event, deadline) else {
            return Some(default);
        };
        loop {
            let since = Instant::now();
            let reply = asked.wait(|| shared.control.must_park(self.index));
            self.stood_since(since);
            match reply {
                Reply::Decided(decision) => return Some(decision),
                Reply::Unanswered => return Some(default),
                Reply::Interrupted(still) => {
                    if let Order::End = self.stand(guard) {
                        return None;
                    }
                    if self.catcher.question(&mut self.cpu, &shared.ram).is_none() {
                        // The probe was unregistered meanwhile.
                        return Some(Decision::default());
                    }
                    asked = still;
                }
            }
        }
    }

    /// Runs the guest to its next exit, and handles that exit.
    fn once(&mut self, shared: &Shared) -> Result<Next, kvm_ioctls::Error> {
        let exit = self.cpu.run(&shared.devices);
        let end = match exit {
            Exit::Gate => return self.patched_out(shared),
            Exit::Doorbell => {
                shared.detours.wake();
                return Ok(Next::Run);
            }
            Exit::Room => {
                self.ask_for_room(shared);
                return Ok(Next::Run);
            }
            Exit::Debug { exception } => match Cause::of(exception) {
                Cause::Int3 => {
                    return Ok(self.catcher.int3(&mut self.cpu, &shared.ram)?.into());
                }
                Cause::Unasked(unasked) => Why::Crash(self.report(&unasked.to_string())),
            },
            Exit::InternalError {
                bytes: Some((code, 1..)),
                ..
            } if self.catcher.mode == CatchMode::EmulationExit && code[0] == 0xcc => {
                return Ok(self.catcher.int3(&mut self.cpu, &shared.ram)?.into());
            }
            Exit::Handled | Exit::Interrupted => {
                self.cpu.share_events(false);
                return Ok(Next::Run);
            }
            Exit::Device(event) => Why::Device(event),
            Exit::Shutdown => Why::TripleFault(self.report("the guest triple-faulted")),
            Exit::InternalError { suberror, bytes } => {
                let what = match bytes {
                    Some((code, len)) => format!(
                        "KVM could not emulate an instruction (bytes {})",
                        crash::hex(&code[..usize::from(len)])
                    ),
                    None => format!("KVM internal error, suberror {suberror}"),
                };
                Why::Crash(self.report(&what))
            }
            Exit::FailEntry(reason) => {
                let what = format!("the processor refused to enter the guest, reason {reason:#x}");
                Why::Crash(self.report(&what))
            }
            Exit::Unknown(what) => Why::Crash(self.report(&format!("unknown exit: {what}"))),
        };
        Ok(Next::End(end))
    }

    /// Waits for room for a detour that has found the ring full. Sets the guest's RAX to 1 if another attempt makes
    /// sense, otherwise to 0.
    #[cold]
    fn ask_for_room(&mut self, shared: &Shared) {
        let rip = Gva(self.cpu.regs().rip);
        if !(KERNEL_WINDOW.start..KERNEL_WINDOW.end).contains(&rip) || !self.cpu.in_kernel() {
            // Not an `out` of a detour: the guest has written to an unused port.
            return;
        }
        let since = Instant::now();
        let is_called = || shared.control.must_park(self.index);
        let is_worth_it = shared
            .detours
            .wait_for_room(|| shared.detours.room(), is_called);
        self.stood_since(since);
        self.cpu.regs_mut().rax = is_worth_it.into();
        self.cpu.give_regs();
    }

    /// Waits for room for the events of the next hit.
    #[cold]
    fn make_room(&mut self, shared: &Shared) {
        let since = Instant::now();
        let (control, handler) = (&shared.control, &self.catcher.handler);
        let is_called = || control.must_park(self.index);
        shared.detours.wait_for_room(|| handler.room(), is_called);
        self.stood_since(since);
    }

    fn report(&mut self, what: &str) -> String {
        crash::report(what, self.index, &mut self.cpu, &self.shared.ram)
    }

    /// Handles an `out` to [`Exit::Gate`]'s port: one of our patches, or the guest's own write to an unused port.
    fn patched_out(&mut self, shared: &Shared) -> Result<Next, kvm_ioctls::Error> {
        if let Some(gate) = shared.gate.get()
            && let Some(waits) = self.catcher.gate(&mut self.cpu, &shared.ram, gate)?
        {
            return Ok(waits.into());
        }
        if let Some(waits) = self.catcher.returned(&mut self.cpu, &shared.ram)? {
            return Ok(waits.into());
        }
        if let Some(waits) = self.catcher.exception(&mut self.cpu, &shared.ram)? {
            return Ok(waits.into());
        }
        let rip = Gva(self.cpu.regs().rip);
        if let Some(tripwire) = &shared.tripwire
            && tripwire.is_at(rip)
            && self.cpu.in_kernel()
            && tripwire.lift(&shared.ram)
        {
            self.cpu.complete_io();
            let mut regs = self.cpu.regs();
            regs.rip = tripwire.at().0;
            self.cpu.set_regs_now(&regs)?;
            shared.control.hold(self.index);
            let sregs = Box::new(*self.cpu.sregs());
            let _ = self.notices.send(Notice::TextFinal {
                vcpu: self.index,
                sregs,
            });
        }
        Ok(Next::Run)
    }
}
