//! Calls that return probes follow without exits: their instances, and what the host does with them.
//!
//! A call in flight returns to the stub of its instance, independently of its task and of the vCPU on which that
//! task runs. Invariants: the host takes an instance from a call only when the task that made it will never run
//! again; the memory of a probe that has left stays unchanged until no task can be in its code any more.

use std::sync::atomic::{Ordering, fence};

use hvprobe_arch::detour::{BY_HOST, Instance, InstanceLayout, Instances, STUB};
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::{Gpa, Gva};

/// Maximum number of tries to change the free list. After these, the host gives up the instance. A try fails if the
/// guest changes the list at the same time.
const TRIES: u32 = 1000;

/// The calls of one return probe.
#[derive(Debug)]
pub struct Followed {
    /// The instances, at the addresses that detours use.
    pub instances: Instances,
    /// Layout of an instance.
    pub layout: InstanceLayout,
    /// Physical address of the instances.
    pub at: Gpa,
    /// Physical address of the head of the instances' free list.
    pub free: Gpa,
    /// Address of the first stub, at the beginning of the code.
    pub stubs: Gva,
    /// Size of the code in bytes, including the stubs.
    pub code_len: u64,
}

/// A call that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    /// Address that it returns to.
    pub(crate) to: Gva,
    /// When it began: a value of the guest's counter, or the host's time if `by_host` is set.
    pub(crate) tsc: u64,
    pub(crate) by_host: bool,
}

impl Followed {
    /// Returns the number of bytes that the instances take.
    #[must_use]
    pub fn size(&self) -> u64 {
        u64::from(self.instances.count) * self.stride()
    }

    fn stride(&self) -> u64 {
        self.layout.stride() as u64
    }

    fn stub(&self, index: u32) -> Gva {
        self.stubs.wrapping_add(u64::from(index) * u64::from(STUB))
    }

    fn instance_at(&self, index: u32) -> Gpa {
        self.at.wrapping_add(u64::from(index) * self.stride())
    }

    fn word(&self, index: u32, offset: u64, mem: &(impl PhysMemory + ?Sized)) -> Option<u64> {
        let at = self.instance_at(index).wrapping_add(offset);
        mem.read_u64(at).ok()
    }

