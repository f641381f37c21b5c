//! Jumps in place of int3s: when they are written, their targets, and their removal.

use hvprobe_arch::detour::{JUMP, Span};
use hvprobe_arch::trap::GATE_PORT;
use hvprobe_fixtures::kernel::Layout;
use hvprobe_fixtures::{DATA_VIRT, MODULE_FRAMES, MODULE_PAGES, STACK};
use hvprobe_linux::image::Forbidden;
use hvprobe_spec::{Change, Hold, Item, Then};

use super::*;
use crate::code::scan::STOPPED_MAX;
use crate::unoptimized::Unoptimized;

/// The entry nop of `vfs_read`: one instruction of five bytes.
const ENTRY: &str = "p vfs_read";
/// `push rbp; mov rbp, rsp; nop`: instructions begin one and four bytes in.
const SHORT: &str = EMULATED;

fn text(rig: &Rig, at: Gva) -> [u8; 8] {
    rig.guest.read(at)
}

/// Returns the target of the jump at `at`.
fn target(rig: &Rig, at: Gva) -> Gva {
    let [opcode, a, b, c, d, ..] = text(rig, at);
    assert_eq!(opcode, 0xe9, "no jump at {at}");
    let distance = i64::from(i32::from_le_bytes([a, b, c, d]));
    Gva(at.wrapping_add(JUMP as u64).0.wrapping_add_signed(distance))
}

fn why(rig: &Rig, id: ProbeId) -> Unoptimized {
    rig.info(id).unoptimized.expect("not optimized")
}

fn is_optimized(rig: &Rig, id: ProbeId) -> bool {
    let info = rig.info(id);
    let optimized = info.mechanism == Some(Mechanism::Optimized);
    assert_eq!(optimized, info.unoptimized.is_none(), "{info:?}");
    optimized
}

#[test]
fn a_probe_at_an_entry_nop_is_a_jump_and_leaves_no_trace() {
    let mut rig = Rig::optimizing();
    let before = rig.visible();
    let id = rig.one(ENTRY);
    let at = rig.addr(id);
    assert!(is_optimized(&rig, id));
    let to = target(&rig, at);
    // The detour is there and ends in a jump back to after the nop.
    assert_ne!(rig.byte(to), INT3);
    let table = rig.guest.table();
    let (_, site) = table.at(at).expect("armed");
    let detour = site.detour.as_ref().expect("a detour");
    assert_eq!(detour.at(), to);
    let code: Vec<u8> = (0..detour.code().len() as u64)
        .map(|n| rig.byte(to.wrapping_add(n)))
        .collect();
    assert_eq!(code, detour.code());
    rig.unregister(&[id]).unwrap();
    assert_eq!(text(&rig, at)[..JUMP], [0x0f, 0x1f, 0x44, 0, 0]);
    assert_eq!(rig.guest.collected.get(), 1);
    let mut after = rig.visible();
    // The page-table entries of the detours stay.
    for (now, then) in after.iter_mut().zip(&before) {
        if *now != *then && *then == 0 {
            *now = 0;
        }
    }
    assert!(after == before);
}

#[test]
fn kernels_with_per_cpu_data_at_link_addresses_get_jumps_that_find_it() {
    for layout in [Layout::Offsets615, Layout::Place70] {
        let sections = probed::sections_of(layout);
        let mut rig = Rig::boot_whole(&kernel::elf(&sections, &[]));
        rig.go_live(None);
        let ids = rig.register(&[spec(ENTRY), spec("r filler_000")]);
        assert!(is_optimized(&rig, ids[0]), "{:?}", rig.info(ids[0]));
        assert!(is_optimized(&rig, ids[1]), "{:?}", rig.info(ids[1]));
        // `mov ecx, gs:[cpu_number]` and `mov rax, gs:[current_task]`, with 32-bit displacements that the
        // processor sign-extends.
        let cpu = rig.guest.image.cpu_number().expect("it has a number");
        let task = rig.guest.image.task_layout().expect("it has tasks");
        let table = rig.guest.table();
        let (_, site) = table.at(rig.addr(ids[0])).expect("armed");
        let detour = site.detour.as_ref().expect("a detour");
        for (load, at) in [
            (&[0x65, 0x8b, 0x0c, 0x25][..], cpu),
            (&[0x65, 0x48, 0x8b, 0x04, 0x25], task.current_task),
        ] {
            assert!(at > u64::from(u32::MAX), "{at:#x} is no link address");
            let loads = detour.code().windows(load.len() + 4);
            let mut loads = loads.filter_map(|code| code.strip_prefix(load));
            let found = loads.next().expect("it is read");
            let displacement = i32::from_le_bytes(found.try_into().unwrap());
            assert_eq!(i64::from(displacement), at.cast_signed());
        }
    }
}

