//! Calls that never return, and return probes that leave or are disabled while calls are in flight.

use super::half::{reading, trapped};
use super::*;

#[test]
fn frame_that_was_left_behind_is_an_orphan() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs([FUNCTION, OTHER]));
    let [outer, inner] = [0, 1].map(|n| rig.addr(ids[n]));
    let mut cpu = Cpu::new(&rig);
    // The inner call is unwound without returning: the outer one returns.
    cpu.call(&rig, outer, frame(0), caller(&rig, 0));
    cpu.call(&rig, inner, frame(1), caller(&rig, 1));
    assert_eq!(cpu.ret(&rig, frame(0), 0), caller(&rig, 0));
    assert_eq!((hits(&rig, ids[1]), rig.counts(ids[1]).orphans), (0, 1));
    // The inner call is also an orphan if another function is called further up the stack.
    cpu.call(&rig, inner, frame(3), caller(&rig, 3));
    cpu.call(&rig, outer, frame(2), caller(&rig, 2));
    assert_eq!(rig.counts(ids[1]).orphans, 2);
    assert_eq!(cpu.ret(&rig, frame(2), 0), caller(&rig, 2));
    assert_eq!((hits(&rig, ids[0]), rig.counts(ids[0]).orphans), (2, 0));
}

#[test]
fn calls_of_a_dead_task_are_orphans() {
    let mut rig = Rig::live();
    let dead = rig.at("do_task_dead", 0);
    assert_eq!(rig.byte(dead), 0x90);
    let ids = rig.register(&specs([FUNCTION, "r1 filler_002"]));
    assert_eq!(rig.byte(dead), INT3);
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(ids[0]), frame(0), caller(&rig, 0));
    cpu.call(&rig, rig.addr(ids[1]), frame(1), caller(&rig, 1));
    let mut other = Cpu::numbered(&rig, 0);
    other.gs_base = rig.second_task();
    let slot = Gva(DATA_VIRT.0 + 0x700);
    other.call(&rig, rig.addr(ids[0]), slot, caller(&rig, 2));
    // The first task dies.
    cpu.regs.rsp = frame(2).0;
    assert_eq!(cpu.hit(dead), RESUME);
    assert_eq!(cpu.regs.rip, dead.0 + 1);
    let orphans: Vec<_> = ids.iter().map(|id| rig.counts(*id).orphans).collect();
    assert_eq!(orphans, [1, 1]);
    // The only instance can be used again, and the other task is not affected.
    other.call(&rig, rig.addr(ids[1]), Gva(slot.0 - 0x20), caller(&rig, 3));
    assert_eq!(rig.counts(ids[1]).missed, 0);
    assert_eq!(other.ret(&rig, Gva(slot.0 - 0x20), 0), caller(&rig, 3));
    assert_eq!(other.ret(&rig, slot, 0), caller(&rig, 2));
    // The engine's own hook makes no event, and it leaves with the last return probe.
    assert!(cpu.events().is_empty());
    assert_eq!(rig.list().len(), 2);
    rig.unregister(&ids[..1]).unwrap();
    assert_eq!(rig.byte(dead), INT3);
    rig.unregister(&ids[1..]).unwrap();
    assert_eq!(rig.byte(dead), 0x90);
}

