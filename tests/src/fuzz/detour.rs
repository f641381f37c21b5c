//! Detours: the instructions that a jump displaces, the calls of a detour, and its records.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{
    BuildError, CELL, Capture, Detour, EntryCapture, Fetching, Header, InstanceLayout, JUMP,
    Layout, Member, Part, Readers, Recorder, Ring, Span, StackFields, TaskFields,
};
use hvprobe_arch::fetch::{Base, Fetched, Memory, Pointer, Read};
use hvprobe_arch::insn::MAX_LEN;
use hvprobe_arch::regs::{Gpr, RegisterSet};
use iced_x86::{Decoder, DecoderOptions, FlowControl};

use super::input::Input;

/// Maximum length of a function.
const FUNCTION: usize = 256;
/// Addresses of functions and detours, within reach of each other.
const TEXT: u64 = 0xffff_ffff_8100_0000;
const DETOURS: u64 = 0xffff_ffff_8040_0000;
/// Address of the kernel's loads.
const LOADS: u64 = TEXT + 0x10_0000;

/// Builds a detour for a probepoint in a function of arbitrary bytes. The first byte is the offset of the
/// probepoint; the next two are the wanted offset of the detour in its region. Then follow the code, and the memory
/// that the detour reads.
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
        // Matching windows are at most 64 KiB apart.
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
    let capture = Capture {
        fetching: fetching(&mut input),
        stack_copy: None,
        ..Capture::default()
    };
    let member = Member {
        conditions: &[],
        vetoed: Gva(DETOURS + 128),
        part: Part::Record {
            source: 1,
            capture: &capture,
            lost: Gva(DETOURS + 136),
            waits: false,
        },
    };
    let members = if capture.fetching.is_some() {
        &[member][..]
    } else {
        &[]
    };
    let recorder = match Recorder::new(&span, &ring, members) {
        Ok(recorder) => recorder,
        Err(error) => {
            assert!(may_be_refused(&capture, &error), "{error}");
            return false;
        }
    };
    let detour = match recorder.place(target) {
        Ok(detour) => detour,
        // An instruction's operand may be out of reach.
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
    assert_eq!(detour.escape().is_some(), capture.fetching.is_some());
    if let Some(fetching) = &capture.fetching {
        follow(&detour, &fetching.readers);
    }
    true
}

/// Checks the code of a detour except its copies of instructions: the code branches only to itself and calls only
/// the loads.
fn follow(detour: &Detour, readers: &Readers) {
    let escape = detour.escape().unwrap_or(detour.tail());
    let end = detour.at().wrapping_add(detour.code().len() as u64);
    let cold = escape.wrapping_add(1);
    for part in [detour.at()..detour.tail(), cold..end] {
        let [from, to] = [part.start, part.end].map(|at| {
            usize::try_from(at.0 - detour.at().0).unwrap_or_else(|error| panic!("{at}: {error}"))
        });
        let code = &detour.code()[from..to];
        let decoder = Decoder::with_ip(64, code, part.start.0, DecoderOptions::NONE);
        for instruction in decoder {
            assert!(!instruction.is_invalid(), "at {:x}", instruction.ip());
            let target = Gva(instruction.near_branch_target());
            match instruction.flow_control() {
                FlowControl::Next => {}
                FlowControl::Call => {
                    let known = readers.kernel.iter().chain(&readers.process);
                    assert!(known.into_iter().any(|load| *load == target), "{target}");
                }
                FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
                    assert!((detour.at()..end).contains(&target), "{target}");
                }
                other => panic!("{other:?} at {:x}", instruction.ip()),
            }
        }
    }
}

/// Reads from the input which memory the detour fetches; `None` if it fetches none.
fn fetching(input: &mut Input<'_>) -> Option<Fetching> {
    let count = usize::from(input.u8() & 0x3f);
    let mut items = Vec::new();
    while items.len() < count {
        items.push(item(input));
    }
    let loads = |from: u64| [0, 1, 2, 3].map(|size| Gva(LOADS + from + 0x20 * size));
    let readers = Readers {
        kernel: loads(0x10),
        process: loads(0),
        kernel_half: Gva(0xffff_8000_0000_0000),
        process_end: Gva(0x7fff_ffff_f000),
        current: 0x1000,
        disabled: 0x9b8,
    };
    (count > 0).then_some(Fetching { readers, items })
}

