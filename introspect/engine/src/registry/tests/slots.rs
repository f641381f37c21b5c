//! Memory and patches besides the int3s, present only while needed: slots, their mapping, the gate.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::trap::GATE_PORT;
use hvprobe_fixtures::{HIDDEN, Memory};

use super::*;
use crate::testing::{SLOTS, WHOLE_HIDDEN};

fn slot_bytes(mem: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; SLOTS * 32];
    mem.read(HIDDEN.wrapping_add(0x3000), &mut bytes).unwrap();
    bytes
}

/// Returns definitions of `count` stepped probes at different addresses.
fn stepped(count: usize) -> Vec<ProbeSpec> {
    (0..count)
        .map(|n| post(&format!("p filler_{:03}", 2 * n + 1)))
        .collect()
}

#[test]
fn slots_are_mapped_while_a_stepped_probe_has_one() {
    let mut rig = Rig::live();
    let emulated = rig.one(EMULATED);
    assert!(!rig.is_mapped());
    let ids = rig.register(&stepped(2));
    assert!(rig.is_mapped());
    rig.unregister(&ids[..1]).unwrap();
    assert!(rig.is_mapped());
    rig.unregister(&ids[1..]).unwrap();
    assert!(!rig.is_mapped());
    assert_eq!(rig.byte(rig.addr(emulated)), INT3);
}

#[test]
fn disabled_probe_keeps_its_slot_for_those_who_may_still_be_in_it() {
    let mut rig = Rig::live();
    let id = rig.register(&stepped(1))[0];
    let planted = slot_bytes(&rig.guest.mem);
    rig.disable(&[id]).unwrap();
    assert!(rig.is_mapped());
    assert_eq!(slot_bytes(&rig.guest.mem), planted);
    rig.enable(&[id]).unwrap();
    assert_eq!(slot_bytes(&rig.guest.mem), planted);
}

#[test]
fn slot_given_back_is_filled_with_int3() {
    let mut rig = Rig::live();
    let ids = rig.register(&stepped(2));
    let filled = |rig: &Rig| {
        let bytes = slot_bytes(&rig.guest.mem);
        bytes.iter().filter(|byte| **byte != INT3).count()
    };
    assert_eq!(filled(&rig), 8);
    rig.unregister(&ids[..1]).unwrap();
    assert_eq!(filled(&rig), 4);
}

#[test]
fn batch_that_wants_more_slots_than_there_are_names_the_first_too_many() {
    let mut rig = Rig::with_gate();
    let batch = stepped(SLOTS + 1);
    let (index, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&batch)));
    assert_eq!(index, SLOTS);
    assert!(matches!(why, Refused::Slot { .. }), "{why}");
    assert!(slot_bytes(&rig.guest.mem).iter().all(|byte| *byte == INT3));
    let ids = rig.register(&batch[..SLOTS]);
    let (index, _) = refusal(rig.changes_nothing(|rig| rig.try_register(&batch[SLOTS..])));
    assert_eq!(index, 0);
    rig.unregister(&ids[5..6]).unwrap();
    rig.register(&batch[SLOTS..]);
}

#[test]
fn window_without_an_empty_entry_refuses_what_needs_a_slot() {
    let mut rig = Rig::live();
    let window = hvprobe_hit::region::KERNEL_WINDOW;
    let tables = rig.guest.view().tables;
    let mut at = window.start;
    while at < window.end {
        let (entry, _) = tables.entry_at(&rig.guest.mem, at, 2).unwrap();
        // Not present, but used by the kernel.
        rig.guest.mem.write(entry, &2_u64.to_le_bytes()).unwrap();
        at = at.wrapping_add(2 << 20);
    }
    let batch = specs([EMULATED, BOOSTED]);
    let (index, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&batch)));
    assert_eq!(index, 1);
    assert!(matches!(why, Refused::Slot { .. }), "{why}");
    rig.register(&batch[..1]);
}