#[test]
fn a_dead_tasks_calls_are_those_whose_stubs_are_on_its_stack() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&[trapped("r2 filler_000"), trapped("r2 filler_002")]);
    let [outer, inner] = [0, 1].map(|n| rig.addr(ids[n]));
    let dead = rig.at("do_task_dead", 0);
    let orphans = |rig: &Rig| [0, 1].map(|n| rig.counts(ids[n]).orphans);
    let mut cpu = Cpu::new(&rig);
    let mut other = Cpu::numbered(&rig, 0);
    other.gs_base = rig.second_task();
    let slot = Gva(DATA_VIRT.0 + 0x700);
    other.call(&rig, outer, slot, caller(&rig, 2));

    // A stub that an earlier call has left on the stack, and a stub on another task's stack, are not calls of
    // the task.
    cpu.call(&rig, outer, frame(3), caller(&rig, 0));
    let stub = rig.word(frame(3));
    cpu.regs.rsp = frame(4).0;
    assert_eq!(cpu.hit(dead), RESUME);
    assert_eq!(orphans(&rig), [1, 0]);
    cpu.regs.rsp = frame(4).0;
    assert_eq!(cpu.hit(dead), RESUME);
    rig.guest.write(frame(2), &rig.word(slot).0.to_le_bytes());
    rig.guest.write(frame(1), &stub.0.to_le_bytes());
    assert_eq!(cpu.hit(dead), RESUME);
    assert_eq!(orphans(&rig), [1, 0]);

    // A call from which the task has returned is no call of the task either: its instance is free.
    cpu.call(&rig, inner, frame(2), caller(&rig, 1));
    cpu.call(&rig, outer, frame(1), caller(&rig, 0));
    cpu.regs.rsp = frame(3).0;
    assert_eq!(cpu.hit(dead), RESUME);
    assert_eq!(orphans(&rig), [2, 1]);

    // A stack that the kernel has left and overwritten shows no calls: all instances are checked.
    let rewinds = rig.at("rewind_stack_and_make_dead", 0);
    let symbol = rig.guest.image.symbols().containing(rewinds);
    let end = rewinds.wrapping_add(symbol.expect("a symbol").0.size);
    cpu.call(&rig, outer, frame(1), caller(&rig, 0));
    cpu.call(&rig, inner, frame(2), caller(&rig, 1));
    rig.guest.write(frame(2), &[0; 8]);
    for (at, orphaned) in [
        (rewinds, [2, 1]),
        (end.wrapping_add(1), [2, 1]),
        (end, [3, 2]),
    ] {
        rig.guest.write(frame(1), &at.0.to_le_bytes());
        cpu.regs.rsp = frame(2).0;
        assert_eq!(cpu.hit(dead), RESUME);
        assert_eq!(orphans(&rig), orphaned, "{at}");
    }
    // The other task's call still has its instance.
    let calls = rig.registry.code.sources.get(ids[0]).expect("followed");
    let calls = calls.followed().expect("a return probe");
    let to = calls.return_address(rig.word(slot), &rig.guest.mem);
    assert_eq!(to, Some(caller(&rig, 2)));
}

#[test]
fn calls_of_a_dead_task_that_lead_to_one_another_are_all_orphans() {
    let mut rig = Rig::optimizing();
    // Two probes of one function, and one probe of each of the two functions that follow by tail calls; the last
    // one uses the trampoline.
    let ids = rig.register(&[
        trapped("r2:first filler_000"),
        trapped("r2:second filler_000"),
        trapped("r2:third filler_002"),
        reading("r2:last filler_004"),
    ]);
    let entries = [0, 2, 3].map(|n| rig.addr(ids[n]));
    let dead = rig.at("do_task_dead", 0);
    let mut cpu = Cpu::new(&rig);
    for time in 1..5 {
        cpu.call(&rig, entries[0], frame(0), caller(&rig, 0));
        cpu.jump(entries[1], frame(0));
        if time % 2 == 0 {
            cpu.jump(entries[2], frame(0));
        }
        cpu.regs.rsp = frame(1).0;
        assert_eq!(cpu.hit(dead), RESUME);
        let counts: Vec<_> = ids.iter().map(|id| rig.counts(*id)).collect();
        let orphans: Vec<_> = counts.iter().map(|it| (it.orphans, it.missed)).collect();
        assert_eq!(orphans, [(time, 0), (time, 0), (time, 0), (time / 2, 0)]);
    }
}

