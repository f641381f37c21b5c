//! A start state under construction: registers, bases and memory. They are changed until the instruction can be
//! executed, or faults as its [`Aim`] says.

use hvprobe_arch::Gva;
use hvprobe_arch::regs::{Gpr, Regs};
use iced_x86::{CodeSize, FlowControl, Instruction, OpKind, Register, UsedMemory};

use super::layout::{ARENA, ARENA_SIZE, LANDING, LOW_ARENA, MAP, PAGE};
use super::random::Random;
use super::start::Host;

/// Place for an instruction's memory operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// In the arena, aligned to 64 bytes.
    Aligned,
    /// In the arena, anywhere.
    Unaligned,
    /// Across the boundary of two pages of the arena.
    Edge,
    /// Across the end of the arena, so that part of the access faults.
    Straddle,
    /// At unmapped addresses.
    Unmapped,
    /// At a non-canonical address.
    NonCanonical,
}

/// Which results of an instruction are not determined by the start state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// Everything is determined.
    Exact,
    /// EDX:EAX holds a clock or counter.
    Clock,
    /// The destination holds a random number, and the arithmetic flags depend on it.
    Random(Gpr),
}

/// A state under construction.
pub(super) struct Draft<'a> {
    pub(super) instruction: &'a Instruction,
    pub(super) host: &'a Host,
    pub(super) random: Random,
    pub(super) aim: Aim,
    pub(super) regs: Regs,
    pub(super) fs_base: u64,
    pub(super) gs_base: u64,
    pub(super) is_full: bool,
    pub(super) arena: Vec<u8>,
    pub(super) targets: Vec<Gva>,
    pub(super) exactness: Exactness,
    pub(super) memory: Vec<UsedMemory>,
}

/// The general registers in the order of their encoding.
pub(super) const GPRS: [Gpr; 16] = [
    Gpr::Rax,
    Gpr::Rcx,
    Gpr::Rdx,
    Gpr::Rbx,
    Gpr::Rsp,
    Gpr::Rbp,
    Gpr::Rsi,
    Gpr::Rdi,
    Gpr::R8,
    Gpr::R9,
    Gpr::R10,
    Gpr::R11,
    Gpr::R12,
    Gpr::R13,
    Gpr::R14,
    Gpr::R15,
];

/// Returns the general register `name`, or the one that `name` is a part of; `None` if it is no general register.
pub(super) fn gpr(name: Register) -> Option<Gpr> {
    name.is_gpr()
        .then(|| GPRS.get(name.full_register().number()).copied())
        .flatten()
}

