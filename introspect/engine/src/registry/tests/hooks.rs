//! Several hooks of the engine at one function.

use hvprobe_fixtures::STACK;
use hvprobe_fixtures::kernel::TEXT;
use hvprobe_hit::table::Internal;

use super::*;
use crate::registry::hooks::watched;
use crate::testing::regs;

const DEAD: &str = "do_task_dead";
const FIRST: HookSet = HookSet(1 << 30);
const SECOND: HookSet = HookSet(1 << 31);

/// Adds a hook at `function`.
fn watch(rig: &mut Rig, function: &'static str, notifies: HookSet) {
    let internal = Internal {
        notifies,
        ..Internal::default()
    };
    let (registry, guest) = (&mut rig.registry, &*rig.guest);
    registry.hook(function, internal, &guest.mem);
    registry.commit(guest).expect("the guest stops");
}

#[test]
fn hooks_at_one_function_are_all_reported_and_what_is_done_at_once_is_done() {
    let mut rig = Rig::live();
    let ids = rig.register(&[spec("r filler_000")]);
    let id = ids[0];
    watch(&mut rig, DEAD, FIRST);
    watch(&mut rig, DEAD, SECOND);
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rsp = STACK.0;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    cpu.regs = Regs { rdi: 7, ..regs() };
    let at = rig.at(DEAD, 0);
    let (hooks, argument) = held_hooks(cpu.hit(at));
    assert_eq!(hooks, HookSet(FIRST.0 | SECOND.0));
    assert_eq!(argument, Gva(7));
    assert_eq!(rig.counts(id).orphans, 1, "the hook that was there before");
    assert_eq!(cpu.resume(&Decision::default()), RESUME);
    assert_eq!(cpu.regs.rip, at.0 + 1);
}

/// The nop that the compiler leaves for ftrace.
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
/// The call that replaces the nop.
const CALL: [u8; 5] = [0xe8, 1, 2, 3, 4];

/// Boots a guest in which ftrace also patches the entry at `at`.
fn with_ftrace_at(at: Gva) -> Rig {
    let mut sections = probed::sections();
    let data = sections.iter_mut().find(|section| section.name == ".data");
    let data = &mut data.expect("there is data").data;
    let site = (TEXT + 0x660).to_le_bytes();
    let place = data.windows(8).position(|bytes| bytes == site);
    let place = place.expect("a site of ftrace");
    data[place..place + 8].copy_from_slice(&at.0.to_le_bytes());
    let text = usize::try_from(at.0 - TEXT).expect("in the text");
    sections[0].data[text..text + NOP.len()].copy_from_slice(&NOP);
    let mut rig = Rig::boot_whole(&kernel::elf(&sections, &[]));
    rig.go_live(None);
    rig
}

#[test]
fn whatever_the_guest_traces_nothing_that_the_engine_watches_is_lost() {
    for function in watched() {
        let at = Rig::booting().at(function, 0);
        let behind = at.wrapping_add(NOP.len() as u64);
        let mut rig = with_ftrace_at(at);
        for traced in [CALL, NOP] {
            rig.guest.write(at, &traced);
            watch(&mut rig, function, FIRST);
            assert_eq!(rig.guest.read(at), traced, "{function}");
            assert_eq!(rig.byte(behind), INT3, "{function}");
            assert!(rig.registry.hooks.unhooked.is_empty(), "{function}");
            let mut cpu = Cpu::new(&rig);
            cpu.regs.rdi = 7;
            assert_eq!(held_hooks(cpu.hit(behind)), (FIRST, Gva(7)), "{function}");
            assert_eq!(cpu.resume(&Decision::default()), RESUME);
            // The next change removes the hooks, which are no longer needed.
            let id = rig.one(EMULATED);
            rig.unregister(&[id]).unwrap();
            assert_eq!(rig.guest.read(at), traced, "{function}");
            assert_ne!(rig.byte(behind), INT3, "{function}");
        }
    }
}
