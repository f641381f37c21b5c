//! A virtual CPU played by the test: what the processor does around a hit, and the events.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use hvprobe_arch::insn::ENDBR64;
use hvprobe_arch::regs::rflags;
use hvprobe_arch::{Gva, Regs};
use hvprobe_fixtures::Memory;
use hvprobe_hit::event::{Collector, Event};
use hvprobe_hit::table::ProbeTable;
use hvprobe_hit::{HitHandler, Inquiry, Outcome, Surroundings};
use hvprobe_spec::Decision;

use super::Rig;
use crate::testing::{TestGuest, Ticks, regs};

/// Outcome of a hit after which the guest just continues.
pub(super) const RESUME: Outcome = Outcome::Resume { shadow: false };

/// Returns the gate's handler (SDM vol. 3, 6.14.1).
fn handler_of(gate: [u8; 16]) -> Gva {
    let [a, b, _, _, _, _, c, d, e, f, g, h, ..] = gate;
    Gva(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

/// A virtual CPU with its events.
pub(super) struct Cpu {
    guest: Rc<TestGuest>,
    table: Arc<ProbeTable>,
    pub(super) handler: HitHandler,
    collector: Collector,
    events: Arc<Mutex<Vec<Event>>>,
    clock: Rc<Ticks>,
    pub(super) regs: Regs,
    pub(super) gs_base: u64,
    pub(super) cr3: Option<u64>,
    /// Number of times that CR3 was read.
    pub(super) cr3_asked: Cell<u32>,
}

impl Cpu {
    /// Creates the second virtual CPU, with the registers of [`regs`].
    pub(super) fn new(rig: &Rig) -> Self {
        Self::numbered(rig, 1)
    }

    pub(super) fn numbered(rig: &Rig, vcpu: u32) -> Self {
        let events = Arc::<Mutex<Vec<Event>>>::default();
        let sink = Arc::clone(&events);
        let (collector, mut producers) = Collector::start(
            1,
            4096,
            Box::new(move |batch, dropped| {
                assert_eq!(dropped, 0);
                sink.lock().expect("no panic").extend_from_slice(batch);
            }),
        )
        .expect("a thread can be started");
        let mut handler = HitHandler::new(vcpu, producers.pop().expect("one"));
        let table = rig.guest.table();
        handler.adopt(Arc::clone(&table), Some(rig.guest.view()));
        Self {
            guest: Rc::clone(&rig.guest),
            table,
            handler,
            collector,
            events,
            clock: Rc::clone(&rig.clock),
            regs: regs(),
            gs_base: rig.guest.gs_base(),
            cr3: None,
            cr3_asked: Cell::new(0),
        }
    }

    /// Adopts the table of the guest's last stop, as every virtual CPU does then.
    fn sync(&mut self) {
        let table = self.guest.table();
        if !Arc::ptr_eq(&table, &self.table) {
            assert!(
                !self.handler.is_stepping(),
                "the test stopped the guest inside a step"
            );
            self.handler
                .adopt(Arc::clone(&table), Some(self.guest.view()));
            self.table = table;
        }
    }

    fn with<T>(
        &mut self,
        act: impl FnOnce(&mut HitHandler, &mut Regs, &Surroundings<'_, Memory, Ticks>) -> T,
    ) -> T {
        self.sync();
        let read_cr3 = || {
            self.cr3_asked.set(self.cr3_asked.get() + 1);
            self.cr3
        };
        let around = Surroundings {
            mem: &self.guest.mem,
            clock: &*self.clock,
            gs_base: self.gs_base,
            cr3: self.handler.reaches_process().then_some(&read_cr3 as _),
        };
        act(&mut self.handler, &mut self.regs, &around)
    }

    /// Executes the int3 at `at`.
    pub(super) fn hit(&mut self, at: Gva) -> Outcome {
        self.with(|handler, regs, around| handler.hit(at, regs, around))
    }

    /// Runs a hit at `at` that goes through a copy; returns the address of the copy.
    pub(super) fn enter_slot(&mut self, at: Gva) -> Gva {
        assert_eq!(self.hit(at), RESUME);
        Gva(self.regs.rip)
    }

    /// Returns the question for a client about the hit that holds the guest; `None` if there is none.
    pub(super) fn question(&mut self) -> Option<Inquiry> {
        self.with(|handler, regs, around| handler.question(regs, around))
    }

    pub(super) fn resume(&mut self, decision: &Decision) -> Outcome {
        self.with(|handler, regs, around| handler.resume(decision, regs, around))
    }

    /// Delivers exception `vector` with RIP at `rip`, as the processor does: pushes a frame and goes through
    /// the gate of the current interrupt descriptor table. Returns the outcome if the gate is one of ours.
    pub(super) fn raise(&mut self, vector: u8, code: Option<u64>, rip: Gva) -> Option<Outcome> {
        let ours = self.deliver(vector, code, rip);
        ours.then(|| self.exception(vector))
    }

    /// As [`Cpu::raise`] up to the first instruction of the handler; returns whether that is a stub of ours.
    pub(super) fn deliver(&mut self, vector: u8, code: Option<u64>, rip: Gva) -> bool {
        let own = self.guest.view().idt;
        let idt = self.handler.window().unwrap_or(own);
        let mut top = self.regs.rsp & !0xf;
        for word in [0x18, self.regs.rsp, self.regs.rflags, 0x10, rip.0]
            .into_iter()
            .chain(code)
        {
            top -= 8;
            self.guest.write(Gva(top), &word.to_le_bytes());
        }
        self.regs.rsp = top;
        self.regs.rflags &= !rflags::IF;
        let gate = idt.wrapping_add(u64::from(vector) * 16);
        let stub = handler_of(self.guest.read(gate));
        self.regs.rip = stub.0;
        if idt == own {
            assert_eq!(self.handler.vector(stub), None);
            return false;
        }
        // RIP at the `out`, and after it.
        assert_eq!(self.guest.read(stub), ENDBR64);
        let out = stub.wrapping_add(4);
        assert_eq!(self.guest.read(out), [0xe6, 0x90]);
        for rip in [out, out.wrapping_add(2)] {
            assert_eq!(self.handler.vector(rip), Some(vector));
        }
        true
    }

    /// Runs the exit from the stub of `vector`.
    pub(super) fn exception(&mut self, vector: u8) -> Outcome {
        self.exception_with(vector, self.guest.view().idt)
    }

    /// As [`Cpu::exception`], with the guest's own interrupt descriptor table at `idt`.
    pub(super) fn exception_with(&mut self, vector: u8, idt: Gva) -> Outcome {
        self.with(|handler, regs, around| handler.exception(vector, idt, regs, around))
    }

    /// Abandons a step that has not ended.
    pub(super) fn abandon(&mut self) {
        self.with(|handler, regs, around| handler.abandon(regs, around));
    }

    /// Executes the guest's `iret` with the frame of an exception without an error code, or after the error
    /// code was popped.
    pub(super) fn iret(&mut self) {
        let [rip, rflags, rsp] = [0, 16, 24].map(|offset| {
            let at = Gva(self.regs.rsp).wrapping_add(offset);
            u64::from_le_bytes(self.guest.read(at))
        });
        self.regs.rip = rip;
        self.regs.rflags = rflags;
        self.regs.rsp = rsp;
    }

    /// Returns all events that the virtual CPU reported.
    pub(super) fn events(self) -> Vec<Event> {
        drop(self.handler);
        self.collector.finish();
        let events = self.events.lock().expect("no panic");
        events.clone()
    }
}
