//! State of the vCPUs at kernel entry.
//!
//! Invariants: APIC id = vCPU index = ACPI processor uid, and CPUID describes one package of cores without
//! hyper-threads. The boot processor starts in 64-bit mode, with the GDT and page tables that
//! [`write_tables`](crate::entry::write_tables) has left in memory. The others wait for the guest's INIT and SIPI.

use hvprobe_arch::Gpa;
use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_fpu,
    kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd};

use super::features;
use crate::entry::{CODE, DATA, Entry, GDT_BYTES};
use crate::layout;
use crate::vm::{CpuError, kvm_error};

/// Prepares vCPU `index` of `count`. vCPU 0 will start at `entry`; the kernel starts the others.
///
/// # Errors
/// When KVM refuses a step.
pub fn configure(
    vcpu: &VcpuFd,
    kvm: &Kvm,
    index: u32,
    count: u32,
    entry: &Entry,
) -> Result<(), CpuError> {
    let cpuid = cpuid(kvm, index, count)?;
    vcpu.set_cpuid2(&cpuid).map_err(kvm_error("set CPUID"))?;
    set_msrs(vcpu)?;
    set_lapic(vcpu)?;
    if index == 0 {
        set_entry(vcpu, entry.rip, entry.boot_params)?;
    }
    Ok(())
}

/// Returns the CPUID leaves for vCPU `index` of `count`: those that KVM supports, with this machine's topology and
/// the bits by which the guest finds its clock.
pub(crate) fn cpuid(kvm: &Kvm, index: u32, count: u32) -> Result<CpuId, CpuError> {
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm_error("list the supported CPUID leaves"))?;
    let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let entries = filter(supported.as_slice(), index, count, deadline);
    // Does not fail: at most three entries are added to a list that fits with room to spare.
    CpuId::from_entries(&entries).map_err(|_| CpuError::Kvm {
        what: "hold all CPUID leaves",
        source: kvm_ioctls::Error::new(libc::E2BIG),
    })
}

/// Returns `supported` with two changes: rewrites the leaves that describe topology and clocks (SDM vol. 2, CPUID;
/// APM vol. 3, appendix E), and hides the features that the guest must not see.
fn filter(
    supported: &[kvm_cpuid_entry2],
    index: u32,
    count: u32,
    tsc_deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    const HYPERVISOR: u32 = 1 << 31;
    const TSC_DEADLINE: u32 = 1 << 24;
    const HTT: u32 = 1 << 28;
    const CMP_LEGACY: u32 = 1 << 1;
    const TOPOLOGY: u32 = 0xb;

    let leaf0 = supported.iter().find(|entry| entry.function == 0);
    let amd = leaf0.is_some_and(|leaf| {
        let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        matches!(name.as_flattened(), b"AuthenticAMD" | b"HygonGenuine")
    });
    let has_topology = leaf0.is_some_and(|leaf| leaf.eax >= TOPOLOGY);
    // Number of APIC id bits that distinguish the cores of the package.
    let core_bits = count.next_power_of_two().trailing_zeros();

    let mut entries = Vec::with_capacity(supported.len() + 3);
    for entry in supported {
        let mut entry = *entry;
        match entry.function {
            1 => {
                let cores = count.next_power_of_two().min(255);
                entry.ebx = entry.ebx & 0x0000_ffff | cores << 16 | index << 24;
                entry.ecx |= HYPERVISOR;
                if tsc_deadline {
                    entry.ecx |= TSC_DEADLINE;
                }
                set_bits(&mut entry.edx, HTT, count > 1);
            }
            4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
                // Caches of levels 1 and 2 belong to one core, all others to the package.
                let sharing = if entry.eax >> 5 & 7 < 3 { 1 } else { count };
                entry.eax = entry.eax & 0x3fff | (sharing - 1) << 14;
                if entry.function == 4 {
                    entry.eax |= (count - 1).min(63) << 26;
                }
            }
            // The topology leaf is written below. The newer leaf 0x1f would only repeat it.
            TOPOLOGY | 0x1f => continue,
            0x8000_0001 if amd => set_bits(&mut entry.ecx, CMP_LEGACY, count > 1),
            0x8000_0008 if amd => {
                entry.ecx = entry.ecx & !0xf0ff | (count - 1).min(255) | core_bits << 12;
            }
            0x8000_001e if amd => {
                entry.eax = index;
                entry.ebx = index & 0xff;
                entry.ecx = 0;
            }
            _ => {}
        }
        entries.push(entry);
    }
    if has_topology {
        let level = |number: u32, kind: u32, bits, processors| kvm_cpuid_entry2 {
            function: TOPOLOGY,
            index: number,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: bits,
            ebx: processors,
            ecx: number | kind << 8,
            edx: index,
            ..Default::default()
        };
        const THREAD: u32 = 1;
        const CORE: u32 = 2;
        entries.push(level(0, THREAD, 0, 1));
        entries.push(level(1, CORE, core_bits, count));
        entries.push(level(2, 0, 0, 0));
    }
    features::mend(&mut entries);
    entries
}

