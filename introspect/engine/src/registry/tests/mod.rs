//! Tests of the engine on a guest without processors, from a definition to bytes of text, and from a hit to an
//! event.

mod actions;
mod arguments;
mod batch;
mod coexist;
mod cpu;
mod enable;
mod explained;
mod faults;
mod foreign;
mod ftrace;
mod glob;
mod handed_out;
mod hit;
mod hooks;
mod jump;
mod late;
mod listed;
mod mechanisms;
mod model;
mod modules;
mod overtaken;
mod patient;
mod pending;
mod process;
mod reads;
mod refused;
mod replaced;
mod returns;
mod rewritten;
mod slots;
mod stacks;
mod switch;
mod throttle;
mod window;

use std::rc::Rc;
use std::sync::OnceLock;

use hvprobe_arch::insn::GateHead;
use hvprobe_arch::trap::INT3;
use hvprobe_arch::{Gpa, Gva, Regs};
use hvprobe_fixtures::{kernel, probed};
use hvprobe_hit::table::HookSet;
use hvprobe_hit::{Counts, Held, Outcome};
use hvprobe_spec::definition::parse;
use hvprobe_spec::{Actions, Decision, Mechanism, ProbeId, ProbeSpec};

use crate::error::{ChangeError, RegisterError};
use crate::info::{ProbeInfo, ProbeState};
use crate::refusal::Refused;
use crate::registry::state::Registry;
use crate::testing::{TestGuest, Ticks, hidden, whole_hidden};
use crate::world::Standing;
use cpu::{Cpu, RESUME};

/// Number of virtual CPUs of the guest.
const VCPUS: usize = 2;
/// Probe of a function of the fixture whose first instruction is emulated.
const EMULATED: &str = "p filler_000";
/// Probe of a function of the fixture whose first instruction is boosted.
const BOOSTED: &str = "p filler_001";

/// Returns the hooks for which a virtual CPU waits, and the first argument of the hooked function.
fn held_hooks(outcome: Outcome) -> (HookSet, Gva) {
    match outcome {
        Outcome::Hold(Held::Engine { hooks, argument }) => (hooks, argument),
        other => panic!("no hook of the engine's: {other:?}"),
    }
}

/// Passes a virtual CPU's hooks to the registry; returns how the guest continues.
fn run_hooks(rig: &mut Rig, outcome: Outcome) -> Decision {
    let (hooks, argument) = held_hooks(outcome);
    rig.registry
        .run_hooks(hooks, argument, &*rig.guest)
        .decision
}

fn spec(definition: &str) -> ProbeSpec {
    ProbeSpec::from(parse(definition).expect("a definition"))
}

fn disabled(definition: &str) -> ProbeSpec {
    ProbeSpec {
        disabled: true,
        ..spec(definition)
    }
}

fn specs<'a>(definitions: impl IntoIterator<Item = &'a str>) -> Vec<ProbeSpec> {
    definitions.into_iter().map(spec).collect()
}

/// As [`spec`], with these actions.
fn acting(definition: &str, actions: Actions) -> ProbeSpec {
    ProbeSpec {
        actions,
        ..spec(definition)
    }
}

/// As [`spec`], with a post-handler: an instruction that is not emulated is stepped.
fn post(definition: &str) -> ProbeSpec {
    let post = true;
    let actions = Actions {
        post,
        ..Actions::default()
    };
    acting(definition, actions)
}

/// A guest and its probes.
struct Rig {
    guest: Rc<TestGuest>,
    registry: Registry,
    clock: Rc<Ticks>,
}

impl Rig {
    /// Creates a guest that is still booting.
    fn booting() -> Self {
        static ELF: OnceLock<Vec<u8>> = OnceLock::new();
        Self::boot(ELF.get_or_init(probed::vmlinux))
    }

    fn boot(elf: &[u8]) -> Self {
        let guest = Rc::new(TestGuest::boot(elf));
        let registry = Registry::new(guest.image.clone(), VCPUS, hidden());
        let clock = Rc::default();
        Self {
            guest,
            registry,
            clock,
        }
    }

    fn booting_with_room() -> Self {
        Self::boot_whole(&probed::vmlinux())
    }

    /// As [`Rig::boot`], with room for detours.
    fn boot_whole(elf: &[u8]) -> Self {
        let guest = Rc::new(TestGuest::boot_whole(elf));
        let registry = Registry::new(guest.image.clone(), VCPUS, whole_hidden());
        Self {
            guest,
            registry,
            clock: Rc::default(),
        }
    }

    /// Creates a guest whose kernel's text is final, with room for detours.
    fn optimizing() -> Self {
        let mut rig = Self::booting_with_room();
        rig.go_live(None);
        rig
    }

    /// As [`Rig::optimizing`], where the #BP entry must be patched to catch int3s.
    fn optimizing_with_gate() -> Self {
        let mut rig = Self::booting_with_room();
        let head = rig.gate();
        rig.go_live(Some(head));
        rig
    }

