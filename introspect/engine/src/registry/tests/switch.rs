//! The global switch.

use super::*;
use crate::world::StopError;

impl Rig {
    fn switch(&mut self, on: bool) -> Result<(), ChangeError> {
        self.registry.set_armed(on, &*self.guest)
    }
}

#[test]
fn switch_takes_every_patch_out_and_puts_back_those_of_enabled_probes_in_one_stop() {
    let mut rig = Rig::with_gate();
    let original = rig.visible();
    let ids = rig.register(&[spec(EMULATED), disabled(BOOSTED), spec("p filler_003")]);
    let planted = rig.visible();
    assert!(rig.registry.is_armed());
    assert_eq!(rig.stops_of(|rig| rig.switch(false).unwrap()), 1);
    assert!(!rig.registry.is_armed());
    assert!(rig.visible() == original);
    for (id, off) in ids.iter().zip([false, true, false]) {
        assert_eq!(rig.info(*id).disabled, off);
        assert_eq!(rig.state(*id), ProbeState::Placed);
    }
    assert_eq!(rig.stops_of(|rig| rig.switch(true).unwrap()), 1);
    assert!(rig.visible() == planted);
}

#[test]
fn probes_change_behind_the_switch_and_show_when_it_is_on_again() {
    let mut rig = Rig::live();
    let original = rig.visible();
    let ids = rig.register(&[spec(EMULATED), disabled(BOOSTED)]);
    rig.switch(false).unwrap();
    rig.disable(&ids[..1]).unwrap();
    rig.enable(&ids[1..]).unwrap();
    let late = rig.one("p filler_003");
    rig.unregister(&[]).unwrap();
    assert!(rig.visible() == original);
    rig.switch(true).unwrap();
    let bytes = [ids[0], ids[1], late].map(|id| rig.byte(rig.addr(id)));
    assert_eq!(bytes, [0x55, INT3, INT3]);
    rig.switch(false).unwrap();
    rig.registry.unregister_all(&*rig.guest).unwrap();
    assert!(rig.visible() == original);
}

#[test]
fn virtual_cpu_on_its_way_when_the_switch_went_off_retries() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    let at = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    rig.switch(false).unwrap();
    assert_eq!(cpu.hit(at), RESUME);
    assert_eq!(cpu.regs.rip, at.0);
    assert_eq!(rig.counts(id), Counts::default());
}

#[test]
fn switch_that_fails_changes_nothing() {
    let mut rig = Rig::live();
    let id = rig.one(EMULATED);
    rig.guest.refuse_stops(true);
    let result = rig.changes_nothing(|rig| rig.switch(false));
    assert!(matches!(
        result,
        Err(ChangeError::Stop(StopError::Unresponsive { .. }))
    ));
    assert!(rig.registry.is_armed());
    rig.guest.refuse_stops(false);
    rig.switch(false).unwrap();
    let at = rig.addr(id);
    rig.guest.meanwhile(move |guest| guest.write(at, &[0x90]));
    let source = Refused::TextChanged { at };
    assert_eq!(rig.switch(true), Err(ChangeError::Refused { id, source }));
    assert!(!rig.registry.is_armed());
    assert_eq!(rig.byte(at), 0x90);
}

#[test]
fn guest_that_boots_with_the_switch_off_gets_no_patch() {
    let mut rig = Rig::booting();
    let id = rig.one(EMULATED);
    rig.switch(false).unwrap();
    let before = rig.guest.mem.visible();
    assert_eq!(rig.go_live(None), []);
    assert!(rig.guest.mem.visible() == before);
    assert_eq!(rig.state(id), ProbeState::Placed);
    rig.switch(true).unwrap();
    assert_eq!(rig.byte(rig.addr(id)), INT3);
}
