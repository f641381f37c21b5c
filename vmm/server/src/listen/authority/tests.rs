//! Names are rewritten and nothing else is, for every way to split the bytes.

use proptest::prelude::*;
use tokio::io::AsyncReadExt as _;

use super::*;

fn preface() -> Vec<u8> {
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()
}

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let head = [&length[1..], &[kind, flags, 0, 0, 0, 1]].concat();
    [&head, payload].concat()
}

/// Encodes a field whose name has `index`, with an uncompressed value.
fn field(index: u8, value: &str) -> Vec<u8> {
    text(vec![0x40 | index], value)
}

fn text(mut before: Vec<u8>, value: &str) -> Vec<u8> {
    match value.len() {
        short @ ..0x7f => before.push(u8::try_from(short).unwrap()),
        long => {
            let rest = long - 0x7f;
            before.push(0x7f);
            before.push(u8::try_from(rest & 0x7f).unwrap() | 0x80);
            before.push(u8::try_from(rest >> 7).unwrap());
        }
    }
    before.extend_from_slice(value.as_bytes());
    before
}

/// Returns the bytes that arrive if `sent` comes in pieces of `piece` bytes.
fn passed(sent: &[u8], piece: usize) -> Vec<u8> {
    let mut names = Names::default();
    let mut bytes = sent.to_vec();
    for piece in bytes.chunks_mut(piece) {
        names.pass(piece);
    }
    bytes
}

#[test]
fn a_path_becomes_a_name() {
    let other = |value| text(text(vec![0], ":path"), value);
    let fields = |name: &str| {
        [
            vec![0x3f, 0xe1, 0x1f],
            vec![0x83],
            field(4, "/hvprobe.v1.Host/Get%"),
            field(1, name),
            other("/%"),
            text(vec![0x01], &name.repeat(20)),
            text(text(vec![0x40], ":authority"), name),
            text(text(vec![0x10], ":authoriti"), "/%"),
            text(text(vec![0x10], ":authority:"), "/%"),
            text(text(vec![0x10], ":auth"), "/%"),
        ]
        .concat()
    };
    let all = |name: &str| {
        let fields = fields(name);
        let padded = [vec![3, 0x80, 0, 0, 0, 16], fields.clone(), b"%/%".to_vec()].concat();
        [
            preface(),
            frame(4, 0, b"/%/%/%"),
            frame(HEADERS, 0x4, &fields),
            frame(0, 1, &field(1, "/%")),
            frame(HEADERS, PADDED | PRIORITY, &padded),
            frame(HEADERS, 0, &fields[..fields.len() / 2]),
            frame(CONTINUATION, 4, &fields[fields.len() / 2..]),
            frame(0, 1, b"%/"),
        ]
        .concat()
    };
    let sent = all("%2Frun%2Fhvprobe.sock");
    for piece in [1, 2, 3, 7, 24, 100, sent.len()] {
        assert_eq!(
            passed(&sent, piece),
            all("-2Frun-2Fhvprobe.sock"),
            "{piece}"
        );
    }
    // A name that is valid already, and a compressed one.
    let sent = all("localhost:80");
    assert_eq!(passed(&sent, 5), sent);
    let compressed = frame(HEADERS, 4, &[0x41, 0x83, b'/', b'%', b'/']);
    let sent = [preface(), compressed].concat();
    assert_eq!(passed(&sent, 5), sent);
}

#[test]
fn what_makes_no_sense_is_passed_as_it_is() {
    for wrong in [
        // A number without an end, one that is too large, more padding than there is.
        frame(
            HEADERS,
            4,
            &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        ),
        frame(
            HEADERS,
            4,
            &[0x41, 0x7f, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01],
        ),
        frame(HEADERS, PADDED, &[9, 0x82]),
        frame(HEADERS, PADDED, &[]),
        frame(HEADERS, PRIORITY, &[0; 4]),
    ] {
        let behind = frame(HEADERS, 4, &field(1, "/"));
        let sent = [preface(), wrong, behind].concat();
        assert_eq!(passed(&sent, 1), sent);
        assert_eq!(passed(&sent, sent.len()), sent);
    }
}

#[tokio::test]
async fn a_connection_is_read_through_it() {
    let sent = [preface(), frame(HEADERS, 4, &field(1, "/a"))].concat();
    let mut arrived = Vec::new();
    let mut named = Named::new(&sent[..]);
    named.read_to_end(&mut arrived).await.unwrap();
    assert_eq!(
        arrived,
        [preface(), frame(HEADERS, 4, &field(1, "-a"))].concat()
    );
}

proptest! {
    /// Only `/` and `%` are ever replaced, and it makes no difference how the bytes are split.
    #[test]
    fn no_other_byte_changes(
        frames in prop::collection::vec((0_u8..11, any::<u8>(), prop::collection::vec(any::<u8>(), 0..40)), 0..6),
        rest in prop::collection::vec(any::<u8>(), 0..20),
        piece in 1_usize..50,
    ) {
        let frames = frames.iter().flat_map(|(kind, flags, payload)| frame(*kind, *flags, payload));
        let sent: Vec<u8> = preface().into_iter().chain(frames).chain(rest).collect();
        let whole = passed(&sent, sent.len());
        for (sent, arrived) in sent.iter().zip(&whole) {
            prop_assert!(sent == arrived || (matches!(sent, b'/' | b'%') && *arrived == b'-'));
        }
        prop_assert_eq!(whole, passed(&sent, piece));
    }
}
