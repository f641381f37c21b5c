//! Detours that read memory: when they do, with which functions, and hits that they cannot serve.

use hvprobe_arch::regs::Gpr;
use hvprobe_fixtures::kernel::LOADERS;
use hvprobe_spec::Item;

use super::*;
use crate::unoptimized::Unoptimized;

const READS: &str = "p vfs_read mode=+8(%di):u32 name=+0(+16(%di)):string";

fn why(rig: &Rig, id: ProbeId) -> Unoptimized {
    rig.info(id).unoptimized.expect("not optimized")
}

/// Creates a rig whose kernel was changed by `change` before its text was final.
fn changed(change: impl FnOnce(&Rig)) -> Rig {
    let mut rig = Rig::booting_with_room();
    change(&rig);
    rig.go_live(None);
    rig
}

fn loader(size: u64) -> Gva {
    let found = LOADERS.iter().find(|(known, _)| *known == size);
    Gva(kernel::TEXT + found.expect("a loader").1)
}

/// Returns the targets of the calls in `code`.
fn called(code: &[u8], at: Gva) -> Vec<Gva> {
    let calls = (0..code.len().saturating_sub(5)).filter(|from| code[*from] == 0xe8);
    let target = |from: usize| {
        let distance = i32::from_le_bytes(code[from + 1..][..4].try_into().unwrap());
        let behind = at.wrapping_add(from as u64 + 5);
        Gva(behind.0.wrapping_add_signed(distance.into()))
    };
    calls.map(target).collect()
}

#[test]
fn memory_is_read_in_the_detour_by_the_kernels_own_loads() {
    let mut rig = Rig::optimizing();
    let id = rig.one(READS);
    assert_eq!(
        rig.mechanism(id),
        Mechanism::Optimized,
        "{:?}",
        rig.info(id)
    );
    let table = rig.guest.table();
    let (_, site) = table.at(rig.addr(id)).expect("armed");
    let detour = site.detour.as_ref().expect("a detour");
    let called = called(detour.code(), detour.at());
    // Kernel memory is read by the loads themselves, after the instructions for SMAP and barriers.
    for size in [1, 4, 8] {
        let load = loader(size).wrapping_add(6);
        assert!(called.contains(&load), "no call of {load}: {called:x?}");
    }
    assert!(!called.contains(&loader(2).wrapping_add(6)));
    rig.unregister(&[id]).unwrap();
}

#[test]
fn memory_of_a_process_is_read_behind_what_lets_the_kernel_there() {
    // `stac` and a barrier in place of the nops, and the barrier alone.
    for (code, from) in [
        ([0x0f, 0x01, 0xcb, 0x0f, 0xae, 0xe8], 0),
        ([0x90, 0x90, 0x90, 0x0f, 0xae, 0xe8], 3),
        ([0x90; 6], 6),
    ] {
        let mut rig = changed(|rig| rig.guest.write(loader(4), &code));
        let id = rig.one("p vfs_read user=+u0(%si):u32");
        let table = rig.guest.table();
        let (_, site) = table.at(rig.addr(id)).expect("armed");
        let detour = site.detour.as_ref().expect("a detour");
        let called = called(detour.code(), detour.at());
        assert!(
            called.contains(&loader(4).wrapping_add(from)),
            "{called:x?}"
        );
    }
}

#[test]
fn what_is_captured_by_an_address_is_read_so_too() {
    let capture = vec![
        Item::Stack(1),
        Item::Memory {
            base: Gpr::Rdi,
            offset: 3,
            len: 23,
        },
    ];
    let actions = Actions {
        capture,
        ..Actions::default()
    };
    let mut rig = Rig::optimizing();
    let id = rig.register(&[acting("p vfs_read", actions)])[0];
    assert_eq!(rig.mechanism(id), Mechanism::Optimized);
}

#[test]
fn a_hit_that_cannot_read_there_is_served_by_the_host() {
    let mut rig = Rig::optimizing();
    let id = rig.one(READS);
    let table = rig.guest.table();
    let (_, site) = table.at(rig.addr(id)).expect("armed");
    let detour = site.detour.clone().expect("a detour");
    let escape = detour.escape().expect("what it reads may fault too deep");
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(escape), RESUME);
    assert_eq!(cpu.regs.rip, detour.tail().0);
    assert_eq!(cpu.events()[0].probe, id);
}

