//! Faults of displaced instructions: of copies that run without exits, and for probes that ask for faults.

use hvprobe_fixtures::{DATA_VIRT, STACK};
use hvprobe_hit::event::EventKind;

use super::*;

/// Address of the registers of a fault in the guest's kernel.
const PT_REGS: Gva = Gva(DATA_VIRT.0 + 0x900);
/// Address of RIP in these registers.
const IP: Gva = Gva(PT_REGS.0 + 128);
const PAGE_FAULT: u8 = 14;

/// Lets the guest's kernel search its exception table after a fault at `rip`. Returns the address for which it
/// searches.
fn faults(rig: &Rig, rip: Gva) -> Gva {
    rig.guest.write(IP, &rip.0.to_le_bytes());
    let mut cpu = Cpu::new(rig);
    (cpu.regs.rdi, cpu.regs.rsp) = (PT_REGS.0, STACK.0);
    assert_eq!(cpu.hit(rig.at("fixup_exception", 0)), RESUME);
    assert!(cpu.events().is_empty());
    Gva(u64::from_le_bytes(rig.guest.read(IP)))
}

/// Returns the address of the copy of the instruction at `at`.
fn copy(rig: &Rig, at: Gva) -> Gva {
    Cpu::new(rig).enter_slot(at)
}

#[test]
fn fault_of_a_boosted_copy_is_found_at_the_probepoint_and_counted() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs([BOOSTED, BOOSTED]));
    let at = rig.addr(ids[0]);
    assert_eq!(rig.mechanism(ids[0]), Mechanism::Boosted);
    let slot = copy(&rig, at);
    assert_ne!(slot, at);
    assert_eq!(faults(&rig, slot), at);
    for id in &ids {
        assert_eq!((rig.counts(*id).hits, rig.counts(*id).faults), (1, 1));
    }
    // Addresses in the jump at the end of the copy, and everywhere else, are not ours.
    assert_eq!(faults(&rig, slot.wrapping_add(4)), at.wrapping_add(4));
    for elsewhere in [slot.wrapping_add(1), at, Gva(0), STACK] {
        assert_eq!(faults(&rig, elsewhere), elsewhere);
    }
    assert_eq!(rig.counts(ids[0]).faults, 1);
}

#[test]
fn fault_of_a_copy_in_a_detour_is_found_where_its_instruction_is() {
    let mut rig = Rig::optimizing();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    assert_eq!(rig.mechanism(id), Mechanism::Optimized);
    let table = rig.guest.table();
    let detour = table.at(at).expect("armed").1.detour.clone();
    let detour = detour.expect("a detour");
    assert_eq!(faults(&rig, detour.tail()), at);
    assert_eq!(rig.counts(id).faults, 1);
    // The second displaced instruction is not the probepoint.
    let second = at.wrapping_add(4);
    assert_eq!(
        faults(&rig, detour.resume(second).expect("displaced")),
        second
    );
    assert_eq!(rig.counts(id).faults, 1);
    assert_eq!(faults(&rig, detour.at()), detour.at());
}

#[test]
fn fault_that_the_kernel_complains_of_at_once_is_found_in_its_place_and_counted_once() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let at = rig.addr(id);
    let slot = copy(&rig, at);
    let complains = |rig: &Rig| {
        let mut cpu = Cpu::new(rig);
        (cpu.regs.rdi, cpu.regs.rsp) = (PT_REGS.0, STACK.0);
        assert_eq!(cpu.hit(rig.at("page_fault_oops", 0)), RESUME);
        u64::from_le_bytes(rig.guest.read(IP))
    };
    rig.guest.write(IP, &slot.0.to_le_bytes());
    assert_eq!(complains(&rig), at.0);
    assert_eq!(rig.counts(id).faults, 1);
    // The kernel searches the exception table first.
    assert_eq!(faults(&rig, slot), at);
    assert_eq!(complains(&rig), at.0);
    assert_eq!(rig.counts(id).faults, 2);
}

#[test]
fn registers_that_cannot_be_read_are_left_alone() {
    let mut rig = Rig::live();
    let id = rig.one(BOOSTED);
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rdi = 0xdead_0000_0000;
    assert_eq!(cpu.hit(rig.at("fixup_exception", 0)), RESUME);
    assert_eq!(rig.counts(id).faults, 0);
}

#[test]
fn the_guests_faults_are_watched_only_while_a_copy_may_fault() {
    let mut rig = Rig::live();
    let watch = rig.at("fixup_exception", 0);
    rig.one(EMULATED);
    assert_ne!(rig.byte(watch), INT3);
    let id = rig.one(BOOSTED);
    assert_eq!(rig.byte(watch), INT3);
    rig.unregister(&[id]).unwrap();
    assert_ne!(rig.byte(watch), INT3);
    // A jump over one nop cannot fault.
    let mut rig = Rig::optimizing();
    let id = rig.one("p vfs_read");
    assert_eq!(rig.mechanism(id), Mechanism::Optimized);
    assert_ne!(rig.byte(watch), INT3);
}

#[test]
fn a_probe_that_asks_for_faults_gets_those_of_an_instruction_that_would_be_boosted() {
    let mut rig = Rig::live();
    let actions = Actions {
        faults: true,
        ..Actions::default()
    };
    let id = rig.register(&[acting(BOOSTED, actions)])[0];
    let at = rig.addr(id);
    assert_eq!(rig.mechanism(id), Mechanism::Stepped);
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rsp = STACK.0;
    let slot = cpu.enter_slot(at);
    assert_eq!(cpu.raise(PAGE_FAULT, Some(2), slot), Some(RESUME));
    // The frame for the guest's handler contains the address of the probepoint.
    let frame = Gva(cpu.regs.rsp).wrapping_add(8);
    assert_eq!(u64::from_le_bytes(rig.guest.read(frame)), at.0);
    let events = cpu.events();
    let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
    let (vector, error_code) = (PAGE_FAULT, Some(2));
    assert_eq!(
        kinds,
        [EventKind::Hit, EventKind::Fault { vector, error_code }]
    );
    assert_eq!((rig.counts(id).hits, rig.counts(id).faults), (1, 1));
    // A second probe that does not ask for faults is stepped too, until the first is disabled.
    let other = rig.one(BOOSTED);
    assert_eq!(rig.mechanism(other), Mechanism::Stepped);
    rig.disable(&[id]).unwrap();
    assert_eq!(rig.mechanism(other), Mechanism::Boosted);
}
