use super::*;
use crate::detour::EntryCapture;
use expect_test::{Expect, expect};
use proptest::prelude::*;

fn task() -> TaskFields {
    TaskFields {
        current: 0x1_fbc0,
        pid: 0x9a0,
        tgid: 0x9a4,
        comm: 0xb80,
    }
}

fn all() -> (Capture, EntryCapture) {
    let capture = Capture {
        registers: RegisterSet::default(),
        stack: Vec::new(),
        task: Some(task()),
        cpu: Some(0x3_0000),
        fetching: None,
        stack_copy: None,
    };
    let entry = EntryCapture {
        registers: RegisterSet::default(),
        stack: (0..31).collect(),
        current: None,
        cpu: Some(0x3_0000),
    };
    (capture, entry)
}

fn set_cells(bytes: &mut [u8], cells: u16) {
    bytes[IDENTITY + 3] = cells.try_into().unwrap();
}

/// Returns a finished record of `cells` cells that contain zeros.
fn blank(cells: u16) -> Vec<u8> {
    let mut bytes = vec![0; usize::from(cells) * CELL];
    set_cells(&mut bytes, cells);
    bytes
}

#[test]
fn the_largest_records_fit() {
    let (capture, entry) = all();
    let layout = Layout::of_return(&capture, &entry).unwrap();
    assert_eq!((layout.size(), layout.cells()), (664, 11));
    assert!(layout.cells() <= MAX_RECORD_CELLS);
}

#[test]
fn fields_are_where_the_layout_says() {
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::R9, Gpr::Rax, Gpr::Rsp]),
        stack: vec![3, 0],
        ..all().0
    };
    let layout = Layout::new(&capture).unwrap();
    assert_eq!((layout.size(), layout.cells()), (96, 2));
    let mut bytes = Vec::new();
    for word in [
        0x0200_0007_0000_1002, // 2 cells, source 7, position + cells
        0x1111,                // time
        0x0000_0005_0000_0246, // CPU 5, flags
        0x0000_0011_0000_0022, // tgid, pid
        u64::from_le_bytes(*b"comm\0abc"),
        u64::from_le_bytes(*b"12345678"),
        0xa0,
        0x5b,
        0, // no mark
        0x90,
        0x33,
        0x44,
    ] {
        bytes.extend(u64::to_le_bytes(word));
    }
    let record = layout.decode(&bytes).unwrap();
    assert_eq!(record.source, 7);
    assert_eq!((record.cpu, record.tsc), (Some(5), 0x1111));
    let found = record.task.unwrap();
    assert_eq!((found.pid, found.tgid), (0x22, 0x11));
    assert_eq!(&found.comm, b"comm\0abc12345678");
    let regs = Regs {
        rflags: 0x246,
        rax: 0xa0,
        rsp: 0x5b,
        r9: 0x90,
        ..Regs::default()
    };
    assert_eq!(record.regs, regs);
    assert_eq!(record.stack.as_slice(), [0x33, 0x44]);
    assert_eq!(record.call, None);
}

#[test]
fn only_the_first_cell_of_a_record_has_a_mark() {
    let (capture, entry) = all();
    let layout = Layout::of_return(&capture, &entry).unwrap();
    let offsets = |values: &Values| -> Vec<usize> {
        let registers = values.registers().map(|(_, at)| at);
        registers.chain(values.words()).collect()
    };
    let call = layout.call().unwrap();
    let mut used = offsets(layout.values());
    used.extend([call.id(), call.return_address(), call.values.flags()]);
    used.extend(offsets(&call.values));
    assert!(used.len() > 60 && used.iter().all(|at| at % CELL != 0));
    let copied: Vec<usize> = call.copied().collect();
    assert_eq!(copied[0], call.entry_tsc());
    assert_eq!(copied[1], call.values.flags());
    assert_eq!(copied[2..], offsets(&call.values));
}

#[test]
fn a_mark_has_its_position() {
    let header = Header::of_mark(0x0300_0009_ffff_fffe).unwrap();
    assert_eq!((header.source, header.cells), (9, 3));
    for (position, is_there) in [
        (0xffff_fffb, true),
        (0x7_ffff_fffb, true),
        (0xffff_fffa, false),
        (0, false),
        (u64::MAX - 4, true),
        (u64::MAX, false),
    ] {
        assert_eq!(header.is_at(position), is_there, "{position:#x}");
    }
    // Only the half that is written last counts.
    for mark in [0, 1, 0xffff_ffff] {
        assert_eq!(Header::of_mark(mark), Err(Malformed::Unfinished));
    }
}

#[test]
fn what_is_no_record_is_refused() {
    let layout = Layout::new(&all().0).unwrap();
    let check = |bytes: &[u8], expected: Expect| {
        expected.assert_eq(&layout.decode(bytes).unwrap_err().to_string());
    };
    assert!(layout.decode(&blank(3)).is_ok());
    check(&[], expect!["0 bytes where at least 8 belong"]);
    check(
        &blank(3)[..190],
        expect!["190 bytes where at least 192 belong"],
    );
    check(
        &[0; 192],
        expect!["there is no finished record at this place"],
    );
    check(
        &blank(2),
        expect!["a record of 2 cells where one of 3 belongs"],
    );
    let mut huge = blank(3);
    set_cells(&mut huge, 0xff);
    check(
        &huge,
        expect!["a record of 255 cells where one of 90 belongs"],
    );
}

#[test]
fn a_source_that_records_cannot_name_is_refused() {
    assert_eq!(Header::identity(0xff_ffff, 2).unwrap(), 0x02ff_ffff);
    expect!["records cannot name source 16777216, only those below 2^24"]
        .assert_eq(&Header::identity(1 << 24, 2).unwrap_err().to_string());
}

#[test]
fn more_than_a_record_holds_is_refused() {
    let (capture, entry) = all();
    let words = Capture {
        stack: vec![0; 32],
        ..capture.clone()
    };
    expect!["32 words of the stack; at most 31 are possible"]
        .assert_eq(&Layout::new(&words).unwrap_err().to_string());
    let words = Capture {
        stack: vec![0],
        ..capture
    };
    expect!["stack words cannot be read without exits when a function returns, only at its entry"]
        .assert_eq(&Layout::of_return(&words, &entry).unwrap_err().to_string());
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(
        mut bytes in prop::collection::vec(any::<u8>(), 0..1200),
        finished in any::<bool>(),
        registers in any::<u16>(),
        words in 0_usize..32,
        of_return in any::<bool>(),
    ) {
        let registers = Gpr::ALL.into_iter().filter(|it| registers >> (*it as u8) & 1 == 1);
        let (capture, mut entry) = all();
        let mut capture = Capture { registers: registers.collect(), ..capture };
        let stack: Vec<u16> = entry.stack.drain(..words).collect();
        let layout = if of_return {
            Layout::of_return(&capture, &EntryCapture { stack, ..entry })
        } else {
            capture.stack = stack;
            Layout::new(&capture)
        };
        let layout = layout.unwrap();
        if finished && bytes.len() > IDENTITY + 3 {
            set_cells(&mut bytes, layout.cells());
        }
        match layout.decode(&bytes) {
            Ok(record) => {
                prop_assert!(bytes.len() >= layout.size());
                prop_assert_eq!(record.call.is_some(), of_return);
                let words_found = record.call.map_or(record.stack, |call| call.stack);
                prop_assert_eq!(words_found.as_slice().len(), words);
            }
            Err(Malformed::Short { have, want }) => prop_assert!(have < want),
            Err(_) => {}
        }
    }
}