#[test]
fn entries_whose_endbr_the_kernel_sealed_get_jumps_behind_it() {
    // The kernel's poison instruction up to 6.13, the one of later kernels, and a plain nop.
    for sealed in [
        [0x66, 0x0f, 0x1f, 0x00],
        [0x0f, 0x1f, 0x40, 0xd6],
        [0x0f, 0x1f, 0x40, 0x00],
    ] {
        let mut rig = Rig::booting_with_room();
        let entry = rig.at("vfs_read", 0);
        rig.guest.write(entry, &sealed);
        rig.go_live(None);
        let ids = rig.register(&[spec(ENTRY), spec("r vfs_read")]);
        for id in ids {
            assert_eq!(rig.addr(id), entry.wrapping_add(4), "{sealed:02x?}");
            assert!(is_optimized(&rig, id), "{:?}", rig.info(id));
        }
        assert_eq!(rig.guest.read(entry), sealed);
    }
}

#[test]
fn a_nop_that_the_compiler_put_at_an_entry_is_an_instruction_of_the_function() {
    let mut sections = probed::sections();
    let nop = [0x0f, 0x1f, 0x40, 0x00];
    let vfs_read = &mut sections[0].data[0x100..];
    vfs_read[..4].copy_from_slice(&nop);
    let mut rig = Rig::boot_whole(&kernel::elf(&sections, &[]));
    rig.go_live(None);
    let id = rig.one(ENTRY);
    assert_eq!(rig.addr(id), rig.at("vfs_read", 0));
}

#[test]
fn what_needs_an_exit_makes_it_a_breakpoint_and_the_jump_comes_back() {
    let mut rig = Rig::optimizing();
    let id = rig.one(ENTRY);
    let at = rig.addr(id);
    let first = target(&rig, at);
    let synchronous = [
        post(ENTRY),
        acting(
            ENTRY,
            Actions {
                then: Then::Return(0),
                ..Actions::default()
            },
        ),
        acting(
            ENTRY,
            Actions {
                hold: Some(Hold::Stop),
                ..Actions::default()
            },
        ),
        acting(
            ENTRY,
            Actions {
                faults: true,
                ..Actions::default()
            },
        ),
        acting(
            ENTRY,
            Actions {
                changes: vec![Change::Memory {
                    base: None,
                    offset: 0,
                    bytes: vec![1].into(),
                }],
                ..Actions::default()
            },
        ),
        ProbeSpec {
            mechanism: Some(Mechanism::Emulated),
            ..spec(ENTRY)
        },
    ];
    for spec in synchronous {
        let other = rig.register(&[spec])[0];
        assert!(!is_optimized(&rig, id) && !is_optimized(&rig, other));
        let Unoptimized::Synchronous { probe, .. } = why(&rig, id) else {
            panic!("{:?}", why(&rig, id));
        };
        assert_eq!(probe, other);
        assert_eq!(text(&rig, at)[..JUMP], [INT3, 0x1f, 0x44, 0, 0]);
        // A disabled probe needs no exit.
        rig.disable(&[other]).unwrap();
        assert!(is_optimized(&rig, id));
        rig.unregister(&[other]).unwrap();
        // With the same members the same detour is used.
        assert_eq!(target(&rig, at), first);
    }
}