#[test]
fn a_call_that_is_sent_on_while_memory_is_looked_through_keeps_what_it_is_sent_to() {
    let mut rig = Rig::optimizing();
    // No change starts a look of its own.
    rig.guest.forget_writes(true);
    let followed = rig.register(&[trapped("r2 filler_000")])[0];
    let last = rig.register(&[reading("r2 filler_002")])[0];
    let mut cpu = Cpu::new(&rig);
    let entries = [followed, last].map(|id| rig.addr(id));
    cpu.call(&rig, entries[0], frame(0), caller(&rig, 0));
    let stub = rig.word(frame(0));
    cpu.jump(entries[1], frame(0));
    assert_eq!(rig.word(frame(0)), rig.trampoline());
    rig.unregister(&[followed]).unwrap();
    rig.registry.code.keep.sources = 1;
    let retry = rig.next_retry();
    rig.guest.forget_writes(false);
    let guest = Rc::clone(&rig.guest);
    let looked = retry.look(&*guest);
    // The stub has been on no stack until now.
    rig.unregister(&[last]).unwrap();
    assert_eq!(rig.word(frame(0)), stub);
    rig.registry.end_retry(looked, &*guest);
    assert_eq!(rig.registry.usage().left_behind, 1);
    assert_ne!(rig.byte(stub), INT3);
    // A look that sees the stub on the stack does not lead to its release either; a look after the return does.
    rig.registry.code.kept.sources = 0;
    for word in [stub, Gva(0)] {
        rig.guest.write(frame(0), &word.0.to_le_bytes());
        for _ in 0..8 {
            rig.registry.retry_jumps(&*guest);
        }
        let left = u64::from(word == stub);
        assert_eq!(rig.registry.usage().left_behind, left);
        rig.registry.code.kept.sources = 0;
    }
}

#[test]
fn the_end_of_a_task_takes_no_longer_when_there_are_more_return_probes() {
    let work = |count: usize| {
        let mut rig = Rig::optimizing();
        let definitions = (0..count).map(|n| format!("r filler_{n:03}"));
        let specs: Vec<_> = definitions.map(|definition| trapped(&definition)).collect();
        let ids = rig.register(&specs);
        assert!(rig.registry.code.sources.get(ids[count - 1]).is_some());
        let dead = rig.at("do_task_dead", 0);
        let mut cpu = Cpu::new(&rig);
        cpu.call(&rig, rig.addr(ids[0]), frame(0), caller(&rig, 0));
        cpu.regs.rsp = frame(1).0;
        let before = hvprobe_fixtures::work();
        assert_eq!(cpu.hit(dead), RESUME);
        let work = hvprobe_fixtures::work() - before;
        assert_eq!(rig.counts(ids[0]).orphans, 1);
        work
    };
    assert_eq!(work(200), work(1));
}

#[test]
fn calls_that_a_task_makes_after_its_end_are_orphans_once_it_is_freed() {
    // With calls that return through the trampoline, and through stubs.
    for mut rig in [Rig::live(), Rig::optimizing()] {
        let freed = rig.at("__put_task_struct", 0);
        let schedule = ProbeSpec {
            mechanism: Some(Mechanism::Emulated),
            ..spec("r2 __schedule")
        };
        let id = rig.register(&[schedule])[0];
        assert_eq!(rig.byte(freed), INT3);
        let mut cpu = Cpu::new(&rig);
        let mut other = Cpu::numbered(&rig, 0);
        other.gs_base = rig.second_task();
        let task = DATA_VIRT.wrapping_add(0x100);
        let slot = Gva(DATA_VIRT.0 + 0x700);
        for orphans in 0..5 {
            // The other task sleeps in the function all the time.
            if orphans == 0 {
                other.call(&rig, rig.addr(id), slot, caller(&rig, 1));
            }
            cpu.regs.rsp = frame(2).0;
            assert_eq!(cpu.hit(rig.at("do_task_dead", 0)), RESUME);
            cpu.call(&rig, rig.addr(id), frame(3), caller(&rig, 0));
            assert_eq!(rig.counts(id).orphans, orphans);
            let mut reaper = Cpu::numbered(&rig, 0);
            reaper.gs_base = other.gs_base;
            reaper.regs.rdi = task.0;
            assert_eq!(reaper.hit(freed), RESUME);
            assert_eq!(rig.counts(id).orphans, orphans + 1);
        }
        assert_eq!(rig.counts(id).missed, 0);
        rig.unregister(&[id]).unwrap();
        assert_eq!(rig.word(slot), caller(&rig, 1));
        assert_ne!(rig.byte(freed), INT3);
        // With other return probes this function is not watched.
        rig.one(FUNCTION);
        assert_ne!(rig.byte(freed), INT3);
    }
}

