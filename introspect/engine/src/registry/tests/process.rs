//! Memory of the current process at a hit.

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::entry;
use hvprobe_arch::regs::Gpr;
use hvprobe_fixtures::{MODULE_FRAMES, STACK};
use hvprobe_hit::event::EventKind;
use hvprobe_spec::{Change, Decision, Hold, Item, Then};

use super::*;

const PAGE: u64 = 4096;
/// The first of four pages of the process: a writable one, a read-only one, a page of the kernel, and an
/// unmapped one.
const AT: Gva = Gva(0x7f00_0000_1000);
/// Address of the process's page tables, which are followed by its frames.
const ROOT: Gpa = MODULE_FRAMES;

fn frame(page: u64) -> Gpa {
    ROOT.wrapping_add((4 + page) * PAGE)
}

/// Returns the address of a page's entry.
fn entry_of(page: u64) -> Gpa {
    let index = (AT.0 >> 12) % 512 + page;
    ROOT.wrapping_add(3 * PAGE + index * 8)
}

/// Creates a guest in which a process runs with page tables as in kernels with page-table isolation: after an
/// entry into the kernel, CR3 holds the kernel's copy, with an address-space number.
fn rig() -> (Rig, u64) {
    let rig = Rig::live();
    let mem = &rig.guest.mem;
    let table = entry::PRESENT | entry::WRITABLE | entry::USER | entry::ACCESSED;
    for (n, shift) in [39, 30, 21].into_iter().enumerate() {
        let here = ROOT.wrapping_add(n as u64 * PAGE + (AT.0 >> shift) % 512 * 8);
        let next = ROOT.0 + (n as u64 + 1) * PAGE;
        mem.write_u64(here, next | table).unwrap();
    }
    let page = entry::PRESENT | entry::ACCESSED;
    for (n, bits) in [
        (0, entry::WRITABLE | entry::USER),
        (1, entry::USER),
        (2, entry::WRITABLE),
    ] {
        mem.write_u64(entry_of(n), frame(n).0 | page | bits)
            .unwrap();
        mem.write(frame(n), &[0x10 + n.to_le_bytes()[0]; 4096])
            .unwrap();
    }
    (rig, ROOT.0 | 0x801)
}

fn word(base: Gpr, offset: u64) -> Item {
    Item::Memory {
        base,
        offset: offset.cast_signed(),
        len: 8,
    }
}

fn poke(base: Gpr, offset: u64) -> Change {
    Change::Memory {
        base: Some(base),
        offset: offset.cast_signed(),
        bytes: b"12345678".as_slice().into(),
    }
}

fn capturing(capture: Vec<Item>) -> Actions {
    Actions {
        capture,
        ..Actions::default()
    }
}

#[test]
fn process_is_read_through_its_own_tables() {
    let (mut rig, cr3) = rig();
    let actions = capturing(vec![
        word(Gpr::Rsi, 0),
        // Across a page boundary.
        word(Gpr::Rsi, PAGE - 4),
        // Into an unmapped page.
        word(Gpr::Rsi, 3 * PAGE - 4),
        word(Gpr::Rsi, 3 * PAGE),
        Item::Stack(0),
        word(Gpr::Rdi, 0),
    ]);
    let id = rig.register(&[acting(EMULATED, actions)])[0];
    rig.guest.write(STACK, &[0x22; 8]);
    let mut cpu = Cpu::new(&rig);
    cpu.cr3 = Some(cr3);
    cpu.regs.rsi = AT.0;
    // Above all addresses of processes, below the kernel's.
    cpu.regs.rdi = 1 << 62;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    assert_eq!(cpu.cr3_asked.get(), 1);
    let events = cpu.events();
    let captured = &events[0].captured;
    let mixed = [[0x10; 4], [0x11; 4]].concat();
    let expected = [&[0x10; 8][..], &mixed, &[0; 16], &[0x22; 8], &[0; 8]].concat();
    assert_eq!(captured.bytes(), expected);
    let unreadable: Vec<_> = (0..6).map(|n| captured.is_unreadable(n)).collect();
    assert_eq!(unreadable, [false, false, true, true, false, true]);
    assert_eq!(rig.counts(id).errors, 0);
}

