//! Return probes with an exit at the entry, whose calls return without one.

use std::sync::Arc;

use hvprobe_arch::detour::{BY_HOST, Instance, STUB, StackWords};
use hvprobe_hit::Followed;
use hvprobe_hit::record::RecordSource;

use super::*;
use crate::world::Standing;

/// Returns a probe that gets an int3, even where a jump would be possible.
pub(super) fn trapped(definition: &str) -> ProbeSpec {
    ProbeSpec {
        mechanism: Some(Mechanism::Emulated),
        ..spec(definition)
    }
}

/// Returns a probe that reads memory at the return, which needs an exit.
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

fn source(rig: &Rig, id: ProbeId) -> Arc<RecordSource> {
    rig.registry.code.sources.get(id).expect("followed")
}

fn calls(source: &RecordSource) -> &Followed {
    source.followed().expect("a return probe")
}

/// Returns the instance of the call that returns to `stub`. Its generation is the use count since it was allocated.
fn instance(rig: &Rig, calls: &Followed, stub: Gva) -> Instance {
    let index = stub.offset_from(calls.stubs).expect("a stub") / u64::from(STUB);
    let stride = calls.layout.stride() as u64;
    let at = calls.instances.at.wrapping_add(index * stride);
    let bytes: [u8; 256] = rig.guest.read(at);
    let instance = calls.layout.read(&bytes).expect("an instance");
    Instance {
        generation: instance.generation % (1 << 24),
        ..instance
    }
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
        // The last registration comes first; a probe without an instance left misses the call.
        if n < 2 {
            let kept = instance(&rig, calls(&inner), to);
            assert_eq!(
                (kept.generation, kept.slot, kept.caller),
                (1, frame(n), second)
            );
            to = kept.return_address;
        }
        if n < 3 {
            let kept = instance(&rig, calls(&outer), to);
            let expected = Instance {
                caller: second,
                generation: 1,
                return_address: second,
                slot: frame(n),
                task: DATA_VIRT.wrapping_add(0x100),
                tsc: kept.tsc,
                cpu: Some(BY_HOST),
                regs: kept.regs,
                stack: StackWords::default(),
            };
            assert_eq!(kept, expected);
            // The time is the host's: the guest's counter is a thousand ahead.
            assert!((1..1000).contains(&kept.tsc));
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
    // The calls return directly when their probes leave.
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
        assert!(
            taken
                || calls(&source(rig, followed))
                    .return_address(rig.word(STACK), &rig.guest.mem)
                    .is_some()
        );
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

/// Returns the bytes of the stub at `at`.
fn stub(rig: &Rig, at: Gva) -> [u8; 16] {
    rig.guest.read(at)
}

/// Makes the registry release everything that no task can reach.
fn reclaim(rig: &mut Rig) {
    let crowd = rig.register(&[trapped("r4096 filler_004"), trapped("r4096 filler_006")]);
    rig.unregister(&crowd).unwrap();
    let one = rig.one("p filler_010");
    rig.unregister(&[one]).unwrap();
}

#[test]
fn code_that_another_probes_call_returns_through_is_not_given_away() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&[trapped("r4096:a filler_000"), trapped("r:b filler_000")]);
    let (outer, inner) = (source(&rig, ids[0]), source(&rig, ids[1]));
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(ids[0]), STACK, caller(&rig, 0));
    let top = rig.word(STACK);
    let below = calls(&inner).return_address(top, &rig.guest.mem).unwrap();
    assert!(
        calls(&outer)
            .return_address(below, &rig.guest.mem)
            .is_some()
    );
    // A task has read its return address, and was interrupted: a word of its stack holds the address.
    let saved = frame(8);
    rig.guest.write(saved, &below.0.to_le_bytes());
    let before = stub(&rig, below);
    rig.unregister(&ids[..1]).unwrap();
    reclaim(&mut rig);
    assert_eq!(stub(&rig, below), before);
    assert_eq!(
        calls(&outer).return_address(below, &rig.guest.mem),
        Some(caller(&rig, 0))
    );
    // The same for a virtual CPU with the address in a register.
    rig.guest.write(saved, &[0; 8]);
    let regs = Regs {
        rsi: below.0,
        ..Regs::default()
    };
    rig.guest.stand(&[Standing {
        regs,
        ..Standing::default()
    }]);
    reclaim(&mut rig);
    assert_eq!(stub(&rig, below), before);
    // The call itself no longer returns through the probe that has left.
    assert_eq!(
        calls(&inner).return_address(top, &rig.guest.mem),
        Some(caller(&rig, 0))
    );
    rig.guest.stand(&[]);
    reclaim(&mut rig);
    assert_eq!(stub(&rig, below), [INT3; 16]);
}

#[test]
fn code_that_a_call_with_an_exit_returns_through_is_not_given_away() {
    let mut rig = Rig::optimizing();
    let followed = rig.register(&[trapped("r4096 filler_000")])[0];
    let other = rig.register(&[reading("r filler_002")])[0];
    let source = source(&rig, followed);
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(followed), STACK, caller(&rig, 0));
    let below = rig.word(STACK);
    let before = stub(&rig, below);
    // The function ends with a tail call of another one.
    cpu.jump(rig.addr(other), STACK);
    assert!(rig.is_taken(STACK));
    rig.unregister(&[followed]).unwrap();
    reclaim(&mut rig);
    assert_eq!(stub(&rig, below), before);
    assert_eq!(cpu.ret(&rig, STACK, 0), below);
    let to = calls(&source).return_address(below, &rig.guest.mem);
    assert_eq!(to, Some(caller(&rig, 0)));
    reclaim(&mut rig);
    assert_eq!(stub(&rig, below), [INT3; 16]);
}

#[test]
fn calls_of_probes_that_leave_together_go_to_their_callers() {
    let mut rig = Rig::optimizing();
    let definitions = ["r:a filler_000", "r:b filler_000", "r:c filler_000"];
    let ids = rig.register(&definitions.map(trapped));
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(ids[0]), STACK, caller(&rig, 0));
    let middle = source(&rig, ids[1]);
    rig.unregister(&[ids[0], ids[2]]).unwrap();
    let next = rig.word(STACK);
    let to = calls(&middle).return_address(next, &rig.guest.mem);
    assert_eq!(to, Some(caller(&rig, 0)));
    rig.unregister(&[ids[1]]).unwrap();
    assert_eq!(rig.word(STACK), caller(&rig, 0));
}
