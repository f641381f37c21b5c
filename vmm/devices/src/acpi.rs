//! ACPI tables, by which a guest finds its processors, its interrupt controller, its serial port and the way to
//! power itself off.
//!
//! The platform is "hardware-reduced" (ACPI 6.5, 4.1): it has no legacy interrupt controller, timer or power
//! management block to probe, which also shortens the guest's boot. Sleep and reset are single port writes
//! (`SLEEP_CONTROL`, `RESET_PORT`). The tables never reach beyond the range given.

use std::ops::Range;

use acpi_tables::aml::{self, Interrupt, Name, Package, Path, ResourceTemplate, Scope};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink, madt};
use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;

use super::reset::{RESET_PORT, RESET_VALUE};
use super::serial::{COM1, COM1_GSI};
use super::sleep::{S5, SLEEP_CONTROL, SLEEP_STATUS};

/// Addresses of KVM's interrupt controllers.
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;

const OEM: [u8; 6] = *b"HVPROB";
const TABLE: [u8; 8] = *b"HVPROBEM";
const REVISION: u32 = 1;

/// The tables do not fit the range given.
#[derive(Debug, thiserror::Error)]
#[error("the ACPI tables for {cpus} vCPUs do not fit below 1 MiB")]
pub struct AcpiError {
    /// Number of vCPUs in the tables.
    pub cpus: u32,
}

/// Writes the tables for `cpus` vCPUs, with APIC ids from 0 on, to `place`, where kernels look for the RSDP.
/// Returns the address of the RSDP.
///
/// # Errors
/// When the tables do not fit.
pub fn write(ram: &impl PhysMemory, place: Range<Gpa>, cpus: u32) -> Result<Gpa, AcpiError> {
    let full = |_| AcpiError { cpus };
    let mut at = place.start.wrapping_add(Rsdp::len() as u64);
    let mut put = |table: &[u8]| -> Result<Gpa, AcpiError> {
        // Every table begins at a multiple of 16. The search for the RSDP requires that of the RSDP; it does no
        // harm to the others.
        let start = Gpa(at.0.next_multiple_of(16));
        at = start.wrapping_add(table.len() as u64);
        if at > place.end {
            return Err(AcpiError { cpus });
        }
        ram.write(start, table).map_err(full)?;
        Ok(start)
    };
    let dsdt = put(dsdt(cpus).as_slice())?;
    let fadt = put(&bytes(&fadt(dsdt)))?;
    let madt = put(madt(cpus)?.as_slice())?;
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt.0);
    xsdt.add_entry(madt.0);
    let xsdt = put(&bytes(&xsdt))?;
    ram.write(place.start, &bytes(&Rsdp::new(OEM, xsdt.0)))
        .map_err(full)?;
    Ok(place.start)
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: Gpa) -> acpi_tables::fadt::FADT {
    /// IAPC_BOOT_ARCH (ACPI 6.5, table 5.10): hardware that is absent.
    const VGA_NOT_PRESENT: u16 = 1 << 2;
    const MSI_NOT_SUPPORTED: u16 = 1 << 3;
    const CMOS_RTC_NOT_PRESENT: u16 = 1 << 5;
    let port = |port: u16| {
        GAS::new(
            AddressSpace::SystemIo,
            8,
            0,
            AccessSize::ByteAccess,
            port.into(),
        )
    };
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt.0)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = (VGA_NOT_PRESENT | MSI_NOT_SUPPORTED | CMOS_RTC_NOT_PRESENT).into();
    fadt.reset_reg = port(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL);
    fadt.sleep_status_reg = port(SLEEP_STATUS);
    fadt.finalize()
}

fn madt(cpus: u32) -> Result<Sdt, AcpiError> {
    // The header's 36 bytes, the local APICs' address, flags.
    let mut madt = Sdt::new(*b"APIC", 44, 5, OEM, TABLE, REVISION);
    madt.write_u32(36, LOCAL_APIC);
    for cpu in 0..cpus {
        let id = u8::try_from(cpu).map_err(|_| AcpiError { cpus })?;
        let processor = madt::ProcessorLocalApic::new(id, id, madt::EnabledStatus::Enabled);
        madt.append_slice(&bytes(&processor));
    }
    madt.append_slice(&bytes(&madt::IoApic::new(0, IO_APIC, 0)));
    Ok(madt)
}

fn dsdt(cpus: u32) -> Sdt {
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM, TABLE, REVISION);
    dsdt.append_slice(&bytes(&Name::new(
        "_S5_".into(),
        &Package::new(vec![&S5, &aml::ZERO, &aml::ZERO, &aml::ZERO]),
    )));
    dsdt.append_slice(&bytes(&SerialPort));
    for cpu in 0..cpus {
        dsdt.append_slice(&bytes(&Processor(cpu)));
    }
    dsdt
}

/// The serial port's device object, from which its driver learns the interrupt.
struct SerialPort;

impl Aml for SerialPort {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let irq = Interrupt::new(true, true, false, false, COM1_GSI);
        let ports = aml::IO::new(COM1, COM1, 1, 8);
        let resources = ResourceTemplate::new(vec![&ports, &irq]);
        device(
            "COM1",
            &[
                Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
                Name::new("_UID".into(), &aml::ZERO),
                Name::new("_CRS".into(), &resources),
            ],
            sink,
        );
    }
}

/// A processor's device object. Newer kernels register processors by it.
struct Processor(u32);

impl Aml for Processor {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        device(
            &format!("C{:03X}", self.0),
            &[
                Name::new("_HID".into(), &"ACPI0007"),
                Name::new("_UID".into(), &self.0),
            ],
            sink,
        );
    }
}

fn device(name: &str, properties: &[Name], sink: &mut dyn AmlSink) {
    let properties = properties.iter().map(|name| name as &dyn Aml).collect();
    let device = aml::Device::new(Path::new(name), properties);
    Scope::new("_SB_".into(), vec![&device]).to_aml_bytes(sink);
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use hvprobe_arch::mem::OutOfRange;

    use super::*;

    /// The range that machines use.
    const PLACE: Range<Gpa> = Gpa(0xe_0000)..Gpa(0xf_fff0);
    /// Number of 8-bit APIC ids, except the broadcast id.
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

    #[test]
    fn every_table_is_found_from_the_rsdp() {
        for cpus in [1, 2, MAX_CPUS] {
            let ram = Low::new();
            let rsdp = write(&ram, PLACE, cpus).unwrap();
            let rsdp = read(&ram, rsdp.0, 36);
            assert_eq!(&rsdp[..8], b"RSD PTR ");
            assert_eq!((sum(&rsdp[..20]), sum(&rsdp)), (0, 0));
            let xsdt = table(&ram, word(&rsdp, 24), b"XSDT");
            let fadt = table(&ram, word(&xsdt, 36), b"FACP");
            let madt = table(&ram, word(&xsdt, 44), b"APIC");
            table(&ram, word(&fadt, 140), b"DSDT");
            let processors = usize::try_from(cpus).unwrap() * 8;
            assert_eq!(madt.len(), 44 + processors + 12);
        }
    }

    #[test]
    fn more_processors_than_apic_ids_are_refused() {
        let ram = Low::new();
        assert!(write(&ram, PLACE, 257).is_err());
    }
}