#[test]
fn tables_are_asked_for_only_where_the_process_is_reached() {
    let (mut rig, cr3) = rig();
    let id = rig.register(&[spec(EMULATED)])[0];
    let mut cpu = Cpu::new(&rig);
    assert!(!cpu.handler.reaches_process());
    let other = rig.register(&[acting(BOOSTED, capturing(vec![word(Gpr::Rsi, 0)]))])[0];
    cpu.cr3 = Some(cr3);
    cpu.regs.rsi = STACK.0;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    assert!(cpu.handler.reaches_process());
    assert_eq!(cpu.hit(rig.addr(other)), RESUME);
    assert_eq!(cpu.cr3_asked.get(), 0);
    // Without CR3 the memory is unreadable, even if the kernel's own tables map something there.
    cpu.regs.rsi = AT.0;
    cpu.cr3 = None;
    assert_eq!(cpu.hit(rig.addr(other)), RESUME);
    assert_eq!(cpu.cr3_asked.get(), 1);
    let events = cpu.events();
    let unreadable = |n: usize| events[n].captured.is_unreadable(0);
    assert!(!unreadable(1) && unreadable(2));
}

#[test]
fn process_is_changed_where_it_could_write_itself() {
    let (mut rig, cr3) = rig();
    let changes = |offset| Actions {
        changes: vec![poke(Gpr::Rsi, offset)],
        ..Actions::default()
    };
    let mem = rig.guest.mem.clone();
    let read = |page: u64, offset: u64| {
        let mut bytes = [0; 8];
        let at = frame(page).wrapping_add(offset);
        mem.read(at, &mut bytes).unwrap();
        bytes
    };
    // The offset, and whether it is writable.
    for (offset, written) in [
        (8, true),
        (PAGE - 4, false),
        (PAGE, false),
        (2 * PAGE, false),
        (3 * PAGE, false),
    ] {
        let id = rig.register(&[acting(EMULATED, changes(offset))])[0];
        let before = mem.read_u64(entry_of(1)).unwrap();
        let mut cpu = Cpu::new(&rig);
        cpu.cr3 = Some(cr3);
        cpu.regs.rsi = AT.0;
        assert_eq!(cpu.hit(rig.addr(id)), RESUME);
        assert_eq!(rig.counts(id).errors, u64::from(!written), "{offset:#x}");
        assert_eq!(mem.read_u64(entry_of(1)), Ok(before));
        rig.unregister(&[id]).unwrap();
    }
    assert_eq!(&read(0, 8), b"12345678");
    // The kernel sees the dirty bit.
    let dirty = mem.read_u64(entry_of(0)).unwrap() & entry::DIRTY;
    assert_eq!(dirty, entry::DIRTY);
    for (page, offset, byte) in [(0, PAGE - 8, 0x10), (1, 0, 0x11), (2, 0, 0x12)] {
        assert_eq!(read(page, offset), [byte; 8]);
    }
}

#[test]
fn process_is_reached_after_the_instruction_at_the_return_and_by_a_decision() {
    let (mut rig, cr3) = rig();
    let post = Actions {
        post: true,
        ..capturing(vec![word(Gpr::Rsi, 0)])
    };
    let asking = Actions {
        hold: Some(Hold::Ask {
            deadline: std::time::Duration::from_secs(1),
            default: Decision::default(),
        }),
        ..Actions::default()
    };
    let returning = Actions {
        capture_at_return: vec![word(Gpr::Rsi, 0)],
        changes: vec![poke(Gpr::Rsi, 0x18)],
        ..Actions::default()
    };
    let ids = rig.register(&[
        acting(EMULATED, post),
        acting(BOOSTED, asking),
        acting("r filler_002", returning),
    ]);
    let mut cpu = Cpu::new(&rig);
    cpu.cr3 = Some(cr3);
    cpu.regs.rsi = AT.0;
    assert_eq!(cpu.hit(rig.addr(ids[0])), RESUME);
    let decision = Decision {
        changes: vec![poke(Gpr::Rsi, 0x20)],
        then: Then::Proceed,
    };
    cpu.hit(rig.addr(ids[1]));
    assert_eq!(cpu.resume(&decision), RESUME);
    let back = rig.addr(ids[0]).0 + 1;
    cpu.regs.rsp = STACK.0;
    rig.guest.write(STACK, &back.to_le_bytes());
    assert_eq!(cpu.hit(rig.addr(ids[2])), RESUME);
    let trampoline = Gva(u64::from_le_bytes(rig.guest.read(STACK)));
    cpu.regs.rsp = STACK.0 + 8;
    assert_eq!(cpu.hit(trampoline), RESUME);
    assert_eq!(cpu.regs.rip, back);
    let events = cpu.events();
    for event in &events {
        let whole = !event.captured.bytes().is_empty();
        assert!(!whole || event.captured.bytes() == [0x10; 8], "{event:?}");
    }
    assert!(matches!(events.last().unwrap().kind, EventKind::Return(_)));
    let mut written = [0; 16];
    rig.guest
        .mem
        .read(frame(0).wrapping_add(0x18), &mut written)
        .unwrap();
    assert_eq!(&written, b"1234567812345678");
    assert!(ids.iter().all(|id| rig.counts(*id).errors == 0));
}