#[test]
fn engines_own_probe_shares_its_place_with_the_users() {
    let mut rig = Rig::live();
    let user = rig.one("p do_task_dead");
    let at = rig.addr(user);
    let id = rig.one(FUNCTION);
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(id), STACK, caller(&rig, 0));
    assert_eq!(cpu.hit(at), RESUME);
    assert_eq!(rig.counts(id).orphans, 1);
    rig.unregister(&[user]).unwrap();
    assert_eq!(rig.byte(at), INT3);
    let user = rig.one("p do_task_dead");
    rig.unregister(&[id]).unwrap();
    assert_eq!(rig.byte(at), INT3);
    assert_eq!(cpu.hit(at), RESUME);
    rig.unregister(&[user]).unwrap();
    assert_eq!(rig.byte(at), 0x90);
    assert_eq!(cpu.events().len(), 2);
}

#[test]
fn change_that_fails_leaves_the_engines_own_probes_as_they_were() {
    let mut rig = Rig::live();
    let dead = rig.at("do_task_dead", 0);
    rig.guest.refuse_stops(true);
    assert!(rig.try_register(&[spec(FUNCTION)]).is_err());
    rig.guest.refuse_stops(false);
    // The next change does not plant what the failed one wanted.
    rig.one("p filler_004");
    let other = rig.one("p filler_006");
    rig.disable(&[other]).unwrap();
    assert_eq!(rig.byte(dead), 0x90);

    let id = rig.one(FUNCTION);
    rig.guest.refuse_stops(true);
    rig.unregister(&[id]).unwrap_err();
    rig.guest.refuse_stops(false);
    rig.enable(&[other]).unwrap();
    assert_eq!(rig.byte(dead), INT3);
}

#[test]
fn unregistering_gives_the_calls_in_flight_their_return_addresses_back() {
    let mut rig = Rig::live();
    let ids = rig.register(&specs([FUNCTION, FUNCTION, OTHER]));
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(ids[0]), frame(0), caller(&rig, 0));
    cpu.call(&rig, rig.addr(ids[2]), frame(1), caller(&rig, 1));
    // The frame has another probe.
    assert_eq!(rig.stops_of(|rig| rig.unregister(&ids[..1]).unwrap()), 1);
    assert!(rig.is_taken(frame(0)));
    rig.unregister(&ids[1..2]).unwrap();
    assert_eq!(rig.word(frame(0)), caller(&rig, 0));
    assert!(rig.is_taken(frame(1)));
    assert_eq!(cpu.ret(&rig, frame(1), 1), caller(&rig, 1));
    assert_eq!(cpu.ret(&rig, frame(0), 0), caller(&rig, 0));
    rig.unregister(&ids[2..]).unwrap();
    // A task may have read the trampoline's address already, so the region stays mapped.
    assert!(rig.is_mapped());
    let events = cpu.events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].probe, ids[2]);
    assert_eq!(rig.unmatched(), 0);
}

#[test]
fn virtual_cpu_at_the_trampoline_finds_its_way_after_the_probe_has_left() {
    let mut rig = Rig::live();
    let id = rig.one(FUNCTION);
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, rig.addr(id), STACK, caller(&rig, 0));
    let trampoline = rig.trampoline();
    // It has executed the `ret`, but not the trampoline.
    rig.guest.stand(&[
        standing(rig.addr(id), Gva(0)),
        standing(trampoline, STACK.wrapping_add(8)),
    ]);
    rig.unregister(&[id]).unwrap();
    // The memory above its stack may hold anything by then.
    rig.guest.write(STACK, &0xdead_u64.to_le_bytes());
    cpu.regs = Regs {
        rip: trampoline.0,
        rsp: STACK.0 + 8,
        rax: 42,
        ..regs()
    };
    assert_eq!(cpu.hit(trampoline), RESUME);
    let back = Regs {
        rip: caller(&rig, 0).0,
        rsp: STACK.0 + 8,
        rax: 42,
        ..regs()
    };
    assert_eq!(cpu.regs, back);
    assert!(cpu.events().is_empty());
    assert_eq!(rig.unmatched(), 0);
}

