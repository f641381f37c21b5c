//! How instructions take effect, and the lifetime of their slots.

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{SLOT_SIZE, SlotKind};
use hvprobe_fixtures::STACK;

use super::*;
use crate::testing::SLOTS;

fn forced(mechanism: Mechanism, definition: &str) -> ProbeSpec {
    ProbeSpec {
        mechanism: Some(mechanism),
        ..spec(definition)
    }
}

/// Returns the slot of the armed site at `at`, and its kind.
fn slot(rig: &Rig, at: Gva) -> Option<(Gva, SlotKind)> {
    let table = rig.guest.table();
    let (_, site) = table.at(at).expect("armed");
    site.slot.map(|slot| (slot.at(), slot.kind()))
}

fn kind(rig: &Rig, at: Gva) -> Option<SlotKind> {
    slot(rig, at).map(|(_, kind)| kind)
}

/// Registers probes until there is no slot left; returns their number.
fn exhaust(rig: &mut Rig) -> usize {
    (0..300)
        .map(|n| format!("p filler_{:03}", 2 * n + 1))
        .take_while(|definition| rig.try_register(&[spec(definition)]).is_ok())
        .count()
}

#[test]
fn a_place_whose_probes_are_disabled_reports_how_it_would_take_effect_with_them() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&[spec("p filler_000"), post("p filler_002")]);
    let mechanisms = |rig: &Rig| [0, 1].map(|which: usize| rig.mechanism(ids[which]));
    let enabled = mechanisms(&rig);
    assert_eq!(enabled[0], Mechanism::Optimized);
    assert_ne!(enabled[1], Mechanism::Optimized);
    rig.disable(&ids).unwrap();
    assert_eq!(mechanisms(&rig), enabled);
    rig.enable(&ids[1..]).unwrap();
    assert_eq!(mechanisms(&rig), enabled);
}

#[test]
fn cheapest_mechanism_that_keeps_the_semantics_is_chosen() {
    use Mechanism::{Boosted, Emulated, Stepped};
    let mut rig = Rig::live();
    for (spec, expected) in [
        (spec(EMULATED), Emulated),
        (post(EMULATED), Emulated),
        (spec(BOOSTED), Boosted),
        (post(BOOSTED), Stepped),
        (spec("p sites+0x40"), Stepped),
        (forced(Emulated, EMULATED), Emulated),
        (forced(Emulated, BOOSTED), Boosted),
        (forced(Boosted, EMULATED), Boosted),
        (forced(Boosted, "p sites+0x40"), Stepped),
        (forced(Stepped, EMULATED), Stepped),
        (forced(Stepped, BOOSTED), Stepped),
        (spec("r filler_000"), Emulated),
        (spec("r filler_001"), Boosted),
        (disabled(BOOSTED), Boosted),
    ] {
        let id = rig.register(std::slice::from_ref(&spec))[0];
        assert_eq!(rig.mechanism(id), expected, "{spec:?}");
        if !spec.disabled {
            let kind = kind(&rig, rig.addr(id));
            let expected = match expected {
                Mechanism::Optimized | Emulated => None,
                Boosted => Some(SlotKind::Boosted),
                Stepped => Some(SlotKind::Trapped),
            };
            assert_eq!(kind, expected, "{spec:?}");
        }
        rig.unregister(&[id]).unwrap();
    }
}

#[test]
fn mechanism_an_instruction_cannot_have_is_refused() {
    let mut rig = Rig::live();
    for definition in ["p vfs_read+0x11", "p vfs_read+0x19", "p sites+0x46"] {
        for wanted in [Mechanism::Boosted, Mechanism::Stepped] {
            let spec = forced(wanted, definition);
            let result = rig.changes_nothing(|rig| rig.try_register(&[spec]));
            let (_, why) = refusal(result);
            let expected =
                matches!(&why, Refused::Mechanism { wanted: refused, .. } if *refused == wanted);
            assert!(expected, "{why}");
        }
        let id = rig.register(&[forced(Mechanism::Emulated, definition)])[0];
        assert_eq!(rig.mechanism(id), Mechanism::Emulated);
    }
}

#[test]
fn forced_copies_do_what_the_instruction_does() {
    let mut rig = Rig::live();
    let ids = rig.register(&[
        forced(Mechanism::Boosted, EMULATED),
        forced(Mechanism::Boosted, "p sites+0x44"),
    ]);
    let mut cpu = Cpu::new(&rig);
    let slot = cpu.enter_slot(rig.addr(ids[0]));
    assert_eq!(rig.guest.read(slot), [0x55, 0xe9]);
    // The copy is a near jump to the target of the short one.
    let slot = cpu.enter_slot(rig.addr(ids[1]));
    let [a, b, c, d, e, f, jmp] = rig.guest.read(slot);
    assert_eq!([a, b, jmp], [0x0f, 0x84, 0xe9]);
    let distance = i64::from(i32::from_le_bytes([c, d, e, f]));
    let target = slot.0.wrapping_add(6).wrapping_add_signed(distance);
    assert_eq!(Gva(target), rig.at("sites", 0x48));
}