    /// Creates a guest whose kernel's text is final.
    fn live() -> Self {
        let mut rig = Self::booting();
        rig.go_live(None);
        rig
    }

    /// As [`Rig::live`], where the #BP entry must be patched to catch int3s.
    fn with_gate() -> Self {
        let mut rig = Self::booting();
        let head = rig.gate();
        rig.go_live(Some(head));
        rig
    }

    fn gate(&self) -> GateHead {
        let at = self.guest.image.idt_bp_entry().expect("in the fixture");
        GateHead::analyse(&self.guest.read::<16>(at), at).expect("nops")
    }

    fn go_live(&mut self, gate: Option<GateHead>) -> Vec<(ProbeId, Refused)> {
        let view = self.guest.view();
        self.registry
            .go_live(view, gate, &*self.guest)
            .expect("the guest stops")
    }

    fn try_register(&mut self, specs: &[ProbeSpec]) -> Result<Vec<ProbeId>, RegisterError> {
        self.registry.register(specs, &*self.guest)
    }

    fn register(&mut self, specs: &[ProbeSpec]) -> Vec<ProbeId> {
        self.try_register(specs).expect("legal probes")
    }

    fn one(&mut self, definition: &str) -> ProbeId {
        self.register(&[spec(definition)])[0]
    }

    fn unregister(&mut self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        self.registry.unregister(ids, &*self.guest)
    }

    fn enable(&mut self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        self.registry.set_enabled(ids, true, &*self.guest)
    }

    fn disable(&mut self, ids: &[ProbeId]) -> Result<(), ChangeError> {
        self.registry.set_enabled(ids, false, &*self.guest)
    }

    fn list(&self) -> Vec<ProbeInfo> {
        self.registry.list(&self.guest.mem)
    }

    fn info(&self, id: ProbeId) -> ProbeInfo {
        let found = self.list().into_iter().find(|info| info.id == id);
        found.expect("registered")
    }

    fn counts(&self, id: ProbeId) -> Counts {
        self.info(id).counts
    }

    fn mechanism(&self, id: ProbeId) -> Mechanism {
        self.info(id).mechanism.expect("placed")
    }

    fn state(&self, id: ProbeId) -> ProbeState {
        self.info(id).state
    }

    fn addr(&self, id: ProbeId) -> Gva {
        self.info(id).addr.expect("placed")
    }

    fn byte(&self, at: Gva) -> u8 {
        self.guest.read::<1>(at)[0]
    }

    /// Returns the address at `offset` in `symbol`.
    fn at(&self, symbol: &str, offset: u64) -> Gva {
        let start = self.guest.image.symbols().address_of(symbol);
        start.expect("in the fixture").wrapping_add(offset)
    }

    /// Calls `Registry::retry` until a retry is due, and returns it.
    fn next_retry(&mut self) -> crate::registry::Retry {
        let mut seconds = 0..200;
        let next = seconds.find_map(|_| self.registry.retry());
        next.expect("something to look for within minutes")
    }

    /// Returns the number of stops of the virtual CPUs during `act`.
    fn stops_of<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> u64 {
        let before = self.guest.stops();
        act(self);
        self.guest.stops() - before
    }

    /// Returns the address and the value of the page-table entry of the hidden region.
    fn entry(&self) -> (Gpa, u64) {
        let start = hvprobe_hit::region::KERNEL_WINDOW.start;
        let tables = self.guest.view().tables;
        tables
            .entry_at(&self.guest.mem, start, 2)
            .expect("in memory")
    }

    /// Returns whether the hidden region is mapped.
    fn is_mapped(&self) -> bool {
        self.entry().1 != 0
    }

    /// Returns the memory that the guest sees, without the hidden region and its page-table entry: these stay once
    /// there are slots or frames to which a task may return.
    fn visible(&self) -> Vec<u8> {
        let mut bytes = self.guest.mem.visible();
        let entry = usize::try_from(self.entry().0.0).expect("small");
        bytes[entry..entry + 8].fill(0);
        bytes
    }

    /// Runs `act`, which must not change the guest's memory.
    fn changes_nothing_in_memory<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.guest.mem.visible();
        let result = act(self);
        assert!(self.guest.mem.visible() == before, "memory has changed");
        result
    }

    /// Runs `act`, which must change neither the guest's memory nor the list.
    fn changes_nothing<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.list();
        let result = self.changes_nothing_in_memory(act);
        assert_eq!(self.list(), before);
        result
    }
}

/// Returns the state of a virtual CPU at `rip` with the stack pointer `rsp`.
fn standing(rip: Gva, rsp: Gva) -> Standing {
    let regs = Regs {
        rip: rip.0,
        rsp: rsp.0,
        ..Regs::default()
    };
    Standing {
        regs,
        ..Standing::default()
    }
}

/// Returns the index of the refused probe of a batch, and the reason.
fn refusal(result: Result<Vec<ProbeId>, RegisterError>) -> (usize, Refused) {
    match result {
        Err(RegisterError::Refused { index, source, .. }) => (index, source),
        other => panic!("expected a refusal, got {other:?}"),
    }
}
