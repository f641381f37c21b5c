//! Reads the tables as a guest does, from memory without a machine.

use std::cell::RefCell;
use std::ops::Range;

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::{OutOfRange, PhysMemory};

use super::machine;

/// The range to which machines write the tables.
const PLACE: Range<Gpa> = Gpa(0xe_0000)..Gpa(0xf_fff0);
/// Maximum number of vCPUs of a machine. All of them have 8-bit APIC ids below the broadcast id.
const MAX_CPUS: u32 = 254;

/// Memory from 0 to 1 MiB.
struct Low(RefCell<Vec<u8>>);

impl Low {
    fn new() -> Self {
        Self(RefCell::new(vec![0; 1 << 20]))
    }

    fn range(&self, at: Gpa, len: usize) -> Result<Range<usize>, OutOfRange> {
        let start = usize::try_from(at.0).ok();
        let range = start.and_then(|start| Some(start..start.checked_add(len)?));
        range
            .filter(|range| range.end <= self.0.borrow().len())
            .ok_or(OutOfRange { at, len })
    }
}

impl PhysMemory for Low {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
        let range = self.range(at, into.len())?;
        into.copy_from_slice(&self.0.borrow()[range]);
        Ok(())
    }

    fn write(&self, at: Gpa, bytes: &[u8]) -> Result<(), OutOfRange> {
        let range = self.range(at, bytes.len())?;
        self.0.borrow_mut()[range].copy_from_slice(bytes);
        Ok(())
    }
}

fn read(ram: &Low, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ram.read(Gpa(at), &mut bytes).unwrap();
    bytes
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// Returns the table at `at` after checking its signature and checksum.
fn table(ram: &Low, at: u64, signature: &[u8; 4]) -> Vec<u8> {
    let header = read(ram, at, 36);
    assert_eq!(&header[..4], signature);
    let len = u32::from_le_bytes(header[4..8].try_into().unwrap());
    let table = read(ram, at, usize::try_from(len).unwrap());
    assert_eq!(sum(&table), 0, "checksum of {signature:?}");
    table
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The tables of a machine with its devices.
struct Tables {
    fadt: Vec<u8>,
    madt: Vec<u8>,
    dsdt: Vec<u8>,
}

/// Returns the tables of a machine with `cpus` vCPUs. Finds them through the RSDP, as a guest does.
fn tables(cpus: u32) -> Tables {
    let ram = Low::new();
    let rsdp = machine().devices.write_acpi(&ram, PLACE, cpus).unwrap();
    let rsdp = read(&ram, rsdp.0, 36);
    assert_eq!(&rsdp[..8], b"RSD PTR ");
    assert_eq!((sum(&rsdp[..20]), sum(&rsdp)), (0, 0));
    let xsdt = table(&ram, word(&rsdp, 24), b"XSDT");
    let fadt = table(&ram, word(&xsdt, 36), b"FACP");
    Tables {
        madt: table(&ram, word(&xsdt, 44), b"APIC"),
        dsdt: table(&ram, word(&fadt, 140), b"DSDT"),
        fadt,
    }
}

#[test]
fn every_table_is_found_from_the_rsdp() {
    for cpus in [1, 2, MAX_CPUS] {
        let madt = tables(cpus).madt;
        let processors = usize::try_from(cpus).unwrap() * 8;
        assert_eq!(madt.len(), 44 + processors + 12);
    }
}

#[test]
fn the_tables_describe_every_device_and_processor() {
    let Tables { fadt, dsdt, .. } = tables(2);
    let ports = [116, 244, 256].map(|register| word(&fadt, register + 4));
    assert_eq!(ports, [0x64, 0x600, 0x601]);
    assert_eq!(fadt[128], 0xfe, "the value that resets");
    for name in [b"_S5_", b"COM1", b"C000", b"C001"] {
        let found = dsdt.windows(4).filter(|bytes| *bytes == name);
        assert_eq!(found.count(), 1, "{name:?}");
    }
}

#[test]
fn more_processors_than_apic_ids_are_refused() {
    let devices = machine().devices;
    let ram = Low::new();
    assert!(devices.write_acpi(&ram, PLACE, 257).is_err());
    assert!(
        devices
            .write_acpi(&ram, Gpa(0xe_0000)..Gpa(0xe_0100), 1)
            .is_err()
    );
}