fn set_bits(word: &mut u32, bits: u32, on: bool) {
    *word = if on { *word | bits } else { *word & !bits };
}

/// Sets the model-specific registers that firmware sets: enables fast string operations, and makes write-back the
/// default MTRR memory type.
fn set_msrs(vcpu: &VcpuFd) -> Result<(), CpuError> {
    const IA32_MISC_ENABLE: u32 = 0x1a0;
    const FAST_STRINGS: u64 = 1;
    const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
    const ENABLED_WRITE_BACK: u64 = 1 << 11 | 6;
    write_msrs(
        vcpu,
        &[
            (IA32_MISC_ENABLE, FAST_STRINGS),
            (IA32_MTRR_DEF_TYPE, ENABLED_WRITE_BACK),
        ],
    )
}

pub(crate) fn write_msrs(vcpu: &VcpuFd, values: &[(u32, u64)]) -> Result<(), CpuError> {
    let entries: Vec<_> = values
        .iter()
        .map(|(index, data)| kvm_msr_entry {
            index: *index,
            data: *data,
            ..Default::default()
        })
        .collect();
    let what = "set model-specific registers";
    let msrs = Msrs::from_entries(&entries).map_err(|_| CpuError::Kvm {
        what,
        source: kvm_ioctls::Error::new(libc::E2BIG),
    })?;
    let set = vcpu.set_msrs(&msrs).map_err(kvm_error(what))?;
    match values.get(set) {
        None => Ok(()),
        Some((index, _)) => Err(CpuError::Msr { index: *index }),
    }
}

/// Connects the legacy interrupt controller to LINT0 and NMIs to LINT1, as firmware does (MP specification 1.4,
/// 3.6.2.1).
fn set_lapic(vcpu: &VcpuFd) -> Result<(), CpuError> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const NMI: u8 = 4;
    const EXT_INT: u8 = 7;
    let mut lapic = vcpu.get_lapic().map_err(kvm_error("read the local APIC"))?;
    set_delivery_mode(&mut lapic, LVT_LINT0, EXT_INT);
    set_delivery_mode(&mut lapic, LVT_LINT1, NMI);
    vcpu.set_lapic(&lapic)
        .map_err(kvm_error("set up the local APIC"))
}

/// Sets bits 10:8 of a local vector table entry (SDM vol. 3, 11.5.1).
fn set_delivery_mode(lapic: &mut kvm_lapic_state, entry: usize, mode: u8) {
    let byte = &mut lapic.regs[entry + 1];
    *byte = (byte.cast_unsigned() & !7 | mode).cast_signed();
}

/// Puts the vCPU into 64-bit mode at `rip`, with interrupts off and with the GDT and page tables of
/// [`write_tables`](crate::entry::write_tables), and sets RSI to `rsi`.
pub(crate) fn set_entry(vcpu: &VcpuFd, rip: Gpa, rsi: Gpa) -> Result<(), CpuError> {
    let mut sregs = vcpu
        .get_sregs()
        .map_err(kvm_error("read the system registers"))?;
    set_long_mode(&mut sregs);
    vcpu.set_sregs(&sregs)
        .map_err(kvm_error("set the system registers"))?;
    // The state after FNINIT and the reset value of MXCSR.
    let fpu = kvm_fpu {
        fcw: 0x37f,
        mxcsr: 0x1f80,
        ..Default::default()
    };
    vcpu.set_fpu(&fpu)
        .map_err(kvm_error("set the floating-point state"))?;
    let regs = kvm_regs {
        rip: rip.0,
        rsi: rsi.0,
        rsp: layout::STACK.0,
        rflags: hvprobe_arch::regs::rflags::FIXED,
        ..Default::default()
    };
    vcpu.set_regs(&regs)
        .map_err(kvm_error("set the general registers"))
}

fn set_long_mode(sregs: &mut kvm_sregs) {
    const CR0_PE: u64 = 1 << 0;
    const CR0_MP: u64 = 1 << 1;
    const CR0_ET: u64 = 1 << 4;
    const CR0_NE: u64 = 1 << 5;
    const CR0_PG: u64 = 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME: u64 = 1 << 8;
    const EFER_LMA: u64 = 1 << 10;

    sregs.cr0 = CR0_PE | CR0_MP | CR0_ET | CR0_NE | CR0_PG;
    sregs.cr3 = layout::PAGE_TABLES.0;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME | EFER_LMA;
    sregs.gdt.base = layout::GDT.0;
    sregs.gdt.limit = GDT_BYTES - 1;
    sregs.cs = segment(CODE, 0xb, true);
    let data = segment(DATA, 0x3, false);
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
}

