//! Look-ups and claims, with devices that have only a name.

use proptest::prelude::*;

use super::*;
use crate::device::DeviceEvent;

#[derive(Debug)]
struct Named(u8, Vec<AddressRange>);

impl Device for Named {
    fn ranges(&self) -> Vec<AddressRange> {
        self.1.clone()
    }

    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(self.0);
    }

    fn write(&self, _offset: u64, _data: &[u8]) -> Option<DeviceEvent> {
        None
    }
}

fn memory(first: u64, size: u64) -> AddressRange {
    AddressRange {
        space: Space::Memory,
        first,
        size,
    }
}

fn claim(bus: &mut Bus, name: u8, ranges: &[AddressRange]) -> Result<(), String> {
    let device: Arc<dyn Device> = Arc::new(Named(name, ranges.to_vec()));
    bus.claim(&device).map_err(|error| error.to_string())
}

/// Returns the name of the device that answers, and the offset that it gets.
fn find(bus: &Bus, space: Space, at: u64, len: usize) -> Option<(u8, u64)> {
    let (device, offset) = bus.find(space, at, len)?;
    let mut name = [0];
    device.read(offset, &mut name);
    Some((name[0], offset))
}

#[test]
fn each_address_has_the_device_that_claimed_it_and_its_neighbours_have_none() {
    let mut bus = Bus::default();
    claim(&mut bus, 1, &[AddressRange::ports(0x3f8, 8)]).unwrap();
    claim(
        &mut bus,
        2,
        &[memory(0x1000, 0x10), AddressRange::ports(0x60, 1)],
    )
    .unwrap();
    claim(&mut bus, 3, &[memory(0x1010, 1)]).unwrap();
    let port = |at| find(&bus, Space::Port, at, 1);
    assert_eq!(port(0x3f8), Some((1, 0)));
    assert_eq!(port(0x3ff), Some((1, 7)));
    assert_eq!(port(0x60), Some((2, 0)));
    for free in [0, 0x5f, 0x61, 0x3f7, 0x400, 0x1000, 0xffff, u64::MAX] {
        assert_eq!(port(free), None, "{free:#x}");
    }
    let memory = |at| find(&bus, Space::Memory, at, 1);
    assert_eq!(memory(0x1000), Some((2, 0)));
    assert_eq!(memory(0x100f), Some((2, 0xf)));
    assert_eq!(memory(0x1010), Some((3, 0)));
    for free in [0, 0x60, 0x3f8, 0xfff, 0x1011, u64::MAX] {
        assert_eq!(memory(free), None, "{free:#x}");
    }
}

#[test]
fn an_access_that_leaves_a_range_of_memory_has_no_device() {
    let mut bus = Bus::default();
    claim(&mut bus, 1, &[memory(0x1000, 8)]).unwrap();
    claim(&mut bus, 2, &[memory(0x1008, 8)]).unwrap();
    claim(&mut bus, 3, &[memory(u64::MAX - 3, 4)]).unwrap();
    let find = |at, len| find(&bus, Space::Memory, at, len);
    assert_eq!(find(0x1000, 8), Some((1, 0)));
    assert_eq!(find(0x1004, 4), Some((1, 4)));
    assert_eq!(find(0x1004, 8), None, "two devices");
    assert_eq!(find(0x100c, 8), None, "the end of the last");
    assert_eq!(find(0xffc, 8), None, "the start of the first");
    assert_eq!(find(u64::MAX - 3, 4), Some((3, 0)));
    assert_eq!(find(u64::MAX, 1), Some((3, 3)));
    assert_eq!(find(u64::MAX, 8), None, "the end of the space");
    assert_eq!(find(u64::MAX, usize::MAX), None);
}

#[test]
fn a_string_of_values_belongs_to_its_port() {
    let mut bus = Bus::default();
    claim(&mut bus, 1, &[AddressRange::ports(0x3f8, 8)]).unwrap();
    assert_eq!(find(&bus, Space::Port, 0x3ff, 4096), Some((1, 7)));
    assert_eq!(find(&bus, Space::Port, 0x3f7, 4096), None);
}

