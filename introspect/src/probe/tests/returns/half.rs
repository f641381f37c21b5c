//! Return probes that exit at the entry, and whose calls return without an exit.

use std::sync::Arc;

use hvprobe_arch::detour::{Instance, STUB, StackWords};

use super::*;
use crate::hidden::follow::Followed;
use crate::ring::Source;

/// With an int3 whatever its instructions allow.
fn trapped(definition: &str) -> ProbeSpec {
    ProbeSpec {
        mechanism: Some(Mechanism::Emulated),
        ..spec(definition)
    }
}

/// A return that reads memory, which only an exit can do.
pub(super) fn reading(definition: &str) -> ProbeSpec {
    let item = Item::Memory {
        base: Gpr::Rsp,
        offset: 0,
        len: 8,
    };
    let actions = Actions {
        capture_at_return: vec![item],
        ..Actions::default()
    };
    acting(definition, actions)
}

fn source(rig: &Rig, id: ProbeId) -> Arc<Source> {
    rig.registry.sources.get(id).expect("followed")
}

fn calls(source: &Source) -> &Followed {
    source.followed().expect("a return probe")
}

/// What is kept of the call that returns to `stub`.
fn instance(rig: &Rig, calls: &Followed, stub: Gva) -> Instance {
    let index = stub.offset_from(calls.stubs).expect("a stub") / u64::from(STUB);
    let stride = calls.layout.stride() as u64;
    let at = calls.instances.at.wrapping_add(index * stride);
    let bytes: [u8; 256] = rig.guest.read(at);
    calls.layout.read(&bytes).expect("an instance")
}

#[test]
fn an_entry_that_exits_leaves_what_a_detour_would() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&[
        trapped("r3:outer filler_000"),
        post("p filler_000"),
        spec("r2 filler_000"),
    ]);
    let (outer, inner) = (source(&rig, ids[0]), source(&rig, ids[2]));
    let mut cpu = Cpu::new(&rig);
    let entry = rig.addr(ids[0]);
    assert_eq!(rig.byte(entry), INT3);
    for n in 0..4 {
        cpu.call(&rig, entry, frame(n), caller(&rig, n));
        let (first, second) = (rig.word(frame(n)), caller(&rig, n));
        let mut to = first;
        // The innermost registration comes first; who has no instance left is missed.
        if n < 2 {
            let kept = instance(&rig, calls(&inner), to);
            assert_eq!((kept.generation, kept.slot), (1, frame(n)));
            to = kept.return_address;
        }
        if n < 3 {
            let kept = instance(&rig, calls(&outer), to);
            let expected = Instance {
                generation: 1,
                return_address: second,
                slot: frame(n),
                task: DATA_VIRT.wrapping_add(0x100),
                tsc: kept.tsc,
                regs: kept.regs,
                stack: StackWords::default(),
            };
            assert_eq!(kept, expected);
            assert!(kept.tsc > 1000);
            assert_eq!(
                (kept.regs.rdi, kept.regs.rflags),
                (regs().rdi, regs().rflags)
            );
            to = kept.return_address;
        }
        assert_eq!(to, second);
    }
    let missed = ids.iter().map(|id| rig.counts(*id).missed);
    assert_eq!(missed.collect::<Vec<_>>(), [1, 0, 2]);
    assert!(cpu.events().iter().all(|event| event.probe == ids[1]));
    // They go home by themselves when their probes leave.
    rig.unregister(&ids).unwrap();
    for n in 0..4 {
        assert_eq!(rig.word(frame(n)), caller(&rig, n));
    }
}

#[test]
fn all_return_probes_of_a_place_take_the_trampoline_or_none() {
    let mut rig = Rig::optimizing();
    let followed = rig.register(&[trapped(FUNCTION)])[0];
    let entry = rig.addr(followed);
    let mut cpu = Cpu::new(&rig);
    let is_taken = |rig: &Rig, cpu: &mut Cpu| {
        cpu.call(rig, entry, STACK, caller(rig, 0));
        let taken = rig.is_taken(STACK);
        assert!(taken || calls(&source(rig, followed)).is_code(rig.word(STACK)));
        taken
    };
    assert!(!is_taken(&rig, &mut cpu));
    let reading = rig.register(&[reading(FUNCTION)])[0];
    assert!(is_taken(&rig, &mut cpu));
    rig.disable(&[reading]).unwrap();
    assert!(!is_taken(&rig, &mut cpu));
    rig.enable(&[reading]).unwrap();
    rig.unregister(&[reading]).unwrap();
    assert!(!is_taken(&rig, &mut cpu));
    rig.registry.set_optimization(false, &*rig.guest).unwrap();
    assert!(is_taken(&rig, &mut cpu));
    assert_eq!(cpu.ret(&rig, STACK, 1), caller(&rig, 0));
    rig.registry.set_optimization(true, &*rig.guest).unwrap();
    assert!(!is_taken(&rig, &mut cpu));
}

#[test]
fn a_guest_that_spoils_the_free_list_loses_calls_and_nothing_else() {
    let mut rig = Rig::optimizing();
    let id = rig.register(&[trapped(FUNCTION)])[0];
    let (entry, source) = (rig.addr(id), source(&rig, id));
    let mut cpu = Cpu::new(&rig);
    let count = u64::from(calls(&source).instances.count);
    for (missed, word) in [(1, u64::MAX), (2, count), (3, 1 << 31)] {
        rig.guest.write(source.words.free(), &word.to_le_bytes());
        cpu.call(&rig, entry, STACK, caller(&rig, 0));
        assert_eq!(rig.word(STACK), caller(&rig, 0));
        assert_eq!(rig.counts(id).missed, missed);
    }
}