#[test]
fn several_probes_share_a_jump_and_a_stack_word_can_ask_for_an_exit() {
    let mut rig = Rig::optimizing();
    let words = Actions {
        capture: vec![Item::Stack(0), Item::Stack(3)],
        ..Actions::default()
    };
    let ids = rig.register(&[spec(ENTRY), acting(ENTRY, words), spec("r vfs_read")]);
    assert!(ids.iter().all(|id| is_optimized(&rig, *id)));
    let at = rig.addr(ids[0]);
    let table = rig.guest.table();
    let detour = table
        .at(at)
        .expect("armed")
        .1
        .detour
        .clone()
        .expect("a detour");
    let escape = detour.escape().expect("words are read");
    assert_eq!(rig.byte(escape), INT3);
    // The hit at the escape is a hit of the probepoint, and resumes after the members.
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(escape), RESUME);
    assert_eq!(cpu.regs.rip, detour.tail().0);
    let seen = cpu.events();
    let reported: Vec<_> = seen
        .iter()
        .map(|event| (event.probe, event.regs.rip))
        .collect();
    assert_eq!(reported, [(ids[0], at.0), (ids[1], at.0)]);
    for id in &ids[..2] {
        assert_eq!(rig.counts(*id).hits, 1);
    }
}

#[test]
fn a_detour_that_was_left_still_leads_on() {
    let mut rig = Rig::optimizing();
    let words = Actions {
        capture: vec![Item::Stack(1)],
        ..Actions::default()
    };
    let id = rig.register(&[acting(ENTRY, words)])[0];
    let table = rig.guest.table();
    let detour = table.at(rig.addr(id)).expect("armed").1.detour.clone();
    let detour = detour.expect("a detour");
    rig.unregister(&[id]).unwrap();
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(detour.escape().expect("words are read")), RESUME);
    assert_eq!(cpu.regs.rip, detour.tail().0);
    assert!(cpu.events().is_empty());
}

#[test]
fn int3_of_a_detour_that_was_left_still_comes_to_us() {
    let mut rig = Rig::optimizing_with_gate();
    let gate = rig.gate().at();
    let (original, patch) = (rig.guest.read::<2>(gate), GateHead::patch(GATE_PORT));
    let id = rig.one(ENTRY);
    assert_eq!(rig.guest.read(gate), patch);
    rig.unregister(&[id]).unwrap();
    assert_eq!(rig.guest.read(gate), original);
    let words = Actions {
        capture: vec![Item::Stack(1)],
        ..Actions::default()
    };
    let id = rig.register(&[acting(ENTRY, words)])[0];
    assert!(is_optimized(&rig, id));
    rig.unregister(&[id]).unwrap();
    // A task may have been interrupted just before the int3; without the gate it would kill the guest.
    assert_eq!(rig.guest.read(gate), patch);
}

#[test]
fn another_probe_under_the_jump_takes_it_away_and_finds_the_text_as_it_was() {
    let mut rig = Rig::optimizing();
    let outer = rig.one(SHORT);
    let at = rig.addr(outer);
    assert!(is_optimized(&rig, outer));
    let inner = rig.one(&format!("{SHORT}+1"));
    let inside = rig.addr(inner);
    assert_eq!(inside, at.wrapping_add(1));
    assert_eq!(why(&rig, outer), Unoptimized::Neighbour { at: inside });
    // No probe is under the inner probe's own jump.
    assert_eq!(rig.byte(at), INT3);
    assert!(is_optimized(&rig, inner));
    target(&rig, inside);
    rig.unregister(&[inner]).unwrap();
    assert!(is_optimized(&rig, outer));
    // Instruction boundaries are checked in the text without the jump.
    let result = rig.changes_nothing(|rig| rig.try_register(&[spec(&format!("{SHORT}+2"))]));
    let (_, why) = refusal(result);
    assert!(matches!(why, Refused::Boundary(_)), "{why}");
}

