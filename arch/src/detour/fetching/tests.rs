use super::*;
use crate::detour::{CELL, Capture, Layout};
use crate::fetch::{Base, Memory, Pointer};
use crate::regs::{Gpr, RegisterSet};

fn item(read: Read) -> Fetched {
    let pointer = Pointer {
        offset: 0,
        memory: Memory::Kernel,
    };
    Fetched {
        base: Base::Register(Gpr::Rdi),
        pointers: vec![pointer],
        read,
    }
}

fn layout(reads: &[Read]) -> Result<Layout, BuildError> {
    let readers = Readers {
        kernel: [Gva(0); 4],
        process: [Gva(0); 4],
        kernel_half: Gva(1 << 63),
        process_end: Gva(1 << 47),
        current: 0,
        disabled: 0,
    };
    Layout::new(&Capture {
        registers: RegisterSet::from_iter([]),
        fetching: Some(Fetching {
            readers,
            items: reads.iter().map(|read| item(*read)).collect(),
        }),
        ..Capture::default()
    })
}

/// Returns a record of a [`layout`]: its fixed words, then `words`.
fn record(words: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (index, word) in [0, 0].iter().chain(words).enumerate() {
        if index % (CELL / 8 - 1) == 0 {
            bytes.extend([0xee; 8]);
        }
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

#[test]
fn items_are_distinguished_from_those_that_could_not_be_read() {
    let layout = layout(&[Read::Bytes(4), Read::Bytes(8), Read::Bytes(12)]).unwrap();
    // The word of bits, then the items: 1, 1 and 2 words.
    let bytes = record(&[0b010, 0xdead_beef_1122_3344, 7, 0x0102_0304_0506_0708, 0x99]);
    let mut four = [0xff; 4];
    assert_eq!(layout.fetched(&bytes, 0, &mut four), Ok(true));
    assert_eq!(four, [0x44, 0x33, 0x22, 0x11]);
    assert_eq!(layout.fetched(&bytes, 1, &mut [0; 8]), Ok(false));
    let mut twelve = [0xff; 12];
    assert_eq!(layout.fetched(&bytes, 2, &mut twelve), Ok(true));
    assert_eq!(twelve, [8, 7, 6, 5, 4, 3, 2, 1, 0x99, 0, 0, 0]);
    assert_eq!(layout.fetched(&bytes, 3, &mut [0; 8]), Ok(false));
    let short = &bytes[..bytes.len() - 8];
    assert!(layout.fetched(short, 2, &mut [0; 12]).is_err());
}

#[test]
fn a_text_ends_at_its_zero_and_is_truncated_only_if_there_is_more() {
    let text = |most: u16, bytes: &[u8]| {
        let layout = layout(&[Read::Text(most)]).unwrap();
        let mut room = vec![0xff; 8 * (usize::from(most) / 8 + 1)];
        let len = bytes.len().min(room.len());
        room[..len].copy_from_slice(&bytes[..len]);
        let mut words = vec![0];
        words.extend(
            room.chunks(8)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap())),
        );
        let mut into = vec![0xaa; most.into()];
        let header = layout.text(&record(&words), 0, &mut into).unwrap().unwrap();
        into.truncate(header.len.into());
        (String::from_utf8(into).unwrap(), header.truncated)
    };
    assert_eq!(
        text(20, b"/etc/passwd\0xyz"),
        ("/etc/passwd".to_owned(), false)
    );
    assert_eq!(text(8, b"12345678\0"), ("12345678".to_owned(), false));
    assert_eq!(text(8, b"123456789"), ("12345678".to_owned(), true));
    assert_eq!(text(7, b"1234567\0"), ("1234567".to_owned(), false));
    assert_eq!(text(7, b"12345678"), ("1234567".to_owned(), true));
    assert_eq!(text(20, b"\0"), (String::new(), false));
    let long = "x".repeat(60);
    assert_eq!(text(55, long.as_bytes()), ("x".repeat(55), true));
}

#[test]
fn what_a_record_has_no_room_for_is_refused() {
    let many = [Read::Bytes(1); 33];
    assert!(matches!(
        layout(&many),
        Err(BuildError::TooManyItems { count: 33 })
    ));
    assert!(layout(&many[1..]).is_ok());
    let large = layout(&[Read::Text(900)]);
    assert!(matches!(large, Err(BuildError::TooLarge { .. })));
}
