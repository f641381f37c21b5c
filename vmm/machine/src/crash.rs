//! Reports on guests that cannot continue, with registers and the bytes at RIP.

use std::fmt::Write;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::{Levels, PageTables};
use hvprobe_arch::{Gpa, Gva, insn};
use hvprobe_vm::memory::GuestRam;
use hvprobe_vm::vcpu::CpuFd;

/// CR4.LA57 (SDM vol. 3, 2.5).
const CR4_LA57: u64 = 1 << 12;
/// Address of a processor's first instruction after a reset (SDM vol. 3, 10.1.4).
const RESET_RIP: u64 = 0xfff0;
const RESET_CS: u16 = 0xf000;
/// The address bits of CR3 (SDM vol. 3, table 4-12).
const CR3_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Returns the page tables of a vCPU with these control registers.
pub(crate) fn tables(cr3: u64, cr4: u64) -> PageTables {
    PageTables {
        root: Gpa(cr3 & CR3_ADDRESS),
        levels: if cr4 & CR4_LA57 == 0 {
            Levels::Four
        } else {
            Levels::Five
        },
    }
}

/// Returns a report of several lines: what has happened (`what`), the number of the vCPU, its registers, and the
/// code at RIP.
pub(crate) fn report(what: &str, index: usize, cpu: &mut CpuFd, ram: &GuestRam) -> String {
    let regs = cpu.regs();
    let sregs = *cpu.sregs();
    let mut text = format!("{what}\nvCPU {index}\n");
    if regs.rip == RESET_RIP && sregs.cs.selector == RESET_CS {
        // kvm_amd resets the processor after a triple fault, because the hardware leaves its state undefined then.
        text.push_str("KVM has reset the processor: its registers are lost on this host\n");
        text.push_str(&trail(cpu));
        return text;
    }
    let cs = u64::from(sregs.cs.selector);
    let lines = [
        [
            ("rip", regs.rip),
            ("rflags", regs.rflags),
            ("rsp", regs.rsp),
        ],
        [("rax", regs.rax), ("rbx", regs.rbx), ("rcx", regs.rcx)],
        [("rdx", regs.rdx), ("rsi", regs.rsi), ("rdi", regs.rdi)],
        [("rbp", regs.rbp), ("r8", regs.r8), ("r9", regs.r9)],
        [("r10", regs.r10), ("r11", regs.r11), ("r12", regs.r12)],
        [("r13", regs.r13), ("r14", regs.r14), ("r15", regs.r15)],
        [("cr0", sregs.cr0), ("cr2", sregs.cr2), ("cr3", sregs.cr3)],
        [("cr4", sregs.cr4), ("efer", sregs.efer), ("cs", cs)],
    ];
    for line in lines {
        for (name, value) in line {
            let _ = write!(text, "{name:>6} {value:016x}");
        }
        text.push('\n');
    }
    text.push_str(&code_at(Gva(regs.rip), &sregs, ram));
    text.push('\n');
    text.push_str(&trail(cpu));
    text
}

/// Returns a line with RIP at the last entries, which shows where the guest exited and how it was resumed.
fn trail(cpu: &CpuFd) -> String {
    let trail = cpu.trail().take_while(|rip| *rip != 0);
    let words: Vec<String> = trail.map(|rip| format!("{rip:x}")).collect();
    format!("entered last at {}", words.join(" "))
}

fn code_at(rip: Gva, sregs: &kvm_bindings::kvm_sregs, ram: &GuestRam) -> String {
    let mut code = [0; insn::MAX_LEN];
    let paged = sregs.cr0 & (1 << 31) != 0;
    let read = if paged {
        tables(sregs.cr3, sregs.cr4)
            .read(ram, rip, &mut code)
            .is_ok()
    } else {
        let linear = sregs.cs.base.wrapping_add(rip.0);
        ram.read(Gpa(linear), &mut code).is_ok()
    };
    if read {
        format!("  code {} ({})", hex(&code), insn::text(&code, rip))
    } else {
        "  code at rip cannot be read".to_owned()
    }
}

/// Returns `bytes` as two hexadecimal digits each, separated by blanks.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let words: Vec<String> = bytes.iter().map(|b| format!("{b:02x}")).collect();
    words.join(" ")
}