#[test]
fn an_int3_in_the_bytes_of_a_jump_leads_to_the_copy() {
    let mut rig = Rig::optimizing();
    let id = rig.one(SHORT);
    let at = rig.addr(id);
    assert!(is_optimized(&rig, id));
    let inside = at.wrapping_add(1);
    assert_eq!(rig.byte(inside), INT3, "the displacement's low byte");
    let table = rig.guest.table();
    let detour = table
        .at(at)
        .expect("armed")
        .1
        .detour
        .clone()
        .expect("a detour");
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(inside), RESUME);
    assert_eq!(Some(Gva(cpu.regs.rip)), detour.resume(inside));
    // A task that was about to go there when the jump was removed finds the original text.
    rig.unregister(&[id]).unwrap();
    assert_eq!(cpu.hit(inside), RESUME);
    assert_eq!(Gva(cpu.regs.rip), inside);
    assert!(cpu.events().is_empty());
}

#[test]
fn nobody_is_ever_left_under_a_jump() {
    let mut rig = Rig::optimizing();
    let at = rig.at("filler_000", 0);
    let word = DATA_VIRT.wrapping_add(0x900);
    // The third instruction begins at a byte that no target of the jump turns into an int3.
    let bare = at.wrapping_add(4);
    rig.guest.write(word, &bare.0.to_le_bytes());
    let id = rig.one(SHORT);
    assert_eq!(why(&rig, id), Unoptimized::Interrupted);
    assert_eq!(rig.byte(at), INT3);
    let looks = |rig: &mut Rig, calls: u32| {
        rig.stops_of(|rig| {
            for _ in 0..calls {
                rig.registry.retry_jumps(&*rig.guest);
            }
        })
    };
    // The next looks are after 1, 2, 4, ... calls.
    assert_eq!(looks(&mut rig, 7), 3);
    assert!(!is_optimized(&rig, id));
    // The same for a virtual CPU at that address.
    rig.guest.write(word, &[0; 8]);
    let standing = |rip| standing(rip, STACK);
    rig.guest.stand(&[standing(bare)]);
    assert_eq!(looks(&mut rig, 8), 1);
    assert!(!is_optimized(&rig, id));
    rig.guest.stand(&[standing(at.wrapping_add(5))]);
    assert_eq!(looks(&mut rig, 16), 1);
    assert!(is_optimized(&rig, id));
    assert_eq!(looks(&mut rig, 100), 0);
}

#[test]
fn what_the_guest_writes_while_it_is_looked_through_counts() {
    let mut rig = Rig::optimizing();
    let at = rig.at("filler_000", 0);
    let word = DATA_VIRT.wrapping_add(0x900);
    let bare = at.wrapping_add(4);
    // All memory has been scanned, and the guest is about to stop.
    rig.guest
        .meanwhile(move |guest| guest.write(word, &bare.0.to_le_bytes()));
    let id = rig.one(SHORT);
    assert_eq!(why(&rig, id), Unoptimized::Interrupted);
    assert_eq!(rig.byte(at), INT3);
    rig.guest.write(word, &[0; 8]);
    rig.registry.retry_jumps(&*rig.guest);
    assert!(is_optimized(&rig, id));
    // Guest writes are not logged any more.
    assert_eq!(crate::world::World::written(&*rig.guest), None);
}

#[test]
fn a_look_that_does_not_know_what_was_written_proves_nothing() {
    let mut rig = Rig::optimizing();
    rig.guest.forget_writes(true);
    let id = rig.one(SHORT);
    assert_eq!(why(&rig, id), Unoptimized::Interrupted);
    rig.guest.forget_writes(false);
    rig.registry.retry_jumps(&*rig.guest);
    assert!(is_optimized(&rig, id));
}

