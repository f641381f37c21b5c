//! The micro-kernel: its layout, its code, and the file that boots it.
//!
//! It is booted and laid out like Linux: it is linked 16 MiB above `__START_KERNEL_map`, and has page tables, an
//! IDT, and ELF symbols. The #BP entry of the IDT begins as `asm_exc_int3` does. At the end of the function
//! `rcu_end_inkernel_boot`, the kernel's text is final. A test adds functions of its own, assembled with iced.
//!
//! ```text
//!   0xffffffff81000000  page tables: PML4, PUD and PMD of the kernel, PUD and PMD of the identity map
//!              …05000   IDT
//!              …06000   data: 4 KiB for the test's results, 4 KiB of stack
//!              …08000   text
//!   0xffffffff81200000  RAM: records of interrupts and exceptions, see `recorder`
//!   0xffffffff82000000  the local APIC
//! ```

use std::fmt;
use std::io::Write;
use std::path::Path;

use hvprobe_machine::{Bounds, MachineConfig, Refusals};
use iced_x86::code_asm::{CodeAssembler, CodeLabel, ptr, qword_ptr, registers::*};

use super::elf::{self, Symbol};

/// Address to which the micro-kernel is linked.
pub(super) const VIRT: u64 = 0xffff_ffff_8100_0000;
/// Physical address to which the micro-kernel is loaded.
const PHYS: u64 = 0x100_0000;
const IDT: u64 = 0x5000;
pub(super) const DATA: u64 = 0x6000;
const STACK_TOP: u64 = 0x8000;
const TEXT: u64 = 0x8000;

/// Address of 4 KiB of zeroed memory in which the test's code leaves its results.
pub const RESULTS: u64 = VIRT + DATA;
/// Address of the level-2 page table whose entries map 2 MiB each from [`WINDOW`] on. The entries below the
/// micro-kernel are empty, as are entry 17 and all after it, counted from 0.
pub const PMD: u64 = VIRT + 0x2000;
/// First address mapped by [`PMD`].
pub const WINDOW: u64 = 0xffff_ffff_8000_0000;
/// Address of the registers of the local APIC (SDM vol. 3, 11.4.1).
pub const APIC: u64 = WINDOW + (16 << 21);
/// An address at which nothing is mapped.
pub const UNMAPPED: u64 = WINDOW + (32 << 21);
/// Address of the interrupt descriptor table.
pub const IDT_BASE: u64 = VIRT + IDT;

/// Offset in [`RESULTS`] of the number of #BP the micro-kernel itself has handled.
pub const OWN_BREAKPOINTS: u64 = 0xff0;
/// Offset in [`RESULTS`] of the address after the last int3 that the micro-kernel itself has handled.
pub const LAST_BREAKPOINT: u64 = 0xff8;

/// Maximum number of #BP that the micro-kernel handles, more than any test needs.
const MAX_BREAKPOINTS: i32 = 500;

/// Exit status of the guest when an exception without a handler was raised.
pub const UNEXPECTED_EXCEPTION: u8 = 0xee;

/// A micro-kernel under construction.
pub struct MicroKernel {
    asm: CodeAssembler,
    functions: Vec<(String, CodeLabel)>,
    handlers: Vec<Handler>,
}

/// A handler that the test adds.
#[derive(Clone, Copy)]
struct Handler {
    vector: u8,
    label: CodeLabel,
    /// Entry of the interrupt stack table, or 0.
    stack: u8,
}

const ENTRY: &str = "startup_64";
const BREAKPOINT: &str = "asm_exc_int3";
const UNEXPECTED: &str = "unexpected_exception";

impl fmt::Debug for MicroKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.functions.iter().map(|(name, _)| name).collect();
        f.debug_struct("MicroKernel")
            .field("functions", &names)
            .finish_non_exhaustive()
    }
}

/// Result of an assembler's method.
pub type Asm<T> = Result<T, iced_x86::IcedError>;

impl MicroKernel {
    /// Assembles a micro-kernel whose `main` is assembled by `body`. `body` may define functions with
    /// [`MicroKernel::function`] after a final jump or return. `main` ends by returning, with the guest's exit
    /// status in AL.
    ///
    /// # Errors
    /// When the code cannot be assembled.
    pub fn assemble(body: impl FnOnce(&mut Self) -> Asm<()>) -> Asm<Self> {
        let mut kernel = Self {
            asm: CodeAssembler::new(64)?,
            functions: Vec::new(),
            handlers: Vec::new(),
        };
        let main = kernel.asm.create_label();
        kernel.prologue(main)?;
        kernel.define("main", main)?;
        body(&mut kernel)?;
        Ok(kernel)
    }

