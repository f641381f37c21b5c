//! Probes of modules, which are loaded and unloaded.

mod arguments;
mod builds;

use hvprobe_arch::Gva;
use hvprobe_fixtures::dwarf::{BUILD_ID, note_of};
use hvprobe_fixtures::kernel::{NOTHING_FORBIDDEN, TEXT};
use hvprobe_fixtures::modules::{
    Age, EXTABLE, Guest as Modules, LOCKS, MODULES, RawSym, STATE, TYPES, types,
};
use hvprobe_spec::Decision;

use super::*;
use crate::testing::regs;
use crate::world::StopError;

const COMING: u32 = 1;
const GOING: u32 = 2;
const UNFORMED: u32 = 3;

const SYMBOLS: &[RawSym] = &[
    ("enter", 1, 0, 0x40),
    ("work", 1, 0x40, 0x40),
    ("__SCT__own", 1, 0x80, 8),
    ("init_module", 3, 0x2000, 0x10),
];
/// Function of each module: `push rbp; ret`.
const ENTER: [u8; 2] = [0x55, 0xc3];
/// Function of each module: `movzx eax, byte ptr [rdi+8]; ret`.
const WORK: [u8; 5] = [0x0f, 0xb6, 0x47, 0x08, 0xc3];

/// A guest whose kernel can load modules.
struct Loader {
    rig: Rig,
    modules: Modules,
}

/// A module that was loaded.
#[derive(Clone, Copy)]
struct Loaded {
    base: Gva,
    at: Gva,
}

impl Loader {
    fn booting() -> Self {
        Self::of_kernel(true)
    }

    /// Creates a guest whose kernel keeps the types of its modules, or does not.
    fn of_kernel(types_of_modules: bool) -> Self {
        let mut sections = probed::sections();
        for section in &mut sections {
            if section.name == ".BTF" {
                section.data = types(Age::V64).bytes();
            }
        }
        let filler = TEXT + 0xb00;
        let watched = filler + 0x2580;
        let symbols = [
            ("_stext", TEXT, 0, true),
            ("filler_000", filler, 0x10, true),
            ("do_init_module", watched + 0x20, 0x10, true),
            ("free_module", watched + 0x30, 0x10, true),
            ("_etext", TEXT + 0x4000, 0, true),
            ("modules", MODULES.0, 16, false),
            ("smp_alt_modules", LOCKS.0, 16, false),
        ];
        let of_types = [("btf_modules", TYPES.0, 16, false)];
        let of_types = if types_of_modules { &of_types[..] } else { &[] };
        let symbols = [&symbols[..], of_types, &NOTHING_FORBIDDEN].concat();
        let rig = Rig::boot(&kernel::elf(&sections, &symbols));
        let modules = Modules::within(Age::V64, rig.guest.mem.clone());
        Self { rig, modules }
    }

    fn live() -> Self {
        let mut loader = Self::booting();
        loader.rig.go_live(None);
        loader
    }

    fn load(&mut self, name: &str, state: u32) -> Loaded {
        let made = self
            .modules
            .add(name, state)
            .code(0, &[0x90; 0x100])
            .code(0, &ENTER)
            .code(0x40, &WORK)
            .symbols(SYMBOLS)
            .notes(&[vec![0; 24], note_of(BUILD_ID)])
            .relative(EXTABLE, 12, &[0x40]);
        Loaded {
            base: made.base,
            at: made.at,
        }
    }

    fn set_state(&self, module: Loaded, state: u32) {
        let at = module.at.wrapping_add(STATE.into());
        self.rig.guest.write(at, &state.to_le_bytes());
    }

    /// Reports a change of the modules to the registry; the text of `formed` is final.
    fn changed(&mut self, formed: Option<Loaded>) -> Vec<(ProbeId, Refused)> {
        let registry = &mut self.rig.registry;
        registry
            .modules_changed(formed.map(|module| module.at), &*self.rig.guest)
            .expect("the guest stops")
    }

    /// Returns whether the engine watches modules being loaded and unloaded.
    fn watches(&self) -> bool {
        let bytes =
            ["do_init_module", "free_module"].map(|name| self.rig.byte(self.rig.at(name, 0)));
        assert_eq!(bytes[0], bytes[1]);
        bytes[0] == INT3
    }

    /// Runs a virtual CPU into the kernel's function `name`, called with `module`. The virtual CPU is held there.
    fn held_at(&self, name: &str, module: Loaded) -> Cpu {
        let mut cpu = Cpu::new(&self.rig);
        let at = self.rig.at(name, 0);
        cpu.regs.rdi = module.at.0;
        assert_eq!(held_hooks(cpu.hit(at)).1, module.at);
        assert_eq!(cpu.regs.rip, at.0);
        assert_eq!(cpu.question(), None);
        cpu
    }
}