#[test]
fn the_guest_does_not_stand_still_for_a_look_at_more_than_so_many_pages() {
    let pages: Vec<_> = (0..MODULE_PAGES)
        .map(|n| MODULE_FRAMES.wrapping_add(n * 4096))
        .collect();
    let read = |written: usize| {
        let mut rig = Rig::optimizing();
        let pages = pages.clone();
        rig.guest.meanwhile(move |guest| {
            guest.mem.reads.set(0);
            guest.pretend_written(pages.into_iter().cycle().take(written).collect());
        });
        let id = rig.one(SHORT);
        (is_optimized(&rig, id), rig.guest.mem.reads.get())
    };
    let (optimized, few) = read(0);
    assert!(optimized);
    let (optimized, most) = read(STOPPED_MAX);
    assert!(optimized && most >= few + STOPPED_MAX as u64);
    let (optimized, too_many) = read(STOPPED_MAX + 1);
    assert!(!optimized && too_many <= few, "{too_many} reads");
}

#[test]
fn the_knob_takes_jumps_away_and_puts_them_back() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&[spec(ENTRY), spec("r filler_002")]);
    assert!(is_optimized(&rig, ids[0]) && is_optimized(&rig, ids[1]));
    rig.registry.set_optimization(false, &*rig.guest).unwrap();
    for id in &ids {
        assert_eq!(why(&rig, *id), Unoptimized::Off);
        assert_eq!(rig.byte(rig.addr(*id)), INT3);
    }
    rig.registry.set_optimization(true, &*rig.guest).unwrap();
    assert!(is_optimized(&rig, ids[0]) && is_optimized(&rig, ids[1]));
}

#[test]
fn a_jump_that_was_asked_for_is_had_or_refused() {
    let mut rig = Rig::optimizing();
    let forced = |definition| ProbeSpec {
        mechanism: Some(Mechanism::Optimized),
        ..spec(definition)
    };
    let id = rig.register(&[forced(ENTRY)])[0];
    assert!(is_optimized(&rig, id));
    // An instruction with an exception-table entry.
    let specs = [spec(SHORT), forced("p sites+0x40")];
    let (index, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&specs)));
    assert_eq!(index, 1);
    assert!(matches!(why, Refused::Unoptimized { .. }), "{why}");
}

#[test]
fn a_jump_the_guest_wrote_over_is_gone_and_never_written_again() {
    let mut rig = Rig::optimizing();
    let id = rig.one(ENTRY);
    let at = rig.addr(id);
    rig.guest.write(at.wrapping_add(2), &[0x90]);
    assert_eq!(rig.state(id), ProbeState::Gone);
    let left = text(&rig, at);
    rig.unregister(&[id]).unwrap();
    assert_eq!(text(&rig, at), left);
}

#[test]
fn a_span_ends_with_its_function() {
    let rig = Rig::optimizing();
    let last = rig.at("vfs_read", 0x18);
    let mut code = vec![0; 0x1a];
    let start = rig.at("vfs_read", 0);
    for (n, byte) in (0..).zip(code.iter_mut()) {
        *byte = rig.byte(start.wrapping_add(n));
    }
    assert!(Span::find(&code, start, last).is_err());
}

#[test]
fn detours_are_given_to_others_only_when_nobody_can_be_inside() {
    let mut rig = Rig::optimizing();
    let id = rig.one(ENTRY);
    let at = rig.addr(id);
    let first = target(&rig, at);
    let code = rig.guest.read::<64>(first);
    // A task was interrupted in the detour.
    let inside = first.wrapping_add(5);
    rig.guest
        .write(DATA_VIRT.wrapping_add(0x900), &inside.0.to_le_bytes());
    rig.unregister(&[id]).unwrap();
    let mut places = std::collections::BTreeSet::new();
    let mut again = 0;
    // Until there is no room left, and then until many places have been used again.
    for _ in 0..12_000 {
        if again > 100 {
            break;
        }
        let ids = rig.register(&[spec(ENTRY), spec("r vfs_read")]);
        assert!(is_optimized(&rig, ids[0]) && is_optimized(&rig, ids[1]));
        let place = target(&rig, at);
        assert_ne!(place, first);
        again += usize::from(!places.insert(place));
        rig.unregister(&ids).unwrap();
    }
    assert!(again > 100, "{again}");
    assert_eq!(rig.guest.read::<64>(first), code);
}