/// Reads an item. A byte selects its base and the number of pointers. Each pointer has a byte for its memory and
/// the width of its offset, and then the offset. Two bytes select what is read.
fn item(input: &mut Input<'_>) -> Fetched {
    let kind = input.u8();
    let register = Gpr::ALL[usize::from(kind >> 4)];
    let base = match kind & 3 {
        0 => Base::Register(register),
        1 => Base::Constant(input.u64()),
        2 => Base::Task,
        // Rarely, because a detour with it is always refused.
        _ if kind == 0xff => Base::Entry(register),
        _ => Base::Register(Gpr::Rsp),
    };
    let pointers = (0..kind >> 2 & 3).map(|_| {
        let how = input.u8();
        Pointer {
            offset: match how & 4 {
                0 => input.i32().into(),
                _ => input.u64().cast_signed(),
            },
            memory: match how & 3 {
                0 => Memory::Kernel,
                1 => Memory::User,
                _ => Memory::Either,
            },
        }
    });
    let pointers = pointers.collect();
    let read = input.u16();
    let len = read & 0x3ff;
    let read = match read >> 15 {
        0 => Read::Bytes(len),
        _ => Read::Text(len),
    };
    Fetched {
        base,
        pointers,
        read,
    }
}

/// Returns whether `capture` justifies `error`.
fn may_be_refused(capture: &Capture, error: &BuildError) -> bool {
    let items = capture.fetching.as_ref().map_or(&[][..], |it| &it.items);
    let words = |item: &Fetched| match item.read {
        Read::Bytes(len) | Read::Text(len) => usize::from(len) / 8 + 1,
    };
    match error {
        BuildError::TooManyItems { count } => *count == items.len() && *count > 32,
        // The limit is the number of words in a record's cells without the marks, less the record's fixed part.
        BuildError::TooLarge { .. } => items.iter().map(words).sum::<usize>() > 16 * 7 - 20,
        BuildError::FetchAtReturn => items.iter().any(|it| matches!(it.base, Base::Entry(_))),
        BuildError::TextOfNothing => items
            .iter()
            .any(|it| it.pointers.is_empty() && matches!(it.read, Read::Text(_))),
        _ => false,
    }
}

/// Decodes any bytes as a record of fetched memory. The items are read from the input as in [`detour`].
pub fn fetched(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let fetching = fetching(&mut input);
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::Rdi]),
        fetching,
        ..Capture::default()
    };
    let layout = match Layout::new(&capture) {
        Ok(layout) => layout,
        Err(error) => {
            assert!(may_be_refused(&capture, &error), "{error}");
            return false;
        }
    };
    let record = input.rest();
    let _ = layout.decode(record);
    let is_whole = record.len() >= layout.size();
    let items = capture.fetching.as_ref().map_or(&[][..], |it| &it.items);
    for (index, item) in items.iter().enumerate() {
        let (most, room) = match item.read {
            Read::Bytes(len) => (usize::from(len), usize::from(len).next_multiple_of(8)),
            Read::Text(most) => (usize::from(most), 8 * (usize::from(most) / 8 + 1)),
        };
        for len in [most, 0, 3, room + 9] {
            const UNTOUCHED: u8 = 0xa5;
            let mut bytes = vec![UNTOUCHED; len];
            let found = layout.fetched(record, index, &mut bytes);
            assert!(found.is_ok() || !is_whole, "{found:?}");
            let behind = bytes.get(room..).unwrap_or_default();
            assert!(behind.iter().all(|byte| *byte == UNTOUCHED));
            if found == Ok(false) {
                assert!(bytes.iter().all(|byte| *byte == UNTOUCHED));
            }
            let text = layout.text(record, index, &mut bytes);
            assert!(text.is_ok() || !is_whole, "{text:?}");
            if found.is_ok() && text.is_ok() {
                assert_eq!(found == Ok(true), text.is_ok_and(|text| text.is_some()));
            }
            let Ok(Some(header)) = text else {
                continue;
            };
            let end = usize::from(header.len);
            assert!(end <= most.min(len), "{end} of {len}");
            assert!(!bytes[..end].contains(&0));
            // The text ends at its zero, or is truncated.
            assert!(end == most.min(len) || bytes[end] == 0 && !header.truncated);
        }
    }
    // There is no item after the last.
    let mut bytes = [0; 8];
    let other = layout.fetched(record, items.len(), &mut bytes);
    assert!(other.is_err() || other == Ok(false));
    let other = layout.text(record, items.len(), &mut bytes);
    assert!(other.is_err() || other == Ok(None));
    is_whole
}

/// Decodes any bytes as a record and as an instance. The first two bytes select what these contain.
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
        stack_copy: (asked & 0x9000 == 0x1000).then_some(StackFields {
            current: 0x1000,
            stack: 32,
        }),
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
        let copy = layout.stack_copy(rest);
        let is_whole = rest.len() >= usize::from(header.cells) * CELL;
        assert_eq!(copy.is_ok(), is_whole || capture.stack_copy.is_none());
        if let Ok(Some(copy)) = copy {
            // Words are aligned, so of two words that overlap, the copy has at most one.
            for at in [record.tsc, record.regs.rsp, record.regs.rdi, 0, u64::MAX].map(Gva) {
                let next = copy.word(at.wrapping_add(4));
                assert!(copy.word(at).is_none() || next.is_none(), "{at}");
            }
        }
    }
    let instances = InstanceLayout::new(&entry).unwrap_or_else(|error| panic!("{error}"));
    let _ = instances.read(rest);
    record.is_ok()
}
