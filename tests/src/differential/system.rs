//! State of the bench's processor that runs do not set: segments, IDT, control registers.
//!
//! Invariant: the processor is in 64-bit mode at privilege level 0. Every exception goes, on a separate stack, to a
//! stub that writes to the port with the exception's number.

use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_vm::memory::GuestRam;
use kvm_bindings::{Msrs, kvm_msr_entry, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::layout::{self, Spaces};

const CODE: u16 = 0x10;
/// A data segment that may be loaded into any data segment register.
pub(super) const DATA: u16 = 0x18;
const TASK: u16 = 0x20;
const TSS_SIZE: u16 = 104;
const GDT: [u64; 6] = [
    0,
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    // The TSS, in two halves.
    0x0000_8900_0000_0000
        | (layout::TSS.0 & 0xff_ffff) << 16
        | (TSS_SIZE as u64 - 1)
        | ((layout::SYSTEM >> 24) & 0xff) << 56,
    layout::SYSTEM >> 32,
];

/// CR4 bits (SDM vol. 3, 2.5).
mod cr4 {
    pub(super) const PAE: u64 = 1 << 5;
    pub(super) const OSFXSR: u64 = 1 << 9;
    pub(super) const OSXMMEXCPT: u64 = 1 << 10;
    pub(super) const FSGSBASE: u64 = 1 << 16;
    pub(super) const OSXSAVE: u64 = 1 << 18;
}

/// Distance between two stubs in bytes.
pub(super) const STUB: u64 = 16;

/// Returns whether the exception pushes an error code (SDM vol. 3, table 6-1; APM vol. 2, table 8-1).
pub(super) fn has_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30)
}

/// Writes GDT, TSS, IDT and stubs.
pub(super) fn write_pages(ram: &GuestRam) -> Result<(), OutOfRange> {
    ram.write(layout::GDT, GDT.map(u64::to_le_bytes).as_flattened())?;
    // IST1 (SDM vol. 3, 7.7).
    let stack = layout::system(layout::EXCEPTION_STACK).0;
    ram.write(layout::TSS.wrapping_add(0x24), &stack.to_le_bytes())?;
    // The I/O bitmap opens no port; privilege level 0 does not need it.
    ram.write(layout::TSS.wrapping_add(0x66), &TSS_SIZE.to_le_bytes())?;
    for vector in 0..32_u8 {
        let at = u64::from(vector);
        // out VECTOR, al
        ram.write(layout::STUBS.wrapping_add(at * STUB), &[0xe6, vector])?;
        let handler = layout::system(layout::STUBS).0 + at * STUB;
        // A present interrupt gate that switches to IST1 (SDM vol. 3, 6.14.1).
        let low = handler & 0xffff
            | u64::from(CODE) << 16
            | 1 << 32
            | 0x8e << 40
            | (handler >> 16 & 0xffff) << 48;
        let gate = [low, handler >> 32].map(u64::to_le_bytes);
        ram.write(layout::IDT.wrapping_add(at * 16), gate.as_flattened())?;
    }
    Ok(())
}

/// Sets the system registers for 64-bit mode in the full address space.
pub(super) fn set_registers(
    system: &mut kvm_sregs,
    spaces: &Spaces,
    has_xsave: bool,
    has_fsgsbase: bool,
) {
    /// PE, MP, ET, NE, WP, PG (SDM vol. 3, 2.5). Linux sets AM too, which has no effect at privilege level 0.
    const CR0: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
    /// LME and LMA.
    const EFER: u64 = 1 << 8 | 1 << 10;
    system.cr0 = CR0;
    system.cr3 = spaces.full.root.0;
    system.cr4 = cr4::PAE | cr4::OSFXSR | cr4::OSXMMEXCPT;
    if has_xsave {
        system.cr4 |= cr4::OSXSAVE;
    }
    if has_fsgsbase {
        system.cr4 |= cr4::FSGSBASE;
    }
    system.efer = EFER;
    let code = kvm_segment {
        selector: CODE,
        limit: u32::MAX,
        // Code, readable, accessed.
        type_: 0xb,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: DATA,
        limit: u32::MAX,
        // Data, writable, accessed.
        type_: 3,
        present: 1,
        s: 1,
        db: 1,
        g: 1,
        ..Default::default()
    };
    system.cs = code;
    for segment in [
        &mut system.ds,
        &mut system.es,
        &mut system.fs,
        &mut system.gs,
        &mut system.ss,
    ] {
        *segment = data;
    }
    system.tr = kvm_segment {
        base: layout::system(layout::TSS).0,
        limit: (TSS_SIZE - 1).into(),
        selector: TASK,
        // A busy 64-bit TSS.
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    system.gdt.base = layout::system(layout::GDT).0;
    system.gdt.limit = u16::try_from(size_of_val(&GDT) - 1).unwrap_or(0);
    system.idt.base = layout::system(layout::IDT).0;
    system.idt.limit = 32 * 16 - 1;
}

/// Sets IA32_PAT to its reset value, because some hosts leave it at zero (SDM vol. 3, 12.12.4).
pub(super) fn set_pat(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let pat = kvm_msr_entry {
        index: 0x277,
        data: 0x0007_0406_0007_0406,
        ..Default::default()
    };
    if let Ok(msrs) = Msrs::from_entries(&[pat]) {
        vcpu.set_msrs(&msrs)?;
    }
    Ok(())
}