#[test]
fn returns_take_an_exit_for_memory() {
    let mut rig = Rig::optimizing();
    let id = rig.one("r vfs_read mode=+8($retval):u32");
    assert!(matches!(why(&rig, id), Unoptimized::Synchronous { .. }));
}

#[test]
fn without_loads_that_are_what_they_should_be_memory_takes_an_exit() {
    for change in [
        // Another instruction, a check before the load, a missing return.
        |rig: &Rig| {
            rig.guest
                .write(loader(8).wrapping_add(6), &[0x48, 0x8b, 0x08])
        },
        |rig: &Rig| rig.guest.write(loader(4), &[0x48, 0x39, 0xd0]),
        |rig: &Rig| rig.guest.write(loader(1).wrapping_add(14), &[0x90, 0x90]),
        // A jump to a function that is not a return thunk.
        |rig: &Rig| {
            rig.guest
                .write(loader(2).wrapping_add(14), &[0xe9, 0, 0, 0, 0])
        },
    ] {
        let mut rig = changed(change);
        let ids = rig.register(&[spec(READS), spec("p filler_000")]);
        assert!(matches!(why(&rig, ids[0]), Unoptimized::Synchronous { .. }));
        assert_eq!(rig.mechanism(ids[1]), Mechanism::Optimized);
    }
}

#[test]
fn while_the_loads_are_probed_detours_do_not_call_them() {
    let mut rig = Rig::optimizing();
    let id = rig.one(READS);
    assert_eq!(rig.mechanism(id), Mechanism::Optimized);
    let other = rig.one("p __get_user_nocheck_4+6");
    assert!(matches!(why(&rig, id), Unoptimized::Synchronous { .. }));
    rig.disable(&[other]).unwrap();
    assert_eq!(rig.mechanism(id), Mechanism::Optimized);
    rig.enable(&[other]).unwrap();
    assert_ne!(rig.mechanism(id), Mechanism::Optimized);
    rig.unregister(&[other]).unwrap();
    assert_eq!(rig.mechanism(id), Mechanism::Optimized);
}

/// Returns the default arguments of `definition`, with their types, and its mechanism.
fn shown(definition: &str) -> (Vec<String>, Mechanism) {
    let mut rig = Rig::optimizing();
    let defaults = ProbeSpec {
        default_arguments: true,
        ..spec(definition)
    };
    let id = rig.register(&[defaults])[0];
    let info = rig.info(id);
    let arguments = info.shown.arguments.iter();
    let names = arguments.map(|it| format!("{}: {}", it.name, it.shape.name));
    (names.collect(), rig.mechanism(id))
}

#[test]
fn a_text_is_shown_where_that_costs_no_exit_and_nothing_else_gives_its_length() {
    let (arguments, mechanism) = shown("p filler_006");
    assert_eq!(arguments, ["name: string", "mode: int"]);
    assert_eq!(mechanism, Mechanism::Optimized);
    let (arguments, mechanism) = shown("p filler_008");
    assert_eq!(arguments, ["data: const char *", "len: unsigned long"]);
    assert_eq!(mechanism, Mechanism::Optimized);
    // For a return probe, showing a text would cost an exit.
    let (arguments, mechanism) = shown("r filler_006");
    assert_eq!(
        arguments,
        ["name: const char *", "mode: int", "retval: int"]
    );
    assert_eq!(mechanism, Mechanism::Optimized);
}

#[test]
fn arguments_in_registers_and_behind_pointers_cost_no_exit() {
    let mut rig = Rig::optimizing();
    let defaults = ProbeSpec {
        default_arguments: true,
        ..spec("p filler_002")
    };
    let ids = rig.register(&[defaults, spec("p vfs_read file->f_mode")]);
    for id in ids {
        assert_eq!(rig.mechanism(id), Mechanism::Optimized);
    }
}
