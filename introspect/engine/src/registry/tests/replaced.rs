//! Another kernel replaces the first one.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_fixtures::modules::{self, Age};
use hvprobe_hit::Outcome;
use hvprobe_linux::modules::ModuleReader;
use hvprobe_spec::Decision;

use super::*;
use crate::registered::Refusals;
use crate::testing::regs;
use crate::world::StopError;

const KEXEC: &str = "machine_kexec";

/// Puts another kernel in the same place: its text is the image's, and its page tables have no hidden region.
fn another_kernel(rig: &Rig) {
    let stext = rig.at("_stext", 0);
    let len = rig.at("_etext", 0).offset_from(stext).expect("behind it");
    let len = usize::try_from(len).expect("small");
    let text = rig.guest.image.bytes_at(stext, len).expect("text");
    rig.guest.write(stext, text);
    let (entry, _) = rig.entry();
    rig.guest.mem.write(entry, &[0; 8 * 8]).expect("in memory");
}

/// Returns the state of a virtual CPU that runs text at another physical address than that of the known kernel.
fn elsewhere(rig: &Rig) -> Standing {
    Standing {
        text: Some(Gpa(0x3_0000)),
        ..standing(rig.at("filler_100", 0), Gva(0))
    }
}

fn assert_all_gone(rig: &Rig) {
    assert!(rig.registry.is_replaced());
    for probe in rig.list() {
        assert_eq!((probe.state, probe.addr), (ProbeState::Gone, None));
    }
}

/// Checks that no call of the registry changes memory, and that no address in `known` is a hit.
fn assert_left_alone(rig: &mut Rig, known: &[Gva]) {
    rig.changes_nothing_in_memory(|rig| {
        assert_all_gone(rig);
        let mut cpu = Cpu::new(rig);
        for at in known {
            cpu.regs = regs();
            assert_eq!(cpu.hit(*at), Outcome::Foreign);
        }
        assert!(cpu.events().is_empty());
        let ids: Vec<_> = rig.list().iter().map(|probe| probe.id).collect();
        assert_eq!(
            refusal(rig.try_register(&specs(["p filler_002", BOOSTED]))),
            (0, Refused::Replaced)
        );
        let skip = Refusals::Skip;
        let registered = rig
            .registry
            .register_batch(&specs([EMULATED, "p filler_*"]), skip, &*rig.guest)
            .unwrap();
        let skipped = registered.skipped.into_iter().map(|skipped| skipped.why);
        assert_eq!(
            skipped.collect::<Vec<_>>(),
            [const { Refused::Replaced }; 2]
        );
        assert_eq!(registered.probes, []);
        rig.disable(&ids).unwrap();
        let source = Refused::Replaced;
        let id = ids[0];
        assert_eq!(rig.enable(&ids), Err(ChangeError::Refused { id, source }));
        rig.registry.set_armed(false, &*rig.guest).unwrap();
        rig.registry.set_armed(true, &*rig.guest).unwrap();
        rig.registry.set_optimization(false, &*rig.guest).unwrap();
        rig.registry.set_optimization(true, &*rig.guest).unwrap();
        rig.registry.check_text(&*rig.guest);
        rig.registry.retry_jumps(&*rig.guest);
        rig.registry.modules_changed(None, &*rig.guest).unwrap();
        assert_all_gone(rig);
        rig.unregister(&ids).unwrap();
        assert!(rig.list().is_empty());
    });
}

/// Registers one probe of each kind and mechanism, and one that waits for its module.
fn all_kinds(rig: &mut Rig) -> Vec<ProbeId> {
    let mut all = specs([
        EMULATED,
        BOOSTED,
        "p vfs_read",
        "r filler_013",
        "r vfs_read",
        "p absent:anything",
    ]);
    all.push(post("p filler_011"));
    // Use a kernel whose modules can be read.
    rig.registry.kernel.module_reader = ModuleReader::new(
        &hvprobe_linux::image::KernelImage::parse(&modules::image(
            modules::types(Age::V64).bytes(),
        ))
        .unwrap(),
    );
    rig.register(&all)
}