#[test]
fn probe_of_a_module_that_is_not_loaded_waits_and_is_planted_before_its_init_runs() {
    let mut loader = Loader::live();
    assert!(!loader.watches());
    let ids = loader
        .rig
        .register(&specs(["p m:enter", "p m:work", "p other:work"]));
    assert!(
        ids.iter()
            .all(|id| loader.rig.state(*id) == ProbeState::Pending)
    );
    assert!(loader.watches());

    let module = loader.load("m", COMING);
    // The module's text is not final yet when another module changes.
    assert_eq!(loader.changed(None), []);
    assert_eq!(loader.rig.state(ids[0]), ProbeState::Pending);
    let mut cpu = loader.held_at("do_init_module", module);
    assert_eq!(loader.changed(Some(module)), []);
    let mechanisms = [Mechanism::Emulated, Mechanism::Stepped];
    for ((id, offset), mechanism) in ids.iter().zip([0, 0x40]).zip(mechanisms) {
        let at = module.base.wrapping_add(offset);
        assert_eq!(loader.rig.addr(*id), at);
        assert_eq!(loader.rig.byte(at), INT3);
        assert_eq!(loader.rig.mechanism(*id), mechanism);
    }
    assert_eq!(loader.rig.state(ids[2]), ProbeState::Pending);
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    let after = loader.rig.at("do_init_module", 1);
    assert_eq!(cpu.regs.rip, after.0);
    assert_eq!(cpu.hit(module.base), RESUME);
    assert_eq!(loader.rig.counts(ids[0]).hits, 1);
    assert_eq!(cpu.events().len(), 1);
}

#[test]
fn probe_of_a_module_that_leaves_is_gone_and_its_text_as_it_was() {
    let mut loader = Loader::live();
    let module = loader.load("m", 0);
    let ids = loader
        .rig
        .register(&specs(["p m:enter", "p m:work", "p filler_000"]));
    assert!(loader.watches());
    let mut cpu = loader.held_at("free_module", module);
    loader.set_state(module, GOING);
    assert_eq!(loader.changed(None), []);
    for id in &ids[..2] {
        let info = loader.rig.info(*id);
        assert_eq!((info.state, info.addr), (ProbeState::Gone, None));
    }
    assert_eq!(loader.rig.guest.read(module.base), ENTER);
    assert_eq!(loader.rig.guest.read(module.base.wrapping_add(0x40)), WORK);
    assert_eq!(loader.rig.state(ids[2]), ProbeState::Placed);
    // Nothing is watched any more: the instruction at which the virtual CPU waits is restored.
    assert!(!loader.watches());
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(cpu.regs.rip, loader.rig.at("free_module", 0).0);
    // A gone probe stays gone, even if its module is loaded again, and can be unregistered.
    loader.set_state(module, 0);
    assert_eq!(loader.changed(None), []);
    assert_eq!(loader.rig.state(ids[0]), ProbeState::Gone);
    loader.rig.disable(&ids).unwrap();
    loader.rig.enable(&ids).unwrap();
    assert_eq!(loader.rig.byte(module.base), 0x55);
    let again = loader.rig.one("p m:enter");
    assert_eq!(loader.rig.byte(module.base), INT3);
    loader
        .rig
        .unregister(&[ids[0], ids[1], ids[2], again])
        .unwrap();
    assert_eq!(loader.rig.byte(module.base), 0x55);
    assert!(!loader.watches());
}

#[test]
fn module_that_is_no_longer_there_takes_its_probes_along() {
    let mut loader = Loader::live();
    loader.load("m", 0);
    let id = loader.rig.one("p m:enter");
    let head = MODULES.0.to_le_bytes();
    loader.rig.guest.write(MODULES, &head);
    assert_eq!(loader.changed(None), []);
    assert_eq!(loader.rig.state(id), ProbeState::Gone);
}

#[test]
fn module_that_is_leaving_or_not_ready_counts_as_not_loaded() {
    for state in [GOING, UNFORMED] {
        let mut loader = Loader::live();
        let module = loader.load("m", state);
        let id = loader.rig.one("p m:enter");
        assert_eq!(loader.rig.state(id), ProbeState::Pending);
        assert_eq!(loader.rig.byte(module.base), 0x55);
        loader.set_state(module, COMING);
        assert_eq!(loader.changed(Some(module)), []);
        assert_eq!(loader.rig.byte(module.base), INT3);
    }
}