    /// Iterates over the calls in flight, as (index, slot, return address).
    fn in_flight<'a>(
        &'a self,
        mem: &'a (impl PhysMemory + ?Sized),
    ) -> impl Iterator<Item = (u32, Gva, Gva)> + 'a {
        (0..self.instances.count).filter_map(|index| {
            let slot = self.word(index, InstanceLayout::SLOT, mem)?;
            let to = self.word(index, InstanceLayout::RETURN, mem)?;
            (slot != 0).then_some((index, Gva(slot), Gva(to)))
        })
    }

    /// Returns the return address of the call whose stub is at `at`.
    pub fn return_address(&self, at: Gva, mem: &(impl PhysMemory + ?Sized)) -> Option<Gva> {
        self.word(self.index(at)?, InstanceLayout::RETURN, mem)
            .map(Gva)
    }

    /// Returns the real return address of the call in flight whose stub is at `at`, past the stubs of other probes.
    pub(crate) fn caller(&self, at: Gva, mem: &(impl PhysMemory + ?Sized)) -> Option<Gva> {
        self.word(self.index(at)?, InstanceLayout::CALLER, mem)
            .map(Gva)
    }

    /// Returns the call whose stub is at `at`. If that call has ended, this may be a later call that uses the same
    /// instance.
    pub(crate) fn begun(&self, at: Gva, mem: &(impl PhysMemory + ?Sized)) -> Option<Begun> {
        let index = self.index(at)?;
        let to = self.word(index, InstanceLayout::RETURN, mem)?;
        // If this is the return address of a later call, the time that is read next also belongs to that call.
        fence(Ordering::Acquire);
        Some(Begun {
            to: Gva(to),
            tsc: self.word(index, InstanceLayout::ENTRY_TSC, mem)?,
            by_host: self.word(index, InstanceLayout::ENTRY_CPU, mem)? >> 32 == BY_HOST.into(),
        })
    }

    /// Returns whether the stub at `at` belongs to one of the instances.
    pub(crate) fn has_stub(&self, at: Gva) -> bool {
        self.index(at).is_some()
    }

    /// Returns the index of the instance whose stub is at `at`.
    fn index(&self, at: Gva) -> Option<u32> {
        let offset = at.offset_from(self.stubs)?;
        let index = u32::try_from(offset / u64::from(STUB)).ok()?;
        (index < self.instances.count).then_some(index)
    }

    /// Replaces the stubs' addresses in the frames of calls in flight. `beyond` returns where a call's return
    /// address leads: to the caller, or to a stub of another probe. The vCPUs must be stopped. A task that is
    /// already in a stub runs it to its end.
    pub fn restore_frames(
        &self,
        tables: &PageTables,
        mem: &dyn PhysMemory,
        beyond: impl Fn(Gva) -> Gva,
    ) {
        for (index, slot, to) in self.in_flight(mem) {
            if tables.read_u64(mem, slot) == Ok(self.stub(index).0) {
                // The slot could be read, so it is mapped.
                let _ = tables.write(mem, slot, &beyond(to).0.to_le_bytes());
            }
        }
    }

    /// In the instance of each call in flight, replaces the return address and the caller's address by the
    /// addresses to which they lead, as `beyond` returns them. The call then returns to the new address and reports
    /// it. The vCPUs must be stopped.
    pub fn redirect(&self, mem: &dyn PhysMemory, beyond: impl Fn(Gva) -> Gva) {
        for (index, ..) in self.in_flight(mem) {
            for word in [InstanceLayout::RETURN, InstanceLayout::CALLER] {
                let Some(to) = self.word(index, word, mem).map(Gva) else {
                    continue;
                };
                let then = beyond(to);
                if then != to {
                    let at = self.instance_at(index).wrapping_add(word);
                    // The instance has just been read.
                    let _ = mem.write_u64(at, then.0);
                }
            }
        }
    }

    /// Iterates over the addresses at which calls may continue: the return addresses of all instances that are not
    /// on the free list. This includes instances that a call is about to use, or that are about to be put on the
    /// list.
    pub fn leads_to<'a>(
        &'a self,
        mem: &'a (impl PhysMemory + ?Sized),
    ) -> impl Iterator<Item = Gva> + 'a {
        let mut is_free = vec![false; usize::try_from(self.instances.count).unwrap_or(0)];
        let mut next = mem.read_u64(self.free).ok();
        // The guest may have made the list circular.
        while let Some(index) = next.and_then(|next| u32::try_from(next & u64::from(u32::MAX)).ok())
            && let Some(free) = is_free.get_mut(index as usize)
            && !std::mem::replace(free, true)
        {
            next = self.word(index, InstanceLayout::NEXT, mem);
        }
        let taken = (0..self.instances.count).filter(move |index| !is_free[*index as usize]);
        taken.filter_map(|index| self.word(index, InstanceLayout::RETURN, mem).map(Gva))
    }

    /// Releases the instance of the call whose `stub` is at `slot`, if that call is in flight and was made by
    /// `task`, which will not return from it. Returns whether it was released. Allocates nothing.
    pub(crate) fn release_call(
        &self,
        (slot, stub): (Gva, Gva),
        task: Gva,
        mem: &(impl PhysMemory + ?Sized),
    ) -> bool {
        let is_in_flight = self.index(stub).is_some_and(|index| {
            self.word(index, InstanceLayout::SLOT, mem) == Some(slot.0)
                && self.word(index, InstanceLayout::TASK, mem) == Some(task.0)
        });
        if is_in_flight {
            self.release(stub, mem);
        }
        is_in_flight
    }

    /// Releases the instances of all calls that `task` has made. The task will not run again. Returns the number of
    /// calls. Reads all instances. Allocates nothing.
    pub fn release_calls_of(&self, task: Gva, mem: &(impl PhysMemory + ?Sized)) -> u64 {
        let mut orphans = 0;
        for (index, ..) in self.in_flight(mem) {
            if self.word(index, InstanceLayout::TASK, mem) == Some(task.0) {
                orphans += 1;
                let slot = self.instance_at(index).wrapping_add(InstanceLayout::SLOT);
                if mem.write_u64(slot, 0).is_ok() {
                    self.push_free(index, mem);
                }
            }
        }
        orphans
    }

    /// Takes an instance for a call that begins, and writes `entry` into it (except the generation), as a detour
    /// does. Returns the instance's stub: the caller must make the call return there, or [release](Self::release)
    /// it. `None` if no instance is free. Allocates nothing.
    pub fn enter(&self, entry: &Instance, mem: &(impl PhysMemory + ?Sized)) -> Option<Gva> {
        let index = self.pop_free(mem)?;
        let at = self.instance_at(index);
        let used = self.word(index, InstanceLayout::GENERATION, mem)?;
        let (bytes, len) = self.layout.entered(entry, used.wrapping_add(1));
        let written = mem
            // Cleared first, so that a reader that finds this call's return address also finds its time.
            .write_u64(at.wrapping_add(InstanceLayout::RETURN), 0)
            .and_then(|()| {
                fence(Ordering::Release);
                mem.write(at, &bytes[..len])
            })
            .and_then(|()| {
                fence(Ordering::Release);
                mem.write_u64(
                    at.wrapping_add(InstanceLayout::RETURN),
                    entry.return_address.0,
                )
            })
            .and_then(|()| {
                // A reader that finds the slot set also finds the rest.
                fence(Ordering::Release);
                mem.write_u64(at.wrapping_add(InstanceLayout::SLOT), entry.slot.0)
            });
        written.is_ok().then(|| self.stub(index))
    }

    /// Releases the instance whose stub is `stub`. Its call will not return there.
    pub fn release(&self, stub: Gva, mem: &(impl PhysMemory + ?Sized)) {
        if let Some(index) = self.index(stub) {
            let slot = self.instance_at(index).wrapping_add(InstanceLayout::SLOT);
            if mem.write_u64(slot, 0).is_ok() {
                self.push_free(index, mem);
            }
        }
    }

    /// Takes an instance off the free list, which the guest may change at the same time.
    fn pop_free(&self, mem: &(impl PhysMemory + ?Sized)) -> Option<u32> {
        for _ in 0..TRIES {
            let free = mem.read_u64(self.free).ok()?;
            // The guest may have written anything there.
            let index = u32::try_from(free & u64::from(u32::MAX)).ok()?;
            (index < self.instances.count).then_some(())?;
            let next = self.word(index, InstanceLayout::NEXT, mem)?;
            let low = u64::from(u32::MAX);
            let to = free & !low | next & low;
            if mem.exchange_u64(self.free, free, to).ok()? {
                return Some(index);
            }
        }
        None
    }

    /// Puts an instance on the free list, which the guest may change at the same time.
    fn push_free(&self, index: u32, mem: &(impl PhysMemory + ?Sized)) {
        for _ in 0..TRIES {
            let Ok(free) = mem.read_u64(self.free) else {
                return;
            };
            let (next, tag) = (free & u64::from(u32::MAX), free >> 32);
            let to = (tag.wrapping_add(1) << 32) | u64::from(index);
            let entry = self.instance_at(index).wrapping_add(InstanceLayout::NEXT);
            if mem.write_u64(entry, next).is_err() {
                return;
            }
            match mem.exchange_u64(self.free, free, to) {
                Ok(true) | Err(_) => return,
                Ok(false) => {}
            }
        }
    }
}
