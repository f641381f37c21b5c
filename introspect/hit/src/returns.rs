//! Return probes at a hit: the entry of a function, its return through the trampoline, and the end of a task.
//!
//! Invariant: a return slot holds the trampoline's address only while [`Calls`] knows the real return address. If a
//! function has read the trampoline's address before the real address is put back, the real address is found in the
//! slot or among the restored frames.
//!
//! [`Calls`]: crate::calls::Calls

use std::sync::atomic::Ordering;

use hvprobe_arch::detour::{BY_HOST, Instance, StackWords};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::predicate::Predicate;
use hvprobe_spec::{Actions, Item};

use super::capture::{capture, passes};
use super::changes::apply;
use super::context::Scene;
use super::outcome::Outcome;
use super::report::{Seen, Taken};
use super::state::HitState;
use super::table::{Following, Member, ProbeTable, Returning};
use crate::calls::{Call as InFlight, DATA_MAX, Ended, Entry, Pool};
use crate::clock::Clock;
use crate::event::{Call, Captured, EventKind};
use crate::record::{NESTED_MAX, RecordSource};
use crate::region::KERNEL_WINDOW;

/// Size in bytes of the header before the entry's capture in a call's private data. The header has a bit for each
/// unreadable item.
const HEADER: usize = 4;

/// Returns the size in bytes of the private data of a call, for a probe with these `actions`.
#[must_use]
pub fn entry_data_size(actions: &Actions) -> usize {
    match actions.capture.as_slice() {
        [] => 0,
        items => HEADER + items.iter().map(Item::len).sum::<usize>(),
    }
}

