//! ACPI tables, by which a guest finds its processors, its interrupt controller and its devices.
//!
//! ```text
//!   new ──► each device describes itself ──► written
//! ```
//! Invariant: the tables never reach beyond the range given. The platform is "hardware-reduced" (ACPI 6.5, 4.1): it
//! has no legacy interrupt controller, timer or power management block to probe, which also shortens the guest's
//! boot.

use std::ops::Range;

use acpi_tables::aml::{self, Name, Path, Scope};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, madt};
use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;

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

/// The tables of a machine under construction.
pub(crate) struct Tables {
    fadt: FADTBuilder,
    dsdt: Sdt,
}

impl Tables {
    /// Returns tables without devices.
    pub(crate) fn new() -> Self {
        /// Bits of IAPC_BOOT_ARCH (ACPI 6.5, table 5.10) for hardware that is absent.
        const VGA_NOT_PRESENT: u16 = 1 << 2;
        const MSI_NOT_SUPPORTED: u16 = 1 << 3;
        const CMOS_RTC_NOT_PRESENT: u16 = 1 << 5;
        let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
            .flag(Flags::HwReducedAcpi)
            .flag(Flags::PwrButton)
            .flag(Flags::SlpButton);
        fadt.iapc_boot_arch = (VGA_NOT_PRESENT | MSI_NOT_SUPPORTED | CMOS_RTC_NOT_PRESENT).into();
        Self {
            fadt,
            dsdt: Sdt::new(*b"DSDT", 36, 6, OEM, TABLE, REVISION),
        }
    }

    /// Adds `object` to the root of the namespace.
    pub(crate) fn add(&mut self, object: &dyn Aml) {
        self.dsdt.append_slice(&bytes(object));
    }

    /// Adds a device object.
    pub(crate) fn add_device(&mut self, name: &str, properties: &[Name]) {
        let properties = properties.iter().map(|name| name as &dyn Aml).collect();
        let device = aml::Device::new(Path::new(name), properties);
        self.add(&Scope::new("_SB_".into(), vec![&device]));
    }

    /// Describes the reset register: `value`, written to `port`, resets the machine.
    pub(crate) fn set_reset(&mut self, port: u16, value: u8) {
        self.fadt = self.fadt.flag(Flags::ResetRegSup);
        self.fadt.reset_reg = byte_port(port);
        self.fadt.reset_value = value;
    }

    /// Sets the ports of the sleep control and status registers.
    pub(crate) fn set_sleep(&mut self, control: u16, status: u16) {
        self.fadt.sleep_control_reg = byte_port(control);
        self.fadt.sleep_status_reg = byte_port(status);
    }

    /// Adds `cpus` vCPUs, with APIC ids from 0 on, and writes the tables to `place`, where kernels look for the
    /// RSDP. Returns the address of the RSDP.
    ///
    /// # Errors
    /// When the tables do not fit.
    pub(crate) fn write(
        mut self,
        ram: &impl PhysMemory,
        place: Range<Gpa>,
        cpus: u32,
    ) -> Result<Gpa, AcpiError> {
        for cpu in 0..cpus {
            self.add_processor(cpu);
        }
        let full = |_| AcpiError { cpus };
        let mut at = place.start.wrapping_add(Rsdp::len() as u64);
        let mut put = |table: &[u8]| -> Result<Gpa, AcpiError> {
            // Every table begins at a multiple of 16. Kernels require this only of the RSDP, when they search for
            // it.
            let start = Gpa(at.0.next_multiple_of(16));
            at = start.wrapping_add(table.len() as u64);
            if at > place.end {
                return Err(AcpiError { cpus });
            }
            ram.write(start, table).map_err(full)?;
            Ok(start)
        };
        let dsdt = put(self.dsdt.as_slice())?;
        let fadt = put(&bytes(&self.fadt.dsdt_64(dsdt.0).finalize()))?;
        let madt = put(madt(cpus)?.as_slice())?;
        let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
        xsdt.add_entry(fadt.0);
        xsdt.add_entry(madt.0);
        let xsdt = put(&bytes(&xsdt))?;
        ram.write(place.start, &bytes(&Rsdp::new(OEM, xsdt.0)))
            .map_err(full)?;
        Ok(place.start)
    }

    /// Adds the device object of a processor. Newer kernels register processors by these objects.
    fn add_processor(&mut self, cpu: u32) {
        self.add_device(
            &format!("C{cpu:03X}"),
            &[
                Name::new("_HID".into(), &"ACPI0007"),
                Name::new("_UID".into(), &cpu),
            ],
        );
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// Returns the address of a register of one byte at `port`.
fn byte_port(port: u16) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        port.into(),
    )
}

fn madt(cpus: u32) -> Result<Sdt, AcpiError> {
    // 44 bytes: 36 of the header, the local APICs' address, and the flags.
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