    /// Returns the assembler, for the test's own code.
    pub fn asm(&mut self) -> &mut CodeAssembler {
        &mut self.asm
    }

    /// Begins a function at `label`, with a symbol and the five-byte entry nop.
    ///
    /// # Errors
    /// When the assembler refuses.
    pub fn function(&mut self, name: &str, label: CodeLabel) -> Asm<()> {
        self.define(name, label)?;
        self.asm.db(&[0x0f, 0x1f, 0x44, 0x00, 0x00])
    }

    /// Makes `label` the handler of interrupts and exceptions with number `vector`. If `stack` is not 0, the
    /// handler runs on that stack of the interrupt stack table.
    pub fn handler(&mut self, vector: u8, label: CodeLabel, stack: u8) {
        self.handlers.push(Handler {
            vector,
            label,
            stack,
        });
    }

    fn define(&mut self, name: &str, mut label: CodeLabel) -> Asm<()> {
        self.asm.set_label(&mut label)?;
        self.functions.push((name.to_owned(), label));
        Ok(())
    }

    fn prologue(&mut self, main: CodeLabel) -> Asm<()> {
        // The loader starts the kernel here, with the loader's identity map and GDT.
        let entry = self.asm.create_label();
        self.define(ENTRY, entry)?;
        let (mut high, mut idtr) = (self.asm.create_label(), self.asm.create_label());
        self.asm.mov(rax, PHYS)?;
        self.asm.mov(cr3, rax)?;
        self.asm.lea(rax, ptr(high))?;
        self.asm.mov(rcx, VIRT - PHYS)?;
        self.asm.add(rax, rcx)?;
        self.asm.jmp(rax)?;
        self.asm.set_label(&mut high)?;
        self.asm.mov(rsp, VIRT + STACK_TOP)?;
        self.asm.lidt(ptr(idtr))?;
        let final_text = self.asm.create_label();
        self.asm.call(final_text)?;
        self.asm.call(main)?;
        self.asm.out(0xf4, al)?;
        self.asm.mov(al, 0xfe)?;
        self.asm.out(0x64, al)?;
        self.asm.hlt()?;
        self.asm.set_label(&mut idtr)?;
        self.asm.dw(&[0xfff])?;
        self.asm.dq(&[VIRT + IDT])?;

        self.define("rcu_end_inkernel_boot", final_text)?;
        self.asm.db(&[0x0f, 0x1f, 0x44, 0x00, 0x00])?;
        self.asm.push(rbx)?;
        self.asm.pop(rbx)?;
        self.asm.ret()?;

        let (breakpoint, unexpected) = (self.asm.create_label(), self.asm.create_label());
        self.define(BREAKPOINT, breakpoint)?;
        self.asm.db(&[0x0f, 0x1f, 0x00])?;
        self.asm.cld()?;
        self.asm.push(rax)?;
        self.asm.mov(rax, qword_ptr(rsp + 8))?;
        self.asm.push(rbx)?;
        self.asm.mov(rbx, RESULTS)?;
        self.asm.mov(
            qword_ptr(rbx + i32::try_from(LAST_BREAKPOINT).unwrap_or(0)),
            rax,
        )?;
        self.asm
            .inc(qword_ptr(rbx + i32::try_from(OWN_BREAKPOINTS).unwrap_or(0)))?;
        // Ends a guest that has gone astray in a field of int3s.
        self.asm.cmp(
            qword_ptr(rbx + i32::try_from(OWN_BREAKPOINTS).unwrap_or(0)),
            MAX_BREAKPOINTS,
        )?;
        self.asm.jae(unexpected)?;
        self.asm.pop(rbx)?;
        self.asm.pop(rax)?;
        self.asm.iretq()?;

        self.define(UNEXPECTED, unexpected)?;
        self.asm.mov(eax, u32::from(UNEXPECTED_EXCEPTION))?;
        self.asm.out(0xf4, al)?;
        self.asm.mov(al, 0xfe)?;
        self.asm.out(0x64, al)?;
        self.asm.hlt()?;
        Ok(())
    }

