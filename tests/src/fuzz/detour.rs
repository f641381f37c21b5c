//! Detours: what a jump displaces, and what records say.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{
    Capture, EntryCapture, Header, InstanceLayout, JUMP, Layout, Recorder, Ring, Span, TaskFields,
};
use hvprobe_arch::insn::MAX_LEN;
use hvprobe_arch::regs::{Gpr, RegisterSet};

use super::input::Input;

/// As much of a function as is looked at.
const FUNCTION: usize = 256;
/// Where functions and detours lie: within reach of each other.
const TEXT: u64 = 0xffff_ffff_8100_0000;
const DETOURS: u64 = 0xffff_ffff_8040_0000;

/// Any bytes as a function, a probepoint in it and a place for the detour. The first two bytes say
/// where the probepoint is and how far into the region the detour is wanted; the rest is code.
pub fn detour(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let offset = u64::from(input.u8());
    let wanted = Gva(DETOURS + u64::from(input.u16()));
    let code = input.take(FUNCTION);
    let start = Gva(TEXT);
    let Ok(span) = Span::find(code, start, start.wrapping_add(offset)) else {
        return false;
    };
    let at = usize::try_from(offset).unwrap_or(usize::MAX);
    assert!((JUMP..JUMP + MAX_LEN).contains(&span.bytes().len()));
    assert_eq!(Some(span.bytes()), code.get(at..at + span.bytes().len()));
    assert!(span.interior().all(|offset| offset < JUMP as u64));

    let fitting = span.targets(wanted..wanted.wrapping_add(1 << 20)).next();
    let Some(target) = fitting else {
        // Between two windows that fit there are 64 KiB at most.
        panic!("no place for a detour in 1 MiB");
    };
    let jump = span.jump(target).unwrap_or_else(|error| panic!("{error}"));
    for offset in span.interior().filter(|offset| *offset <= 2) {
        assert_eq!(jump[usize::try_from(offset).unwrap_or(0)], 0xcc);
    }
    let ring = Ring {
        head: Gva(DETOURS),
        limit: Gva(DETOURS + 64),
        bell: Gva(DETOURS + 72),
        cells: Gva(DETOURS + 4096),
        capacity: 64,
        watermark: 32,
        doorbell_port: 0x91,
    };
    let recorder = Recorder::new(&span, &ring, &[]).unwrap_or_else(|error| panic!("{error}"));
    let detour = match recorder.place(target) {
        Ok(detour) => detour,
        // What an instruction refers to may be anywhere.
        Err(_) => return false,
    };
    assert_eq!(detour.code().len(), recorder.size());
    let inside = |at: Gva| {
        at.offset_from(target)
            .is_some_and(|offset| offset < recorder.size() as u64)
    };
    for displaced in span.instructions() {
        assert!(detour.resume(displaced.at()).is_some_and(inside));
    }
    assert!(inside(detour.tail()));
    true
}

/// Any bytes as a record and as an instance, of what the first two bytes ask for.
pub fn record(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let asked = input.u16();
    let registers = RegisterSet::from_iter(
        Gpr::ALL
            .into_iter()
            .enumerate()
            .filter_map(|(n, register)| (asked >> (n % 8) & 1 == 1).then_some(register)),
    );
    let stack: Vec<u16> = (0..asked >> 8 & 0x1f).collect();
    let capture = Capture {
        registers,
        stack: if asked & 0x8000 == 0 {
            stack.clone()
        } else {
            Vec::new()
        },
        task: (asked & 0x2000 != 0).then_some(TaskFields {
            current: 0x1000,
            pid: 8,
            tgid: 12,
            comm: 16,
        }),
        cpu: (asked & 0x4000 != 0).then_some(0x2000),
        fetching: None,
    };
    let entry = EntryCapture {
        registers,
        stack,
        current: None,
        cpu: (asked & 0x1000 != 0).then_some(0x2000),
    };
    let rest = input.rest();
    let layout = if asked & 0x8000 == 0 {
        Layout::new(&capture)
    } else {
        Layout::of_return(&capture, &entry)
    };
    let layout = layout.unwrap_or_else(|error| panic!("{error}"));
    let mark = rest.first_chunk().map(|mark| u64::from_le_bytes(*mark));
    let header = mark.map(Header::of_mark);
    let record = layout.decode(rest);
    if let Ok(record) = &record {
        let Some(Ok(header)) = header else {
            panic!("a record without a header: {header:?}");
        };
        assert!(header.is_at(u64::from(header.end).wrapping_sub(header.cells.into())));
        assert_eq!(record.source, header.source);
        assert!(rest.len() >= layout.size());
        assert_eq!(record.call.is_some(), asked & 0x8000 != 0);
    }
    let instances = InstanceLayout::new(&entry).unwrap_or_else(|error| panic!("{error}"));
    let _ = instances.read(rest);
    record.is_ok()
}