#[test]
fn gate_is_planted_while_a_probe_is_armed() {
    let mut rig = Rig::with_gate();
    let gate = rig.gate().at();
    let (original, patch) = (rig.guest.read::<2>(gate), GateHead::patch(GATE_PORT));
    let idle = rig.register(&[disabled(EMULATED)])[0];
    assert_eq!(rig.guest.read(gate), original);
    let ids = rig.register(&specs([EMULATED, BOOSTED]));
    assert_eq!(rig.guest.read(gate), patch);
    rig.unregister(&ids[..1]).unwrap();
    assert_eq!(rig.guest.read(gate), patch);
    rig.disable(&ids[1..]).unwrap();
    assert_eq!(rig.guest.read(gate), original);
    rig.enable(&[idle]).unwrap();
    assert_eq!(rig.guest.read(gate), patch);
    rig.registry.unregister_all(&*rig.guest).unwrap();
    assert_eq!(rig.guest.read(gate), original);
}

#[test]
fn gate_the_guest_rewrote_is_left_alone_and_nothing_is_armed_without_it() {
    let mut rig = Rig::with_gate();
    let gate = rig.gate().at();
    let id = rig.one(EMULATED);
    rig.guest.write(gate, &[0xfc]);
    rig.unregister(&[id]).unwrap();
    assert_eq!(rig.guest.read(gate), [0xfc, GATE_PORT]);
    let (_, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&[spec(EMULATED)])));
    assert_eq!(why, Refused::TextChanged { at: gate });
}

/// Returns a kernel whose `filler_000` begins with `mov rax, gs:[rip+…]`, a load of the per-CPU variable at offset
/// 0x1a080.
fn per_cpu_kernel() -> Vec<u8> {
    let mut sections = probed::sections();
    let symbols = probed::vmlinux();
    let image = hvprobe_linux::image::KernelImage::parse(&symbols).unwrap();
    let address = |name| image.symbols().address_of(name).unwrap();
    let (at, text) = (address("filler_000"), address("_stext"));
    let displacement = u32::try_from(0x1a080_u64.wrapping_sub(at.0 + 8)).unwrap();
    let offset = usize::try_from(at.0 - text.0).unwrap();
    let code = &mut sections[0].data[offset..];
    code[..4].copy_from_slice(&[0x65, 0x48, 0x8b, 0x05]);
    code[4..8].copy_from_slice(&displacement.to_le_bytes());
    kernel::elf(&sections, &[])
}

#[test]
fn per_cpu_operand_gets_a_slot_from_which_it_is_reached() {
    let mut rig = Rig::boot_whole(&per_cpu_kernel());
    rig.go_live(None);
    for mechanism in [Mechanism::Boosted, Mechanism::Stepped] {
        let spec = |definition| ProbeSpec {
            mechanism: Some(mechanism),
            ..spec(definition)
        };
        let before = rig.guest.mem.snapshot();
        let ids = rig.register(&[spec("p filler_000"), spec("p filler_001")]);
        let after = rig.guest.mem.snapshot();
        assert_eq!(rig.info(ids[0]).mechanism, Some(mechanism));
        // The offset of each copy in the region.
        let region = usize::try_from(WHOLE_HIDDEN.0).unwrap();
        let place = |start: [u8; 3]| {
            let mut places = after[region..][..2 << 20].windows(3);
            places.position(|bytes| bytes == start).unwrap()
        };
        let (high, low) = (place([0x65, 0x48, 0x8b]), place([0x48, 0x8b, 0x47]));
        assert!(before[region + high] != 0x65);
        assert!(
            high > (2 << 20) - 0x1000 && low < 0x4000,
            "{high:#x} {low:#x}"
        );
        let displacement = u32::from_le_bytes(after[region + high + 4..][..4].try_into().unwrap());
        let end = hvprobe_hit::region::KERNEL_WINDOW.start.0 + high as u64 + 8;
        assert_eq!(end.wrapping_add(u64::from(displacement)), 0x1a080);
        rig.unregister(&ids).unwrap();
    }
}

#[test]
fn operand_that_no_slot_reaches_is_refused_in_words_of_its_own() {
    // All slots of this guest are at low addresses.
    let mut rig = Rig::boot(&per_cpu_kernel());
    rig.go_live(None);
    let boosted = ProbeSpec {
        mechanism: Some(Mechanism::Boosted),
        ..spec("p filler_000")
    };
    let (_, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&[boosted])));
    let Refused::Relocate { source, .. } = why else {
        panic!("{why}");
    };
    assert!(source.to_string().contains("beyond ±2 GiB of its slot"));
    assert!(!rig.is_mapped());
}