impl Draft<'_> {
    pub(super) fn fill_arena(&mut self) {
        let words = ARENA_SIZE / 8;
        self.arena = (0..words)
            .flat_map(|_| self.random.value().to_le_bytes())
            .collect();
    }

    /// Returns the value of a general register, and 0 for any other.
    pub(super) fn get(&self, register: Register) -> u64 {
        gpr(register).map_or(0, |gpr| {
            let value = self.regs.get(gpr);
            if register.is_gpr32() {
                value & 0xffff_ffff
            } else {
                value
            }
        })
    }

    pub(super) fn set(&mut self, register: Register, value: u64) {
        if let Some(gpr) = gpr(register) {
            self.regs.set(gpr, value);
        }
    }

    /// Returns an address for an operand of `size` bytes in the arena at `arena`, or beside it, as the aim
    /// requires.
    fn address(&mut self, size: u64, arena: u64) -> u64 {
        let size = size.clamp(1, PAGE);
        let random = &mut self.random;
        match self.aim {
            Aim::Aligned => arena + PAGE + random.below(0x140) * 64,
            Aim::Unaligned => arena + PAGE + random.below(0x5000),
            Aim::Edge => arena + PAGE * (2 + random.below(4)) - random.below(size),
            Aim::Straddle if size > 1 => arena + ARENA_SIZE - 1 - random.below(size - 1),
            Aim::Unmapped | Aim::Straddle if random.chance(50) => {
                arena - PAGE + random.below(PAGE - size)
            }
            Aim::Unmapped | Aim::Straddle => arena + ARENA_SIZE + random.below(PAGE),
            Aim::NonCanonical => 0x0123_4567_89ab_0000 + random.below(0x1_0000),
        }
    }

    /// Sets registers and bases such that a memory operand lies where the aim requires.
    pub(super) fn place(&mut self, memory: UsedMemory) {
        let is_narrow = memory.address_size() == CodeSize::Code32;
        let size = memory.memory_size().size() as u64;
        let arena = if is_narrow { LOW_ARENA } else { ARENA };
        let mut at = self.address(size, arena);
        let segment = memory.segment();
        let (base, index) = (memory.base(), memory.index());
        let scale = u64::from(memory.scale()).max(1);
        let displacement = memory.displacement();
        let is_based = matches!(segment, Register::FS | Register::GS);
        let no_base = matches!(base, Register::None | Register::RIP | Register::EIP);
        if no_base && index == Register::None {
            if is_based {
                if self.aim == Aim::NonCanonical {
                    at = ARENA + ARENA_SIZE;
                }
                self.set_base(segment, at.wrapping_sub(displacement));
            } else if matches!(self.aim, Aim::Unmapped | Aim::Straddle | Aim::NonCanonical) {
                self.is_full = false;
            }
            return;
        }
        if is_based && self.aim != Aim::NonCanonical {
            // Per-CPU accesses: small offsets, added to a distant base.
            for register in [base, index] {
                if register != Register::RSP {
                    let offset = self.random.below(0x100);
                    self.set(register, offset);
                }
            }
            let offset = displacement
                .wrapping_add(self.get(base))
                .wrapping_add(self.get(index).wrapping_mul(scale));
            self.set_base(segment, at.wrapping_sub(offset));
            return;
        }
        let wanted = at.wrapping_sub(displacement);
        let wanted = if is_narrow {
            wanted & 0xffff_ffff
        } else {
            wanted
        };
        if base == index {
            self.set(base, wanted / (1 + scale));
        } else if no_base {
            self.set(index, wanted / scale);
        } else {
            if index != Register::None {
                let offset = self.random.below(0x40);
                self.set(index, offset);
            }
            let offset = self.get(index).wrapping_mul(scale);
            self.set(base, wanted.wrapping_sub(offset));
        }
    }

    fn set_base(&mut self, segment: Register, base: u64) {
        if segment == Register::FS {
            self.fs_base = base;
        } else {
            self.gs_base = base;
        }
    }

    /// Sets the pointers and count of a string instruction, such as `movs`.
    pub(super) fn string(&mut self) {
        let is_narrow = self
            .memory
            .iter()
            .any(|memory| memory.address_size() == CodeSize::Code32);
        let arena = if is_narrow { LOW_ARENA } else { ARENA };
        for register in [Register::RSI, Register::RDI] {
            let at = self.address(8, arena);
            self.set(register, at);
        }
        if self.instruction.has_rep_prefix() || self.instruction.has_repne_prefix() {
            let count = match self.random.below(4) {
                0 => 0,
                1 => 1,
                _ => self.random.below(24),
            };
            self.regs.rcx = count;
        }
    }

    /// Returns the address of a memory operand with the current registers.
    pub(super) fn effective(&self, memory: &UsedMemory) -> u64 {
        let base = match memory.base() {
            // The displacement is the whole address.
            Register::RIP | Register::EIP => 0,
            base => self.get(base),
        };
        let scale = u64::from(memory.scale());
        let sum = base
            .wrapping_add(self.get(memory.index()).wrapping_mul(scale))
            .wrapping_add(memory.displacement());
        match memory.segment() {
            Register::FS => self.fs_base.wrapping_add(sum),
            Register::GS => self.gs_base.wrapping_add(sum),
            _ if memory.address_size() == CodeSize::Code32 => sum & 0xffff_ffff,
            _ => sum,
        }
    }

    /// Writes `bytes` to memory from `at` on. Skips the bytes at addresses where the arena is not mapped.
    pub(super) fn patch(&mut self, at: u64, bytes: &[u8]) {
        let text = self.host.text.0.0..self.host.text.1.0;
        for (at, byte) in (0..).map(|n| at.wrapping_add(n)).zip(bytes) {
            let offset = match at {
                _ if at.wrapping_sub(ARENA) < ARENA_SIZE => at - ARENA,
                _ if at.wrapping_sub(LOW_ARENA) < ARENA_SIZE => at - LOW_ARENA,
                // The arena repeats wherever there is no text.
                MAP.. if self.is_full && !text.contains(&at) => at % ARENA_SIZE,
                _ => continue,
            };
            if let Some(there) = usize::try_from(offset)
                .ok()
                .and_then(|offset| self.arena.get_mut(offset))
            {
                *there = *byte;
            }
        }
    }

    /// Writes `bytes` to the first memory operand.
    pub(super) fn patch_operand(&mut self, bytes: &[u8]) {
        if let Some(memory) = self.memory.first().copied() {
            let at = self.effective(&memory);
            self.patch(at, bytes);
        }
    }

    /// Prepares a branch: sets the target of an indirect one, and records where execution may continue. Has no
    /// effect on other instructions. Returns the reason if the bench cannot run the instruction.
    pub(super) fn branch(&mut self) -> Result<(), &'static str> {
        let instruction = self.instruction;
        let (start, end) = self.host.text;
        let own = instruction.ip()..instruction.next_ip();
        match instruction.flow_control() {
            FlowControl::ConditionalBranch
            | FlowControl::UnconditionalBranch
            | FlowControl::Call => {
                let target = instruction.near_branch_target();
                if own.contains(&target) {
                    return Err("it branches into itself");
                }
                if !(start.0..end.0 - 1).contains(&target) {
                    return Err("it branches out of the kernel's text");
                }
                self.targets.push(Gva(target));
            }
            FlowControl::IndirectBranch | FlowControl::IndirectCall | FlowControl::Return => {
                let landing = LANDING + self.random.below(PAGE - 2);
                self.targets.push(Gva(landing));
                let target = match self.random.below(10) {
                    0 => LANDING + 3 * PAGE,
                    1 => 0x0123_4567_89ab_cdef,
                    _ => landing,
                };
                if instruction.op_count() > 0 && instruction.op0_kind() == OpKind::Register {
                    self.set(instruction.op0_register(), target);
                } else if instruction.flow_control() == FlowControl::Return {
                    self.patch(self.regs.rsp, &target.to_le_bytes());
                } else if let Some(memory) = self.operand() {
                    let at = self.effective(&memory);
                    self.patch(at, &target.to_le_bytes());
                }
            }
            _ => {}
        }
        if !(start.0..end.0 - 1).contains(&instruction.next_ip()) {
            return Err("it is the last of the kernel's text");
        }
        Ok(())
    }

    /// Returns the explicit memory operand.
    fn operand(&self) -> Option<UsedMemory> {
        let (base, index) = (
            self.instruction.memory_base(),
            self.instruction.memory_index(),
        );
        self.memory
            .iter()
            .find(|memory| {
                memory.index() == index
                    && (memory.base() == base || base == Register::RIP)
                    && memory.displacement() == self.instruction.memory_displacement64()
            })
            .copied()
    }
}