#[test]
fn the_way_to_another_kernel_is_watched_while_a_probe_is_planted() {
    let mut rig = Rig::live();
    let at = rig.at(KEXEC, 0);
    let before = rig.visible();
    let id = rig.register(&[disabled(EMULATED)])[0];
    assert_ne!(rig.byte(at), INT3);
    rig.enable(&[id]).unwrap();
    assert_eq!(rig.byte(at), INT3);
    rig.unregister(&[id]).unwrap();
    assert!(rig.visible() == before);
}

#[test]
fn the_way_to_another_kernel_is_watched_where_ftrace_patches_nothing() {
    let mut sections = probed::sections();
    let calls = sections
        .iter_mut()
        .find(|section| section.name == ".data")
        .expect("there is data");
    let site = (kernel::TEXT + 0x660).to_le_bytes();
    let places = calls.data.windows(8).position(|bytes| bytes == site);
    let kexec = Rig::booting().at(KEXEC, 0);
    const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
    let place = places.expect("a site of ftrace");
    calls.data[place..place + 8].copy_from_slice(&kexec.0.to_le_bytes());
    let text = usize::try_from(kexec.0 - kernel::TEXT).expect("in the text");
    sections[0].data[text..text + NOP.len()].copy_from_slice(&NOP);
    let mut rig = Rig::boot(&kernel::elf(&sections, &[]));
    rig.go_live(None);
    rig.one(EMULATED);
    assert_eq!(rig.guest.read(kexec), NOP);
    assert_eq!(rig.byte(kexec.wrapping_add(5)), INT3);
    let ftrace = rig.at("ftrace_arch_code_modify_prepare", 0);
    assert_ne!(rig.byte(ftrace), INT3);
}

#[test]
fn a_kernel_that_makes_way_for_another_is_left_as_it_was() {
    for mut rig in [
        Rig::live(),
        Rig::with_gate(),
        Rig::optimizing(),
        Rig::optimizing_with_gate(),
    ] {
        let before = rig.visible();
        let ids = all_kinds(&mut rig);
        let known: Vec<Gva> = rig.list().iter().filter_map(|probe| probe.addr).collect();
        let at = rig.at(KEXEC, 0);
        let mut cpu = Cpu::new(&rig);
        // A call is in flight.
        assert_eq!(cpu.hit(rig.addr(ids[3])), RESUME);
        cpu.regs = regs();
        run_hooks(&mut rig, cpu.hit(at));
        assert_eq!(cpu.resume(&Decision::default()), RESUME);
        assert_eq!(
            cpu.regs,
            Regs {
                rip: at.0,
                ..regs()
            }
        );
        drop(cpu);
        assert!(rig.guest.collected.get() > 0);
        let mut visible = rig.visible();
        // The detours stay mapped in the remains of the first kernel.
        let entries = usize::try_from(rig.entry().0.0).expect("small");
        visible[entries..entries + 8 * 8].copy_from_slice(&before[entries..entries + 8 * 8]);
        let differs = visible
            .iter()
            .zip(&before)
            .position(|(now, then)| now != then);
        assert_eq!(differs, None);
        another_kernel(&rig);
        assert_left_alone(&mut rig, &known);
    }
}

#[test]
fn a_kernel_that_cannot_be_stopped_on_its_way_keeps_its_probes() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    rig.guest.refuse_stops(true);
    let result = rig.changes_nothing(|rig| rig.registry.kernel_leaves(&*rig.guest));
    assert!(matches!(result, Err(StopError::Unresponsive { .. })));
    rig.guest.refuse_stops(false);
    rig.unregister(&[id]).unwrap();
    rig.one(BOOSTED);
    assert_eq!(rig.byte(rig.at(KEXEC, 0)), INT3);
}

/// A call into the registry while another kernel runs, of which the registry does not know yet.
type Act = fn(&mut Rig, ProbeId);