#[test]
fn what_finds_no_room_takes_none_however_often_it_is_tried() {
    let mut rig = Rig::optimizing();
    let mut functions = (2..200).step_by(2).map(|n| format!("filler_{n:03}"));
    // Until the room for instances is used up.
    for function in &mut functions {
        let id = rig.one(&format!("r4096 {function}"));
        if rig.info(id).unoptimized == Some(Unoptimized::NoRoom) {
            break;
        }
    }
    let before = rig.registry.usage();
    for _ in 0..100 {
        rig.registry.commit(&*rig.guest).expect("the guest stops");
        assert_eq!(rig.registry.usage(), before);
    }
    let id = rig.one(&format!("p {}", functions.next().expect("one more")));
    assert_eq!(rig.info(id).unoptimized, None);
}

#[test]
fn lock_prefix_that_may_come_back_is_not_covered() {
    // `xor eax, eax`, followed by an instruction whose prefix is in `.smp_locks`.
    let kernel = |prefix| {
        let mut sections = probed::sections();
        let code = &mut sections[0].data[0x64c..][..9];
        code.copy_from_slice(&[0x66, 0x90, 0x31, 0xc0, prefix, 0x48, 0x83, 0x07, 1]);
        kernel::elf(&sections, &[])
    };
    for (prefix, may_come) in [(0xf0, false), (0x3e, true)] {
        let mut rig = Rig::boot_whole(&kernel(prefix));
        rig.go_live(None);
        let id = rig.one("p sites+0x4e");
        let at = rig.addr(id).wrapping_add(2);
        let why = rig.info(id).unoptimized;
        let refused = Unoptimized::Forbidden {
            at,
            why: Forbidden::LockPrefix,
        };
        assert_eq!(why, may_come.then_some(refused), "{prefix:#x}");
    }
}

#[test]
fn a_disabled_probe_has_been_heard_out_and_is_silent() {
    let mut rig = Rig::optimizing();
    let ids = rig.register(&[spec(ENTRY), spec(SHORT)]);
    let heard = |rig: &Rig, id| {
        let source = rig.registry.code.sources.get(id).expect("it records");
        !source.is_to_be_silenced()
    };
    rig.disable(&ids[..1]).unwrap();
    assert_eq!(rig.guest.collected.get(), 1);
    assert!(ids.iter().all(|id| heard(&rig, *id)));
    // No more records are awaited.
    rig.disable(&ids[..1]).unwrap();
    assert_eq!(rig.guest.collected.get(), 1);
    rig.registry.set_armed(false, &*rig.guest).unwrap();
    assert_eq!(rig.guest.collected.get(), 2);
    rig.registry.set_armed(true, &*rig.guest).unwrap();
    rig.enable(&ids).unwrap();
    rig.disable(&ids).unwrap();
    assert_eq!(rig.guest.collected.get(), 3);
    assert!(ids.iter().all(|id| heard(&rig, *id)));
}

#[test]
fn int3_of_a_detour_that_was_not_used_again_after_all_still_comes_to_us() {
    let mut rig = Rig::optimizing_with_gate();
    let gate = rig.gate().at();
    let words = Actions {
        capture: vec![Item::Stack(1)],
        ..Actions::default()
    };
    let id = rig.register(&[acting(ENTRY, words)])[0];
    let table = rig.guest.table();
    let detour = table.at(rig.addr(id)).expect("armed").1.detour.clone();
    let detour = detour.expect("a detour");
    rig.disable(&[id]).unwrap();
    // A task was interrupted in the detour; the jump cannot be written again, because the guest changes the
    // text.
    let inside = rig.addr(id).wrapping_add(1);
    rig.guest
        .meanwhile(move |guest| guest.write(inside, &[0x99]));
    rig.enable(&[id]).expect_err("the text has changed");
    assert_eq!(rig.guest.read(gate), GateHead::patch(GATE_PORT));
    let mut cpu = Cpu::new(&rig);
    assert_eq!(cpu.hit(detour.escape().expect("words are read")), RESUME);
    assert_eq!(cpu.regs.rip, detour.tail().0);
}