#[test]
fn a_range_that_is_empty_or_leaves_its_space_is_refused() {
    for range in [
        memory(0x1000, 0),
        memory(u64::MAX, 2),
        memory(2, u64::MAX),
        AddressRange::ports(0x60, 0),
        AddressRange::ports(0xffff, 2),
        AddressRange::ports(0, u64::MAX),
        AddressRange::ports(0, 0x1_0001),
    ] {
        let mut bus = Bus::default();
        let refused = claim(&mut bus, 1, &[range]).unwrap_err();
        assert!(refused.contains("empty or leaves"), "{refused}");
        assert_eq!(find(&bus, range.space, range.first, 1), None);
    }
    let mut bus = Bus::default();
    claim(&mut bus, 1, &[memory(0, u64::MAX)]).unwrap();
    claim(&mut bus, 2, &[AddressRange::ports(0x100, 0xff00)]).unwrap();
    assert_eq!(find(&bus, Space::Port, 0xffff, 1), Some((2, 0xfeff)));
}

#[test]
fn a_range_with_a_port_of_probes_is_refused() {
    for port in trap::PORTS.map(u64::from) {
        for (first, size) in [(port, 1), (port - 1, 2), (port, 2), (0, 0x1_0000)] {
            let range = AddressRange {
                space: Space::Port,
                first,
                size,
            };
            let refused = claim(&mut Bus::default(), 1, &[range]).unwrap_err();
            assert!(refused.contains("probes answer"), "{refused}");
        }
        claim(&mut Bus::default(), 1, &[memory(port, 1)]).unwrap();
    }
}

#[test]
fn a_range_that_overlaps_another_is_refused() {
    for overlapping in [
        memory(0x1000, 0x10),
        memory(0x1008, 1),
        memory(0xfff, 2),
        memory(0x100f, 0x10),
        memory(0xff0, 0x100),
        memory(0, u64::MAX),
    ] {
        let mut bus = Bus::default();
        claim(&mut bus, 1, &[memory(0x1000, 0x10)]).unwrap();
        let refused = claim(&mut bus, 2, &[overlapping]).unwrap_err();
        assert!(refused.contains("another device"), "{refused}");
        assert_eq!(find(&bus, Space::Memory, 0x1008, 1), Some((1, 8)));
    }
    // The same numbers are other addresses in the other space.
    let mut bus = Bus::default();
    claim(&mut bus, 1, &[memory(0x60, 1)]).unwrap();
    claim(&mut bus, 2, &[AddressRange::ports(0x60, 1)]).unwrap();
    let twice = [memory(0x70, 1), memory(0x70, 1)];
    assert!(claim(&mut bus, 3, &twice).is_err(), "it overlaps itself");
}

fn range() -> impl Strategy<Value = AddressRange> {
    let first = prop_oneof![0..64u64, (u64::MAX - 64)..=u64::MAX];
    let size = prop_oneof![0..16u64, Just(u64::MAX)];
    let space = prop_oneof![Just(Space::Port), Just(Space::Memory)];
    (space, first, size).prop_map(|(space, first, size)| AddressRange { space, first, size })
}

proptest! {
    /// Compares the bus with a linear search of a list of claims.
    #[test]
    fn the_bus_finds_what_a_search_of_all_claims_finds(
        ranges in proptest::collection::vec(range(), 0..12),
        accesses in proptest::collection::vec((range(), 1..9usize), 0..64),
    ) {
        let mut bus = Bus::default();
        let mut claimed: Vec<(u8, Space, u64, u64)> = Vec::new();
        for (name, range) in (1..).zip(ranges) {
            let is_free = |last: u64| claimed.iter().all(|(_, space, low, high)| {
                *space != range.space || last < *low || *high < range.first
            });
            let last = range.last().filter(|last| is_free(*last));
            prop_assert_eq!(claim(&mut bus, name, &[range]).is_ok(), last.is_some());
            if let Some(last) = last {
                claimed.push((name, range.space, range.first, last));
            }
        }
        for (AddressRange { space, first, .. }, len) in accesses {
            let end = match space {
                Space::Port => Some(first),
                Space::Memory => first.checked_add(len as u64 - 1),
            };
            let expected = claimed.iter().find(|(_, of, low, high)| {
                *of == space && *low <= first && end.is_some_and(|end| end <= *high)
            });
            let expected = expected.map(|(name, _, low, _)| (*name, first - low));
            prop_assert_eq!(find(&bus, space, first, len), expected);
        }
    }
}