#[test]
fn pending_probe_that_the_module_has_no_place_for_is_refused_when_it_comes() {
    let mut loader = Loader::live();
    let ids = loader
        .rig
        .register(&specs(["p m:enter", "p m:nobody", "p m:init_module"]));
    let module = loader.load("m", COMING);
    let refused = loader.changed(Some(module));
    let at = module.base.wrapping_add(0x2000);
    assert_eq!(refused.len(), 2);
    assert_eq!(refused[0].0, ids[1]);
    assert!(matches!(&refused[0].1, Refused::ModuleSymbol(_)));
    assert_eq!(refused[1], (ids[2], Refused::InitText { at }));
    assert_eq!(loader.rig.byte(module.base), INT3);
    assert!(matches!(loader.rig.state(ids[1]), ProbeState::Refused(_)));
}

#[test]
fn modules_loaded_already_are_searched_as_the_kernel_is() {
    let mut loader = Loader::live();
    let module = loader.load("m", 0);
    let work = module.base.wrapping_add(0x40);
    for definition in ["p enter".to_owned(), format!("p {}", module.base)] {
        let id = loader.rig.one(&definition);
        assert_eq!(loader.rig.addr(id), module.base);
        let info = loader.rig.info(id);
        assert_eq!(info.symbol, Some(("enter".to_owned(), 0)));
    }
    let expected = [
        ("p m:work+1", "is inside the instruction"),
        ("p m:__SCT__own", "static call"),
        ("p nobody", "unknown symbol `nobody`"),
        (
            "r m:enter",
            "return probes need the layout of the guest's tasks",
        ),
    ];
    for (definition, expected) in expected {
        let result = loader
            .rig
            .changes_nothing(|rig| rig.try_register(&[spec(definition)]));
        let (_, why) = refusal(result);
        assert!(why.to_string().contains(expected), "{why}");
    }
    assert_eq!(loader.rig.byte(work), WORK[0]);
}

#[test]
fn probes_of_modules_wait_while_the_guest_boots() {
    let mut loader = Loader::booting();
    let id = loader.rig.one("p m:enter");
    assert_eq!(loader.rig.go_live(None), []);
    assert_eq!(loader.rig.state(id), ProbeState::Pending);
    assert!(loader.watches());
    loader.rig.unregister(&[id]).unwrap();
    assert!(!loader.watches());
}

#[test]
fn disabled_probe_of_a_module_is_placed_but_not_planted() {
    let mut loader = Loader::live();
    let id = loader.rig.register(&[disabled("p m:enter")])[0];
    let module = loader.load("m", COMING);
    loader.changed(Some(module));
    assert_eq!(loader.rig.state(id), ProbeState::Placed);
    assert_eq!(loader.rig.byte(module.base), 0x55);
    loader.rig.enable(&[id]).unwrap();
    assert_eq!(loader.rig.byte(module.base), INT3);
}

#[test]
fn user_may_probe_what_the_engine_watches() {
    let mut loader = Loader::live();
    let ids = loader
        .rig
        .register(&specs(["p m:enter", "p do_init_module"]));
    let module = loader.load("m", COMING);
    let mut cpu = loader.held_at("do_init_module", module);
    // The engine's hook comes first: no probe can keep the hit from it.
    assert_eq!(loader.rig.counts(ids[1]).hits, 0);
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(loader.rig.counts(ids[1]).hits, 1);
    loader.rig.unregister(&ids[..1]).unwrap();
    cpu.regs = regs();
    assert_eq!(cpu.hit(loader.rig.at("do_init_module", 0)), RESUME);
    assert_eq!(loader.rig.counts(ids[1]).hits, 2);
    assert_eq!(cpu.events().len(), 2);
}

#[test]
fn guest_that_does_not_stop_for_its_modules_is_reported_and_may_be_asked_again() {
    let mut loader = Loader::live();
    let id = loader.rig.one("p m:enter");
    let module = loader.load("m", COMING);
    loader.rig.guest.refuse_stops(true);
    let registry = &mut loader.rig.registry;
    let result = registry.modules_changed(Some(module.at), &*loader.rig.guest);
    assert!(matches!(result, Err(StopError::Unresponsive { .. })));
    assert_eq!(loader.rig.byte(module.base), 0x55);
    loader.rig.guest.refuse_stops(false);
    assert_eq!(loader.changed(None), []);
    assert_eq!(loader.rig.state(id), ProbeState::Placed);
    assert_eq!(loader.rig.byte(module.base), INT3);
}