impl HitState {
    /// Handles the entry of a function with a return probe: puts the trampoline or a stub in place of the return
    /// address. Not inlined, because the hits of other probes would then have fewer registers.
    #[inline(never)]
    pub(super) fn enter<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        member: &Member,
        actions: &Actions,
        calls: &Following,
        taken: &Taken,
        regs: &Regs,
    ) {
        if !actions.apply_to(regs) {
            member.counters.veto(self.vcpu);
            return;
        }
        // A probe that changes something at the return must see that return, even if its budget is exceeded.
        if actions.changes.is_empty() && !member.counters.admit(self.vcpu, taken.at.host_ns) {
            return;
        }
        let entered = match calls {
            Following::Trampoline(pool) => self.enter_call(scene, actions, pool, taken, regs),
            Following::Stubs(source) => enter_followed(scene, source, taken, regs),
        };
        if entered.is_none() {
            member.counters.miss(self.vcpu);
        }
    }

    fn enter_call<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        actions: &Actions,
        pool: &Pool,
        taken: &Taken,
        regs: &Regs,
    ) -> Option<()> {
        let table = scene.table;
        let (returns, fixtures) = (table.returns()?, table.fixtures()?);
        let slot = Gva(regs.rsp);
        let found = Gva(scene.read_u64(slot)?);
        let trampoline = fixtures.trampoline();
        let mut calls = returns.calls.open(scene.task()?)?;
        let ret = calls.enter(slot, table.classify(scene.around.mem, found), |call| {
            if let Some(orphaned) = table.returning(call.probe()) {
                orphaned.counters.orphan(self.vcpu);
            }
        })?;
        let mut data;
        let data = if actions.capture.is_empty() {
            &[]
        } else {
            data = [0; DATA_MAX];
            entry_data(scene, &mut data, &actions.capture, regs)
        };
        let entry = Entry {
            id: returns.next_call.fetch_add(1, Ordering::Relaxed),
            slot,
            ret,
            host_ns: taken.at.host_ns,
            guest_tsc: taken.at.guest_tsc,
            regs,
            data,
        };
        if !calls.push(pool, &entry) {
            return None;
        }
        let planted = found == trampoline
            || scene
                .walker
                .write_u64(scene.around.mem, slot, trampoline.0)
                .is_ok();
        if !planted {
            calls.undo_pushes(1);
            return None;
        }
        Some(())
    }

    /// Handles the trampoline: a function has returned. Runs the return handlers of all probes that saw its
    /// entry and sends the guest to the caller.
    pub(super) fn returned<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        regs: &mut Regs,
    ) -> Outcome {
        let table = scene.table;
        let taken = Taken::now(scene.around);
        let slot = Gva(regs.rsp.wrapping_sub(8));
        let known = table.returns().and_then(|returns| {
            let mut calls = returns.calls.open(scene.task()?)?;
            calls.returned(slot, |ended, call| {
                let Some(probe) = table.returning(call.probe()) else {
                    return;
                };
                if ended == Ended::Orphaned {
                    probe.counters.orphan(self.vcpu);
                    return;
                }
                regs.rip = call.ret().0;
                if probe.disabled {
                    probe.counters.miss(self.vcpu);
                    return;
                }
                let (actions, counters) = (&probe.actions, &probe.counters);
                let now = taken.at.host_ns;
                if let Some(filter) = &actions.filter {
                    if !self.filtered_return(scene, (probe, filter), call, regs, &taken) {
                        return;
                    }
                } else if actions.changes.is_empty() || counters.admit(self.vcpu, now) {
                    counters.hit(self.vcpu);
                    let kind = || EventKind::Return(reported_call(call));
                    let seen = Seen::new(self.vcpu, call.probe(), actions, regs, &taken);
                    let (events, items) = (&mut self.events, &actions.capture_at_return);
                    let cost_ns = if actions.capture.is_empty() {
                        seen.report(scene, events, kind, items)
                    } else {
                        let mut data = [0; DATA_MAX];
                        let captured = restore(&actions.capture, call.data(&mut data));
                        seen.report_with(scene, events, kind, &captured, items)
                    };
                    counters.charge(now, cost_ns);
                }
                if !apply(&actions.changes, regs, scene) {
                    probe.counters.error(self.vcpu);
                }
            })
        });
        // If no call is known, the popped slot contains the real return address: the address was put back there
        // just after the function had read the trampoline's address.
        let to = known.or_else(|| {
            let found = scene.read_u64(slot).map(Gva);
            let on_the_way = found.is_some_and(|found| table.is_trampoline(found));
            if on_the_way
                && let Some(task) = scene.task()
                && let Some(to) = table.restored(task, slot)
            {
                return Some(to);
            }
            if let Some(returns) = table.returns() {
                returns.unmatched.fetch_add(1, Ordering::Relaxed);
            }
            found.filter(|_| !on_the_way)
        });
        match to {
            Some(to) => {
                regs.rip = to.0;
                Outcome::Resume { shadow: false }
            }
            None => Outcome::Foreign,
        }
    }

    /// Handles the return of a call that a probe with a filter followed. Returns whether the filter accepts it.
    #[cold]
    #[inline(never)]
    fn filtered_return<M: PhysMemory + ?Sized, C: Clock>(
        &mut self,
        scene: &Scene<'_, M, C>,
        (probe, filter): (&Returning, &Predicate),
        call: &InFlight<'_>,
        regs: &Regs,
        taken: &Taken,
    ) -> bool {
        let (actions, counters) = (&probe.actions, &probe.counters);
        let entry = call.regs();
        let mut data = [0; DATA_MAX];
        let mut captured = restore(&actions.capture, call.data(&mut data));
        let items = &actions.capture_at_return;
        capture(scene, &mut captured, items, regs, Some(&entry));
        let seen_by = (actions.as_ref(), filter);
        let passes = passes(scene, self.vcpu, seen_by, &captured, (regs, Some(&entry)));
        if !counters.lets_pass(self.vcpu, passes) {
            return false;
        }
        let now = taken.at.host_ns;
        if actions.changes.is_empty() || counters.admit(self.vcpu, now) {
            counters.hit(self.vcpu);
            let seen = Seen::new(self.vcpu, call.probe(), actions, regs, taken);
            let kind = || EventKind::Return(reported_call(call));
            let cost_ns = seen.report_with(scene, &mut self.events, kind, &captured, &[]);
            counters.charge(now, cost_ns);
        }
        true
    }

    /// Handles the death of `task`, which is the current task and is about to run for the last time. `stack` is its
    /// stack pointer. Calls that stubs follow are found on that stack, so the time does not grow with the number of
    /// probes. All sources are searched only if the stack may not show all calls, because the kernel has left a
    /// broken stack and may have written to it since, or because the kernel keeps return addresses itself.
    pub(super) fn task_dies<M: PhysMemory + ?Sized, C: Clock>(
        &self,
        scene: &Scene<'_, M, C>,
        task: Gva,
        stack: Gva,
    ) {
        let (table, mem) = (scene.table, scene.around.mem);
        let mut asks_all = false;
        scene.words_above(stack, |slot, word| {
            asks_all |= table.asks_all(word);
            calls_dead(table, (slot, word), task, mem);
        });
        if asks_all {
            self.task_dead(scene, task);
        } else {
            self.orphan_calls(scene, task);
        }
    }

    /// Releases all calls that `task` has made, and counts them as orphans: none of them will return.
    pub(super) fn task_dead<M: PhysMemory + ?Sized, C: Clock>(
        &self,
        scene: &Scene<'_, M, C>,
        task: Gva,
    ) {
        for source in scene.table.followed().iter() {
            source.task_dead(task, scene.around.mem);
        }
        self.orphan_calls(scene, task);
    }

    /// Removes the calls of `task` that were to return through the trampoline and will not do so, and counts them
    /// as orphans.
    fn orphan_calls<M: PhysMemory + ?Sized, C: Clock>(&self, scene: &Scene<'_, M, C>, task: Gva) {
        let open = || scene.table.returns()?.calls.open(task);
        if let Some(mut calls) = open() {
            calls.remove_all(|call| {
                if let Some(probe) = scene.table.returning(call.probe()) {
                    probe.counters.orphan(self.vcpu);
                }
                let before = (call.slot(), call.ret());
                calls_dead(scene.table, before, task, scene.around.mem);
            });
        }
    }
}

