//! Handlers that record the state with which a micro-kernel's interrupts and exceptions arrive, and continue
//! the guest where the test wants.
//!
//! The handler of an exception continues the guest at the address in R15. If R15 is 0, the handler stores R13
//! at the address in R14, which may resolve the fault, and returns to the instruction. Handlers of NMIs and
//! interrupts return to where the guest was interrupted.

use hvprobe_arch::Gva;
use hvprobe_machine::Machine;
use iced_x86::code_asm::{CodeLabel, ptr, qword_ptr, registers::*};

use super::kernel::{APIC, Asm, DATA, MicroKernel, VIRT};

/// Address of the number of records. The records begin at offset `FIRST` and have 1 << `SIZE_SHIFT` bytes each.
pub const RECORDS: u64 = VIRT + 0x20_0000;
const FIRST: i32 = 0x80;
const SIZE_SHIFT: u32 = 7;
const MAX: u32 = 8192;
/// Stack 1 of the interrupt stack table.
const STACK: u64 = VIRT + 0x3f_0000;
const NMI: i32 = 2;
/// Exit status of a guest that makes more than `MAX` records.
pub const FULL: u8 = 0xfd;
/// First vector of interrupts.
const INTERRUPTS: i32 = 32;
/// Size of the task state segment in bytes (SDM vol. 3, 7.7).
const TSS_SIZE: u64 = 0x68;
/// Selector of the task state segment's descriptor (SDM vol. 3, 7.2.3).
const TSS_SELECTOR: u16 = 0x20;

/// State recorded by a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Vector of the interrupt or exception.
    pub vector: u64,
    /// Error code, or 0.
    pub error_code: u64,
    /// RIP of the frame (SDM vol. 3, 6.14.2).
    pub rip: u64,
    /// CS of the frame.
    pub cs: u64,
    /// RFLAGS of the frame.
    pub rflags: u64,
    /// RSP of the frame.
    pub rsp: u64,
    /// SS of the frame.
    pub ss: u64,
    /// CR2 in the handler.
    pub cr2: u64,
    /// RAX when the handler began.
    pub rax: u64,
    /// Base of IDTR in the handler.
    pub idt: u64,
}

/// Returns the records made so far.
///
/// # Panics
/// When the guest's memory cannot be read.
#[must_use]
pub fn records(machine: &Machine) -> Vec<Record> {
    let word = |at: u64| {
        let mut raw = [0; 8];
        machine
            .read_kernel(Gva(at), &mut raw)
            .unwrap_or_else(|error| panic!("records cannot be read: {error}"));
        u64::from_le_bytes(raw)
    };
    (0..word(RECORDS).min(u64::from(MAX)))
        .map(|n| {
            let at = RECORDS + u64::from(FIRST.unsigned_abs()) + (n << SIZE_SHIFT);
            let word = |n: u64| word(at + n * 8);
            Record {
                vector: word(0),
                error_code: word(1),
                rip: word(2),
                cs: word(3),
                rflags: word(4),
                rsp: word(5),
                ss: word(6),
                cr2: word(7),
                rax: word(8),
                idt: word(9),
            }
        })
        .collect()
}

/// Returns whether the processor pushes an error code (SDM vol. 3, table 6-1).
fn has_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17)
}

impl MicroKernel {
    /// Adds handlers that record `vectors`. They run on the interrupted stack or, with `own_stack`, on a stack of
    /// their own. Must be called between functions. The code of [`MicroKernel::start_recording`] must run first.
    ///
    /// # Errors
    /// When the code cannot be assembled.
    pub fn record(&mut self, vectors: &[u8], own_stack: bool) -> Asm<()> {
        let mut common = self.asm().create_label();
        let name = self.asm().create_label();
        self.function("recorder", name)?;
        for vector in vectors {
            let mut entry = self.asm().create_label();
            self.asm().set_label(&mut entry)?;
            if !has_error_code(*vector) {
                self.asm().push(0)?;
            }
            self.asm().push(i32::from(*vector))?;
            self.asm().jmp(common)?;
            self.handler(*vector, entry, u8::from(own_stack));
        }
        self.asm().set_label(&mut common)?;
        self.recorder()
    }

