use hvprobe_proto::v1::{Actions, Item, ProbeSpec, RegisterRequest, UnregisterRequest};
use proptest::prelude::*;
use prost::Message;

use super::super::sizes::{HEAVIEST, LIGHT, SMALL};
use super::*;

const REGISTER: &str = "/hvprobe.v1.Probes/Register";

fn weight_in_parts(path: &str, bytes: &[u8], part: usize) -> usize {
    let interface = Arc::new(Interface::new());
    let ty = interface.method(path).unwrap().input;
    let length = bytes.len().try_into().unwrap();
    let mut scanner = Scanner::new(interface, ty, length);
    bytes.chunks(part).map(|part| scanner.scan(part)).sum()
}

fn weight(path: &str, bytes: &[u8]) -> usize {
    weight_in_parts(path, bytes, usize::MAX)
}

/// Encodes a batch that has no field but the list of probes. Repeating the bytes repeats the probes.
fn batch(probes: Vec<ProbeSpec>) -> Vec<u8> {
    let request = RegisterRequest {
        probes,
        ..Default::default()
    };
    request.encode_to_vec()
}

#[test]
fn empty_entries_weigh_what_they_become() {
    let count = 1000;
    let bytes = batch(vec![ProbeSpec::default()]).repeat(count);
    assert!(bytes.len() < 3 * count);
    let weight = weight(REGISTER, &bytes);
    assert!(
        weight >= 2 * (count - 2) * size_of::<ProbeSpec>(),
        "{weight}"
    );
    let entries = bytes.len() / count;
    assert!(
        weight / count * ((8 << 20) / entries) > HEAVIEST,
        "8 MiB of them are accepted"
    );
}

#[test]
fn the_largest_batch_is_accepted() {
    let actions = Actions {
        capture: vec![Item::default(); 32],
        ..Default::default()
    };
    let probe = ProbeSpec {
        definition: "p vfs_read".to_owned(),
        actions: Some(actions),
        ..Default::default()
    };
    let bytes = batch(vec![probe]).repeat(16_384);
    let weight = weight(REGISTER, &bytes);
    assert!(weight <= HEAVIEST, "{weight}");
}

#[test]
fn the_longest_list_of_ids_is_small() {
    let request = UnregisterRequest {
        ids: vec![65_535; 16_384],
        ..Default::default()
    };
    let bytes = request.encode_to_vec();
    let weight = weight("/hvprobe.v1.Probes/Unregister", &bytes);
    assert!(
        bytes.len() <= SMALL && (4 * 16_384..=LIGHT).contains(&weight),
        "{weight}"
    );
}

#[test]
fn unknown_fields_weigh_nothing_and_hide_nothing() {
    let entry = batch(vec![ProbeSpec::default()]);
    let one = weight(REGISTER, &entry);
    assert!(one > 0);
    // Field 1023 with each wire type; the group has a field of the interface in it.
    for unknown in [
        &[0xf8, 0x3f, 0x01][..],
        &[0xf9, 0x3f, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0xfa, 0x3f, 2, 1, 2],
        &[0xfd, 0x3f, 1, 2, 3, 4],
        &[0xfb, 0x3f, entry[0], 0x00, 0xfc, 0x3f],
    ] {
        let bytes = [unknown, &entry].concat();
        assert!(RegisterRequest::decode(&*bytes).is_ok(), "{unknown:x?}");
        assert_eq!(weight(REGISTER, &bytes), one, "{unknown:x?}");
    }
    for malformed in [&[0x0f][..], &[0xff; 11], &[0xfc, 0x3f]] {
        let bytes = [malformed, &entry].concat();
        assert!(RegisterRequest::decode(&*bytes).is_err(), "{malformed:x?}");
        assert!(weight(REGISTER, &bytes) <= one, "{malformed:x?}");
    }
}

#[test]
fn fields_that_reach_beyond_their_parents_weigh_what_prost_decodes_of_them() {
    let count = 1000;
    let actions = Actions {
        capture: vec![Item::default(); count],
        ..Default::default()
    };
    let probe = ProbeSpec {
        actions: Some(actions),
        ..Default::default()
    };
    // The entry's own length says 2 bytes: those of the key and the length of `actions` alone.
    let mut bytes = batch(vec![probe.clone()]);
    let inner = probe.encoded_len();
    let head = bytes.len() - inner;
    bytes.splice(1..head, [0x02]);
    assert!(RegisterRequest::decode(&*bytes).is_err());
    let weight = weight(REGISTER, &bytes);
    assert!(weight >= count * size_of::<Item>(), "{weight}");
}

/// Returns a lower bound for the heap bytes of a decoded request.
fn heap(request: &RegisterRequest) -> usize {
    let texts = |probe: &ProbeSpec| {
        let items = probe.actions.as_ref().map_or(0, |it| it.capture.capacity());
        let id = probe.module_build_id.as_ref().map_or(0, Vec::capacity);
        probe.definition.capacity() + id + items * size_of::<Item>()
    };
    request.probes.capacity() * size_of::<ProbeSpec>()
        + request.probes.iter().map(texts).sum::<usize>()
}

fn piece() -> impl Strategy<Value = Vec<u8>> {
    let probe = ("[a-z]{0,9}", 0_usize..6).prop_map(|(definition, items)| {
        let actions = (items > 0).then(|| Actions {
            capture: vec![Item::default(); items],
            ..Default::default()
        });
        batch(vec![ProbeSpec {
            definition,
            actions,
            ..Default::default()
        }])
    });
    prop_oneof![
        1 => prop::collection::vec(any::<u8>(), 0..4),
        2 => Just(batch(vec![ProbeSpec::default(); 3])),
        4 => probe,
    ]
}

proptest! {
    #[test]
    fn weight_is_an_upper_bound_however_the_bytes_are_split(
        pieces in prop::collection::vec(piece(), 0..20),
        part in 1_usize..9,
    ) {
        let bytes = pieces.concat();
        let whole = weight(REGISTER, &bytes);
        prop_assert_eq!(weight_in_parts(REGISTER, &bytes, part), whole);
        if let Ok(request) = RegisterRequest::decode(&*bytes) {
            prop_assert!(heap(&request) <= whole, "{} {whole}", heap(&request));
        }
    }
}