#[test]
fn return_that_nobody_knows_goes_to_the_address_that_was_popped() {
    let mut rig = Rig::live();
    let id = rig.one(FUNCTION);
    let trampoline = rig.trampoline();
    let mut cpu = Cpu::new(&rig);
    // The `ret` read the trampoline's address just before the real one was restored.
    let ret = caller(&rig, 0);
    rig.guest.write(STACK, &ret.0.to_le_bytes());
    cpu.regs.rsp = STACK.0 + 8;
    assert_eq!(cpu.hit(trampoline), RESUME);
    assert_eq!(cpu.regs.rip, ret.0);
    assert_eq!(rig.unmatched(), 1);
    // Where that address is not known either, the hit is not ours.
    rig.guest.write(STACK, &trampoline.0.to_le_bytes());
    assert_eq!(cpu.hit(trampoline), Outcome::Foreign);
    cpu.regs.rsp = 0x1000;
    assert_eq!(cpu.hit(trampoline), Outcome::Foreign);
    assert_eq!(rig.unmatched(), 3);
    assert_eq!(rig.counts(id), Counts::default());
    assert!(cpu.events().is_empty());
}

#[test]
fn disabled_return_probe_sees_no_entries_and_lets_the_calls_it_saw_go_home() {
    let mut rig = Rig::live();
    let id = rig.one(FUNCTION);
    let other = rig.one("p filler_000");
    let entry = rig.addr(id);
    let mut cpu = Cpu::new(&rig);
    cpu.call(&rig, entry, frame(0), caller(&rig, 0));
    rig.disable(&[id]).unwrap();
    assert!(rig.is_taken(frame(0)));
    cpu.call(&rig, entry, frame(1), caller(&rig, 1));
    assert!(!rig.is_taken(frame(1)));
    assert_eq!(cpu.ret(&rig, frame(0), 0), caller(&rig, 0));
    let counts = Counts {
        missed: 1,
        ..Counts::default()
    };
    assert_eq!(rig.counts(id), counts);
    rig.enable(&[id]).unwrap();
    cpu.call(&rig, entry, frame(0), caller(&rig, 0));
    assert_eq!(cpu.ret(&rig, frame(0), 0), caller(&rig, 0));
    assert_eq!(hits(&rig, id), 1);

    // The global switch does the same.
    cpu.call(&rig, entry, frame(0), caller(&rig, 0));
    rig.registry.set_armed(false, &*rig.guest).unwrap();
    assert_eq!(cpu.ret(&rig, frame(0), 0), caller(&rig, 0));
    assert_eq!((hits(&rig, id), rig.counts(id).missed), (1, 2));
    assert_eq!(hits(&rig, other), 4);
}

#[test]
fn a_call_returns_through_the_trampoline_when_the_gate_is_gone() {
    let mut rig = Rig::with_gate();
    let gate = rig.gate().at();
    let original = rig.guest.read::<2>(gate);
    let id = rig.one(FUNCTION);
    let (entry, ret) = (rig.addr(id), caller(&rig, 0));
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.call(&rig, entry, STACK, ret), RESUME);
    rig.registry.set_armed(false, &*rig.guest).unwrap();
    assert_eq!(rig.byte(entry), 0x55);
    assert_eq!(rig.guest.read::<2>(gate), original);
    assert_eq!(cpu.ret(&rig, STACK, 0), ret);
    assert_eq!((hits(&rig, id), rig.counts(id).missed), (0, 1));
}