#[test]
fn slot_changes_its_kind_as_post_handlers_come_and_go() {
    let mut rig = Rig::live();
    let boosted = rig.one(BOOSTED);
    let at = rig.addr(boosted);
    let (ghost, _) = slot(&rig, at).unwrap();
    let content = rig.guest.read::<SLOT_SIZE>(ghost);

    let stepped = rig.register(&[post(BOOSTED)])[0];
    let (trapped, kind) = slot(&rig, at).unwrap();
    assert_eq!(kind, SlotKind::Trapped);
    assert_ne!(trapped, ghost);
    assert_eq!(rig.mechanism(boosted), Mechanism::Stepped);
    // A task may have been interrupted in the slot.
    assert_eq!(rig.guest.read::<SLOT_SIZE>(ghost), content);

    for leave in [
        |rig: &mut Rig, id| rig.disable(&[id]),
        |rig: &mut Rig, id| rig.unregister(&[id]),
    ] {
        rig.enable(&[stepped]).unwrap();
        assert_eq!(slot(&rig, at).unwrap().1, SlotKind::Trapped);
        leave(&mut rig, stepped).unwrap();
        assert_eq!(slot(&rig, at), Some((ghost, SlotKind::Boosted)));
        assert_eq!(rig.guest.read::<SLOT_SIZE>(ghost), content);
        assert_eq!(rig.guest.read(trapped), [INT3; SLOT_SIZE]);
        assert_eq!(rig.mechanism(boosted), Mechanism::Boosted);
    }
    assert_eq!(rig.byte(at), INT3);
}

#[test]
fn change_of_kind_that_fails_leaves_the_slot_as_it_was() {
    let mut rig = Rig::live();
    assert_eq!(exhaust(&mut rig), SLOTS);
    let first = rig.list()[0].id;
    let at = rig.addr(first);
    let before = slot(&rig, at);
    let result = rig.changes_nothing(|rig| rig.try_register(&[post("p filler_001")]));
    assert!(matches!(refusal(result).1, Refused::Slot { .. }));
    assert_eq!(slot(&rig, at), before);
    // A stepped slot can be taken again.
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.enter_slot(at), before.unwrap().0);
}

#[test]
fn boosted_slot_stays_as_a_ghost_for_the_next_probe_on_the_same_instruction() {
    let mut rig = Rig::live();
    let mut first = None;
    // Far more often than there are slots.
    for _ in 0..2 * SLOTS {
        let id = rig.one(BOOSTED);
        let (at, kind) = slot(&rig, rig.addr(id)).unwrap();
        assert_eq!(kind, SlotKind::Boosted);
        assert_eq!(*first.get_or_insert(at), at);
        rig.unregister(&[id]).unwrap();
    }
    let ghost = first.unwrap();
    assert!(rig.is_mapped());
    assert_eq!(rig.guest.read(ghost), [0x48, 0x8b, 0x47, 0x08, 0xe9]);
    // No other probe gets the slot while there are others.
    let others = (1..SLOTS).map(|n| spec(&format!("p filler_{:03}", 2 * n + 1)));
    let others: Vec<_> = others.collect();
    for id in rig.register(&others) {
        assert_ne!(slot(&rig, rig.addr(id)).unwrap().0, ghost);
    }
    let id = rig.one(BOOSTED);
    assert_eq!(slot(&rig, rig.addr(id)).unwrap().0, ghost);
}

/// Returns a guest without a free slot, and a ghost of [`BOOSTED`] in it.
fn haunted() -> (Rig, Gva) {
    let mut rig = Rig::live();
    assert_eq!(exhaust(&mut rig), SLOTS);
    let first = rig.list()[0].id;
    let (ghost, _) = slot(&rig, rig.addr(first)).unwrap();
    rig.unregister(&[first]).unwrap();
    (rig, ghost)
}

#[test]
fn ghost_that_somebody_was_interrupted_in_is_never_reclaimed() {
    let newcomer = [spec("p filler_501")];
    let inside = |ghost: Gva| ghost.wrapping_add(4);
    // The address is in an exception frame, then in a virtual CPU's RIP.
    let (mut rig, ghost) = haunted();
    rig.guest
        .write(Gva(STACK.0 + 0x40), &inside(ghost).0.to_le_bytes());
    assert!(rig.try_register(&newcomer).is_err());
    assert_eq!(rig.guest.read(ghost), [0x48, 0x8b, 0x47, 0x08, 0xe9]);
    rig.guest.write(Gva(STACK.0 + 0x40), &[0; 8]);
    rig.guest.stand(&[standing(inside(ghost), STACK)]);
    assert!(rig.try_register(&newcomer).is_err());
    assert_eq!(rig.guest.read(ghost), [0x48, 0x8b, 0x47, 0x08, 0xe9]);
    // The address is nowhere any more.
    rig.guest.stand(&[]);
    let id = rig.register(&newcomer)[0];
    assert_eq!(slot(&rig, rig.addr(id)).unwrap().0, ghost);
}