    fn recorder(&mut self) -> Asm<()> {
        let a = self.asm();
        let (mut full, mut interrupt, mut resolve, mut back) = (
            a.create_label(),
            a.create_label(),
            a.create_label(),
            a.create_label(),
        );
        a.push(rax)?;
        a.push(rbx)?;
        a.push(rcx)?;
        a.mov(rbx, RECORDS)?;
        a.mov(rax, qword_ptr(rbx))?;
        a.cmp(rax, MAX.cast_signed())?;
        a.jae(full)?;
        a.inc(qword_ptr(rbx))?;
        a.shl(rax, SIZE_SHIFT)?;
        a.lea(rbx, ptr(rbx + rax + FIRST))?;
        // Copies the words from the vector to SS.
        for word in 0..7 {
            a.mov(rcx, qword_ptr(rsp + 24 + word * 8))?;
            a.mov(qword_ptr(rbx + word * 8), rcx)?;
        }
        a.mov(rcx, cr2)?;
        a.mov(qword_ptr(rbx + 56), rcx)?;
        a.mov(rcx, qword_ptr(rsp + 16))?;
        a.mov(qword_ptr(rbx + 64), rcx)?;
        a.sub(rsp, 16)?;
        a.sidt(ptr(rsp))?;
        a.mov(rcx, qword_ptr(rsp + 2))?;
        a.mov(qword_ptr(rbx + 72), rcx)?;
        a.add(rsp, 16)?;
        a.cmp(qword_ptr(rsp + 24), NMI)?;
        a.je(back)?;
        a.cmp(qword_ptr(rsp + 24), INTERRUPTS)?;
        a.jae(interrupt)?;
        a.test(r15, r15)?;
        a.jz(resolve)?;
        a.mov(qword_ptr(rsp + 40), r15)?;
        a.jmp(back)?;
        a.set_label(&mut resolve)?;
        a.mov(qword_ptr(r14), r13)?;
        a.jmp(back)?;
        a.set_label(&mut interrupt)?;
        a.mov(rcx, APIC)?;
        a.mov(iced_x86::code_asm::dword_ptr(rcx + 0xb0), 0)?;
        a.set_label(&mut back)?;
        a.pop(rcx)?;
        a.pop(rbx)?;
        a.pop(rax)?;
        a.add(rsp, 16)?;
        a.iretq()?;
        a.set_label(&mut full)?;
        a.mov(eax, u32::from(FULL))?;
        a.out(0xf4, al)?;
        a.mov(al, 0xfe)?;
        a.out(0x64, al)?;
        a.hlt()
    }

    /// Adds code that prepares for the handlers: it loads a GDT with a task state segment, enables the local APIC,
    /// and masks the legacy interrupt controllers. Handlers may use the segment's first interrupt stack. Changes
    /// RAX and RBX.
    ///
    /// # Errors
    /// When the code cannot be assembled.
    pub fn start_recording(&mut self) -> Asm<()> {
        let a = self.asm();
        // All in the page of results: the loader's GDT followed by the task state segment's descriptor, the GDT
        // pointer, and the segment.
        let (gdt, gdtr, tss) = (
            VIRT + DATA + 0xe00,
            VIRT + DATA + 0xe40,
            VIRT + DATA + 0xe80,
        );
        let [b0, b1, b2, b3, ..] = tss.to_le_bytes();
        let limit = u8::try_from(TSS_SIZE - 1).unwrap_or(0);
        let low = u64::from_le_bytes([limit, 0, b0, b1, b2, 0x89, 0, b3]);
        let descriptors = [
            0,
            0,
            0x00af_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            low,
            tss >> 32,
        ];
        for (n, descriptor) in (0_u64..).zip(descriptors) {
            a.mov(rax, descriptor)?;
            a.mov(qword_ptr(gdt + n * 8), rax)?;
        }
        a.mov(rax, STACK)?;
        a.mov(qword_ptr(tss + 0x24), rax)?;
        a.mov(rbx, gdtr)?;
        a.mov(rax, u64::from(TSS_SELECTOR + 15))?;
        a.mov(qword_ptr(rbx), rax)?;
        a.mov(rax, gdt)?;
        a.mov(qword_ptr(rbx + 2), rax)?;
        a.lgdt(ptr(rbx))?;
        a.mov(eax, u32::from(TSS_SELECTOR))?;
        a.ltr(ax)?;
        a.mov(al, 0xff)?;
        a.out(0x21, al)?;
        a.out(0xa1, al)?;
        // The spurious-interrupt register: software enable, vector 0xff (SDM vol. 3, 11.9).
        a.mov(rbx, APIC)?;
        a.mov(iced_x86::code_asm::dword_ptr(rbx + 0xf0), 0x1ff)
    }

    /// Returns a new label, for a jump to code that follows.
    pub fn label(&mut self) -> CodeLabel {
        self.asm().create_label()
    }
}