/// Releases the call of `task` whose stub is, or was, at a slot, and counts it as an orphan. Does the same for the
/// calls to whose stubs this call would have returned: those of other probes of the same function, or of a function
/// that jumped to it.
fn calls_dead<M: PhysMemory + ?Sized>(
    table: &ProbeTable,
    (slot, mut stub): (Gva, Gva),
    task: Gva,
    mem: &M,
) {
    for _ in 0..NESTED_MAX {
        if !KERNEL_WINDOW.contains(stub) {
            return;
        }
        let Some((source, calls)) = table.followed().whose(stub) else {
            return;
        };
        let before = calls.return_address(stub, mem);
        if !source.call_dead((slot, stub), task, mem) {
            return;
        }
        let Some(before) = before else { return };
        stub = before;
    }
}

/// Handles the entry of a function whose return is recorded without an exit: does the work of a detour.
fn enter_followed<M: PhysMemory + ?Sized, C: Clock>(
    scene: &Scene<'_, M, C>,
    source: &RecordSource,
    taken: &Taken,
    regs: &Regs,
) -> Option<()> {
    let (calls, mem) = (source.followed()?, scene.around.mem);
    let slot = Gva(regs.rsp);
    let found = Gva(scene.read_u64(slot)?);
    let entry = Instance {
        caller: scene.table.caller(mem, found),
        generation: 0,
        return_address: found,
        slot,
        task: scene.task()?,
        tsc: taken.at.host_ns,
        cpu: Some(BY_HOST),
        regs: *regs,
        stack: StackWords::default(),
    };
    let stub = calls.enter(&entry, mem)?;
    let sent = scene.walker.write_u64(mem, slot, stub.0);
    if sent.is_err() {
        calls.release(stub, mem);
    }
    sent.ok()
}

/// Returns what the event of a return reports of its call.
#[inline]
fn reported_call(call: &InFlight<'_>) -> Call {
    Call {
        id: call.id(),
        entry_ns: call.host_ns(),
        entry_tsc: call.guest_tsc(),
        entry: call.regs(),
    }
}

/// Captures `items` at a call's entry, and writes them to the front of `into` as the call's private data.
fn entry_data<'a, M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    into: &'a mut [u8; DATA_MAX],
    items: &[Item],
    regs: &Regs,
) -> &'a [u8] {
    let mut captured = Captured::nothing();
    capture(scene, &mut captured, items, regs, None);
    let len = HEADER + captured.bytes().len();
    into[..HEADER].copy_from_slice(&captured.unreadable().to_le_bytes());
    into[HEADER..len].copy_from_slice(captured.bytes());
    &into[..len]
}

/// Restores the captured `items` of a call's entry from the call's private data.
fn restore(items: &[Item], data: &[u8]) -> Captured {
    match data.split_first_chunk::<HEADER>() {
        Some((header, bytes)) => Captured::again(bytes, u32::from_le_bytes(*header), items.len()),
        None => Captured::nothing(),
    }
}