    /// Writes the ELF file into `folder` and returns the configuration that boots it.
    ///
    /// # Errors
    /// When the code cannot be assembled or the file not be written.
    pub fn build(mut self, folder: &Path) -> Result<MachineConfig, Box<dyn std::error::Error>> {
        let mut end = self.asm.create_label();
        self.asm.set_label(&mut end)?;
        self.asm.ret()?;
        let text = VIRT + TEXT;
        let options = iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let assembled = self.asm.assemble_options(text, options)?;
        let address = |label: &CodeLabel| assembled.label_ip(label);
        let mut starts = Vec::new();
        for (name, label) in &self.functions {
            starts.push((name.clone(), address(label)?));
        }
        let last = address(&end)?;
        let mut symbols = Vec::new();
        for (n, (name, addr)) in starts.iter().enumerate() {
            let next = starts.get(n + 1).map_or(last, |(_, addr)| *addr);
            symbols.push(Symbol {
                name: name.clone(),
                addr: *addr,
                size: next - addr,
                code: true,
            });
        }
        let start = |name: &str| {
            let found = starts.iter().find(|(known, _)| known == name);
            found.map_or(0, |(_, addr)| *addr)
        };
        let mark = |name: &str, addr, code| Symbol {
            name: name.to_owned(),
            addr,
            size: 0,
            code,
        };
        symbols.push(mark("_text", VIRT, true));
        symbols.push(mark("_stext", text, true));
        symbols.push(mark("_etext", last + 1, true));
        symbols.push(mark("init_top_pgt", VIRT, false));
        // There is no code that must not be probed, and the exception table is empty.
        for kind in ["noinstr", "entry", "kprobes"] {
            for end in ["start", "end"] {
                symbols.push(mark(&format!("__{kind}_text_{end}"), last + 1, true));
            }
        }
        symbols.push(mark("__start___ex_table", VIRT, false));
        symbols.push(mark("__stop___ex_table", VIRT, false));

        let mut content = page_tables();
        let mut gates = vec![(start(UNEXPECTED), 0); 256];
        gates[3].0 = start(BREAKPOINT);
        for handler in &self.handlers {
            gates[usize::from(handler.vector)] = (address(&handler.label)?, handler.stack);
        }
        content.extend(idt(&gates));
        content.resize(usize::try_from(TEXT)?, 0);
        content.extend(&assembled.inner.code_buffer);
        let entry = start(ENTRY) - VIRT + PHYS;
        let file = elf::write(&content, VIRT, PHYS, entry, &symbols);
        let path = folder.join("micro-kernel");
        std::fs::File::create(&path)?.write_all(&file)?;
        Ok(MachineConfig {
            name: "micro".to_owned(),
            kernel: path,
            initrd: None,
            cmdline: "none".to_owned(),
            cpus: 1,
            memory: 64 << 20,
            command: Vec::new(),
            probes: Vec::new(),
            refusals: Refusals::Fail,
            paused: false,
            optimize: false,
            bounds: Bounds::default(),
        })
    }
}

/// Returns PML4, kernel PUD and PMD, identity PUD and PMD, in this order, a page each.
fn page_tables() -> Vec<u8> {
    const TABLE: u64 = 0x3;
    const LARGE: u64 = 0x83;
    let mut pages = vec![[0_u64; 512]; 5];
    let at = |page: u64| (PHYS + page * 0x1000) | TABLE;
    pages[0][511] = at(1);
    pages[1][510] = at(2);
    // From 16 MiB above __START_KERNEL_map on, as for Linux; the entries below stay empty.
    for (n, entry) in (0_u64..).zip(&mut pages[2]).skip(8).take(8) {
        *entry = (n << 21) | LARGE;
    }
    // Uncached, as required for memory of devices.
    pages[2][16] = 0xfee0_0000 | LARGE | 0x18;
    pages[0][0] = at(3);
    pages[3][0] = at(4);
    for (n, entry) in (0_u64..).zip(&mut pages[4]) {
        *entry = (n << 21) | LARGE;
    }
    pages
        .iter()
        .flatten()
        .flat_map(|entry| entry.to_le_bytes())
        .collect()
}

/// Returns interrupt gates (SDM vol. 3, 6.14.1) with selector 0x10 of the loader's GDT. Each of `gates` is the
/// address of a handler and its entry of the interrupt stack table, or 0.
fn idt(gates: &[(u64, u8)]) -> Vec<u8> {
    let mut table = vec![0; gates.len() * 16];
    for ((handler, stack), gate) in gates.iter().zip(table.chunks_exact_mut(16)) {
        let bytes = handler.to_le_bytes();
        gate[..2].copy_from_slice(&bytes[..2]);
        gate[2] = 0x10;
        gate[4] = *stack;
        gate[5] = 0x8e;
        gate[6..12].copy_from_slice(&bytes[2..]);
    }
    table
}