#[test]
fn ghost_that_comes_back_to_life_is_not_reclaimed_for_another_in_the_same_batch() {
    let (mut rig, ghost) = haunted();
    let batch = specs([BOOSTED, "p filler_501"]);
    let (index, why) = refusal(rig.try_register(&batch));
    assert_eq!(index, 1);
    assert!(matches!(why, Refused::Slot { .. }), "{why}");
    let id = rig.one(BOOSTED);
    assert_eq!(slot(&rig, rig.addr(id)).unwrap().0, ghost);
    // With room for one slot, each gets its own.
    let last = rig.list().iter().rev().nth(1).unwrap().id;
    rig.unregister(&[id, last]).unwrap();
    let ids = rig.register(&batch);
    assert_eq!(slot(&rig, rig.addr(ids[0])).unwrap().0, ghost);
    assert_ne!(slot(&rig, rig.addr(ids[1])).unwrap().0, ghost);
}

#[test]
fn ghost_of_another_instruction_is_not_used() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    let (ghost, _) = slot(&rig, at).unwrap();
    rig.unregister(&[id]).unwrap();
    // The guest writes `mov rax, [rdi+0x10]` there, and later the original instruction.
    rig.guest.write(at.wrapping_add(3), &[0x10]);
    let id = rig.one(BOOSTED);
    let (other, _) = slot(&rig, at).unwrap();
    assert_ne!(other, ghost);
    assert_eq!(rig.guest.read(other), [0x48, 0x8b, 0x47, 0x10, 0xe9]);
    assert_eq!(rig.guest.read(ghost), [0x48, 0x8b, 0x47, 0x08, 0xe9]);
    rig.unregister(&[id]).unwrap();
    rig.guest.write(at.wrapping_add(3), &[0x08]);
    rig.one(BOOSTED);
    assert_eq!(slot(&rig, at).unwrap().0, ghost);
}

#[test]
fn batch_that_is_refused_gives_back_what_it_took_and_keeps_the_ghosts() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    let (ghost, _) = slot(&rig, at).unwrap();
    rig.unregister(&[id]).unwrap();
    let changed = rig.at("filler_005", 3);
    // Far more often than there are slots.
    for _ in 0..SLOTS {
        rig.guest
            .meanwhile(move |guest| guest.write(changed, &[0x10]));
        let batch = [spec(BOOSTED), spec("p filler_003"), post("p filler_005")];
        let (index, _) = refusal(rig.try_register(&batch));
        assert_eq!(index, 2);
        rig.guest.write(changed, &[0x08]);
    }
    assert_eq!(rig.guest.read(ghost), [0x48, 0x8b, 0x47, 0x08, 0xe9]);
    rig.one(BOOSTED);
    assert_eq!(slot(&rig, at).unwrap().0, ghost);
}

#[test]
fn trapped_slots_are_given_back_and_the_region_with_the_last() {
    let mut rig = Rig::live();
    let before = rig.guest.mem.visible();
    for n in 0..2 * SLOTS {
        let id = rig.register(&[post(&format!("p filler_{:03}", 2 * (n % 200) + 1))])[0];
        assert!(rig.is_mapped());
        rig.unregister(&[id]).unwrap();
    }
    assert!(rig.guest.mem.visible() == before);
}

#[test]
fn stepped_probes_need_a_descriptor_table_that_can_be_read() {
    let mut rig = Rig::booting();
    let mut view = rig.guest.view();
    view.idt = Gva(0x1000);
    rig.registry.go_live(view, None, &*rig.guest).unwrap();
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec("p sites+0x40")]));
    let at = rig.at("sites", 0x40);
    assert_eq!(refusal(result), (0, Refused::NoWindow { at }));
    rig.one(BOOSTED);
}

#[test]
fn gates_of_the_window_are_those_the_guest_has_when_a_probe_is_stepped() {
    let mut rig = Rig::live();
    let gate = rig.guest.view().idt.wrapping_add(14 * 16);
    // Interrupt stack table entry 5.
    rig.guest.write(gate.wrapping_add(4), &[5]);
    let id = rig.register(&[post(BOOSTED)])[0];
    let mut cpu = Cpu::new(&rig);
    cpu.enter_slot(rig.addr(id));
    let ours = cpu.handler.window().unwrap().wrapping_add(14 * 16);
    let bytes = rig.guest.read::<16>(ours);
    assert_eq!(&bytes[2..6], &[0x10, 0, 5, 0x8e]);
}