/// Returns a flat segment of privilege level 0.
fn segment(selector: u16, kind: u8, code: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        dpl: 0,
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;
    use crate::vm::MAX_CPUS;

    fn leaf(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn check(leaf: kvm_cpuid_entry2, vendor: &[u8; 12], index: u32, count: u32, expected: Expect) {
        let word = |at: usize| u32::from_le_bytes(vendor[at..at + 4].try_into().unwrap());
        let leaf0 = self::leaf(0, 0, [0x20, word(0), word(8), word(4)]);
        let entries = filter(&[leaf0, leaf], index, count, true);
        let text: Vec<_> = entries[1..]
            .iter()
            .map(|e| {
                format!(
                    "{:x}.{} {:08x} {:08x} {:08x} {:08x}\n",
                    e.function, e.index, e.eax, e.ebx, e.ecx, e.edx
                )
            })
            .collect();
        expected.assert_eq(&text.concat());
    }

    const INTEL: &[u8; 12] = b"GenuineIntel";
    const AMD: &[u8; 12] = b"AuthenticAMD";

    #[test]
    fn host_topology_gives_way_to_the_machines() {
        check(
            leaf(0xb, 0, [5, 6, 7, 8]),
            INTEL,
            2,
            3,
            expect![[r#"
            b.0 00000000 00000001 00000100 00000002
            b.1 00000002 00000003 00000201 00000002
            b.2 00000000 00000000 00000002 00000002
        "#]],
        );
        check(
            leaf(0x1f, 0, [5, 6, 7, 8]),
            AMD,
            0,
            1,
            expect![[r#"
            b.0 00000000 00000001 00000100 00000000
            b.1 00000000 00000001 00000201 00000000
            b.2 00000000 00000000 00000002 00000000
        "#]],
        );
    }

    #[test]
    fn leaf_1_has_apic_id_hypervisor_and_deadline_timer() {
        let host = leaf(1, 0, [0x806f8, 0x0510_0800, 0x0020_0000, 0x1000_0000]);
        check(
            host,
            INTEL,
            1,
            2,
            expect![[r#"
            1.0 000806f8 01020800 81200000 10000000
            b.0 00000000 00000001 00000100 00000001
            b.1 00000001 00000002 00000201 00000001
            b.2 00000000 00000000 00000002 00000001
        "#]],
        );
        check(
            host,
            INTEL,
            0,
            1,
            expect![[r#"
            1.0 000806f8 00010800 81200000 00000000
            b.0 00000000 00000001 00000100 00000000
            b.1 00000000 00000001 00000201 00000000
            b.2 00000000 00000000 00000002 00000000
        "#]],
        );
        check(
            host,
            AMD,
            253,
            MAX_CPUS,
            expect![[r#"
            1.0 000806f8 fdff0800 81200000 10000000
            b.0 00000000 00000001 00000100 000000fd
            b.1 00000008 000000fe 00000201 000000fd
            b.2 00000000 00000000 00000002 000000fd
        "#]],
        );
    }

    #[test]
    fn cores_share_only_the_last_cache() {
        let l1 = leaf(4, 0, [0xfc00_4121, 1, 2, 3]);
        let l3 = leaf(4, 3, [0xfc1f_c163, 1, 2, 3]);
        check(
            l1,
            INTEL,
            0,
            4,
            expect![[r#"
            4.0 0c000121 00000001 00000002 00000003
            b.0 00000000 00000001 00000100 00000000
            b.1 00000002 00000004 00000201 00000000
            b.2 00000000 00000000 00000002 00000000
        "#]],
        );
        check(
            l3,
            INTEL,
            0,
            4,
            expect![[r#"
            4.3 0c00c163 00000001 00000002 00000003
            b.0 00000000 00000001 00000100 00000000
            b.1 00000002 00000004 00000201 00000000
            b.2 00000000 00000000 00000002 00000000
        "#]],
        );
    }

    #[test]
    fn amd_leaves_count_the_cores() {
        check(
            leaf(0x8000_0008, 0, [0x3028, 0, 0x700f, 0]),
            AMD,
            1,
            2,
            expect![[r#"
                80000008.0 00003028 00000000 00001001 00000000
                b.0 00000000 00000001 00000100 00000001
                b.1 00000001 00000002 00000201 00000001
                b.2 00000000 00000000 00000002 00000001
            "#]],
        );
        check(
            leaf(0x8000_0008, 0, [0x3028, 0, 0x700f, 0]),
            INTEL,
            1,
            2,
            expect![[r#"
                80000008.0 00003028 00000000 0000700f 00000000
                b.0 00000000 00000001 00000100 00000001
                b.1 00000001 00000002 00000201 00000001
                b.2 00000000 00000000 00000002 00000001
            "#]],
        );
        check(
            leaf(0x8000_001e, 0, [9, 0x109, 0x702, 0]),
            AMD,
            1,
            2,
            expect![[r#"
                8000001e.0 00000001 00000001 00000000 00000000
                b.0 00000000 00000001 00000100 00000001
                b.1 00000001 00000002 00000201 00000001
                b.2 00000000 00000000 00000002 00000001
            "#]],
        );
    }
}