const ACTS: &[Act] = &[
    |rig, id| rig.disable(&[id]).unwrap(),
    |rig, _| {
        let result = rig.try_register(&specs([EMULATED, "p filler_040"]));
        assert_eq!(refusal(result), (0, Refused::Replaced));
    },
    |rig, _| {
        let specs = specs(["p filler_040"]);
        let skip = Refusals::Skip;
        let result = rig.registry.register_batch(&specs, skip, &*rig.guest);
        let registered = result.expect("nothing else speaks against it");
        assert_eq!(registered.skipped.len(), 1);
        assert_eq!(registered.skipped[0].why, Refused::Replaced);
    },
    |rig, _| rig.registry.set_armed(false, &*rig.guest).unwrap(),
    |rig, _| rig.registry.set_optimization(false, &*rig.guest).unwrap(),
    |rig, _| {
        rig.registry.modules_changed(None, &*rig.guest).unwrap();
        rig.registry.set_armed(false, &*rig.guest).unwrap();
    },
    |rig, _| rig.registry.ftrace_patches(true, &*rig.guest).unwrap(),
];

#[test]
fn a_kernel_elsewhere_is_found_out_in_the_next_stop_and_not_written_to() {
    for act in ACTS {
        for mut rig in [Rig::live(), Rig::with_gate(), Rig::optimizing()] {
            let ids = all_kinds(&mut rig);
            let known: Vec<Gva> = rig.list().iter().filter_map(|probe| probe.addr).collect();
            let there = elsewhere(&rig);
            rig.guest.stand(&[Standing::default(), there]);
            rig.changes_nothing_in_memory(|rig| act(rig, ids[0]));
            assert_left_alone(&mut rig, &known);
        }
    }
}

#[test]
fn a_kernel_in_the_place_of_the_first_is_found_out_and_not_written_to() {
    for act in ACTS {
        for mut rig in [Rig::live(), Rig::with_gate(), Rig::optimizing()] {
            let ids = all_kinds(&mut rig);
            let known: Vec<Gva> = rig.list().iter().filter_map(|probe| probe.addr).collect();
            another_kernel(&rig);
            rig.changes_nothing_in_memory(|rig| act(rig, ids[0]));
            assert_left_alone(&mut rig, &known);
        }
    }
}

#[test]
fn watching_finds_out_that_the_kernel_is_another() {
    let mut rig = Rig::live();
    all_kinds(&mut rig);
    rig.registry.check_text(&*rig.guest);
    assert!(!rig.registry.is_replaced());
    another_kernel(&rig);
    rig.changes_nothing_in_memory(|rig| rig.registry.check_text(&*rig.guest));
    assert_all_gone(&rig);
}

#[test]
fn a_kernel_that_came_while_nothing_was_planted_is_found_out_when_something_is_to_be() {
    for mut rig in [Rig::live(), Rig::with_gate(), Rig::optimizing()] {
        let there = elsewhere(&rig);
        rig.guest.stand(&[there]);
        let result = rig.changes_nothing_in_memory(|rig| {
            rig.try_register(&specs([EMULATED, "p vfs_read", "r filler_013"]))
        });
        assert_eq!(refusal(result), (0, Refused::Replaced));
        assert!(rig.list().is_empty());
    }
}

#[test]
fn a_kernel_whose_memory_is_used_otherwise_is_named_as_the_reason_whatever_is_found_there() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    rig.unregister(&[id]).unwrap();
    rig.guest.write(rig.at("_stext", 0), &[0x06; 0x4000]);
    rig.guest.write(Gva(kernel::BANNER), b"something else");
    let stops = rig.guest.stops();
    let result = rig.try_register(&[spec(BOOSTED)]);
    assert_eq!(refusal(result), (0, Refused::Replaced));
    assert_eq!(rig.guest.stops(), stops + 1);
}

#[test]
fn text_of_the_kernel_we_know_is_no_other_kernels() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    let mapping = rig.guest.view().tables.translate(&rig.guest.mem, at);
    let here = Standing {
        text: Some(mapping.expect("mapped").gpa),
        ..standing(at, Gva(0))
    };
    rig.guest.stand(&[here, Standing::default()]);
    rig.disable(&[id]).unwrap();
    rig.enable(&[id]).unwrap();
    // The guest may rewrite one of its functions.
    rig.guest.write(at, &[0x90]);
    rig.registry.check_text(&*rig.guest);
    assert!(!rig.registry.is_replaced());
    assert_eq!(rig.state(id), ProbeState::Gone);
}
