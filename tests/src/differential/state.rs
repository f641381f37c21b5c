//! Start states with which an instruction is executable: registers, memory, and allowed targets.
//!
//! Invariant: a state is determined by the seed, the instruction's address and the number of the run, so a
//! difference is reproduced from these three. In most states the instruction completes; in the others it faults as
//! its `Aim` says.

use hvprobe_arch::Gva;
use hvprobe_arch::regs::{Regs, rflags};
use iced_x86::{InstructionInfoFactory, Mnemonic};

use super::draft::{Aim, Draft, Exactness, GPRS};
use super::layout::{ARENA, ARENA_SIZE};
use super::random::Random;
use super::special;
use super::start::{Extended, Host, Start};
use super::text::Site;

/// A state to run an instruction in.
#[derive(Clone, Debug)]
pub struct Case {
    /// Registers and bases.
    pub start: Start,
    /// Content of the arena.
    pub arena: Vec<u8>,
    /// Extended state, for instructions that use it.
    pub extended: Option<Extended>,
    /// Addresses, besides the next instruction, where execution may continue.
    pub targets: Vec<Gva>,
    /// Which registers can be compared.
    pub exactness: Exactness,
    /// Place of the memory operands.
    pub aim: Aim,
}

/// Makes the state for run `run` of the instruction at `site`.
///
/// # Errors
/// The reason, when no state makes the instruction executable on the bench.
pub fn case(site: &Site, host: &Host, seed: u64, run: u64) -> Result<Case, &'static str> {
    let instruction = &site.instruction;
    let mut random = Random::new(&[seed, site.at.0, run]);
    let aim = match random.below(20) {
        0..=7 => Aim::Aligned,
        8..=12 => Aim::Unaligned,
        13..=14 => Aim::Edge,
        15 => Aim::Straddle,
        16..=18 => Aim::Unmapped,
        _ => Aim::NonCanonical,
    };
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(instruction);
    let mut draft = Draft {
        instruction,
        host,
        aim,
        regs: registers(&mut random),
        fs_base: 0,
        gs_base: ARENA,
        is_full: true,
        arena: Vec::new(),
        targets: Vec::new(),
        exactness: Exactness::Exact,
        memory: info.used_memory().to_vec(),
        random,
    };
    draft.regs.rip = site.at.0;
    draft.fill_arena();
    if instruction.is_string_instruction() {
        draft.string();
    } else {
        for index in 0..draft.memory.len() {
            draft.place(draft.memory[index]);
        }
    }
    special::prepare(&mut draft)?;
    draft.branch()?;
    let uses_extended = instruction.is_save_restore_instruction()
        || matches!(
            instruction.mnemonic(),
            Mnemonic::Ldmxcsr | Mnemonic::Stmxcsr | Mnemonic::Emms
        )
        || format!("{:?}", instruction.mnemonic()).starts_with('F')
        || info.used_registers().iter().any(|used| {
            let register = used.register();
            register.is_vector_register() || register.is_mm() || register.is_st() || register.is_k()
        });
    let extended = uses_extended.then(|| extended(&mut draft.random, &host.extended));
    Ok(Case {
        start: Start {
            regs: draft.regs,
            fs_base: draft.fs_base,
            gs_base: draft.gs_base,
            is_full: draft.is_full,
        },
        arena: draft.arena,
        extended,
        targets: draft.targets,
        exactness: draft.exactness,
        aim,
    })
}

/// Returns random registers with a stack in the arena.
fn registers(random: &mut Random) -> Regs {
    let mut regs = Regs::default();
    for gpr in GPRS {
        let value = if random.chance(15) {
            ARENA + random.below(ARENA_SIZE)
        } else {
            random.value()
        };
        regs.set(gpr, value);
    }
    regs.rsp = ARENA + 0x4000 + random.below(0x400) * 8;
    let flags = rflags::ARITHMETIC | rflags::IF | rflags::AC | rflags::ID;
    regs.rflags = random.next() & flags | rflags::FIXED;
    if random.chance(25) {
        regs.rflags |= rflags::DF;
    }
    regs
}

/// Returns the extended state `new` with random XMM registers.
fn extended(random: &mut Random, new: &Extended) -> Extended {
    /// Words of the XMM registers, and of XSTATE_BV (SDM vol. 1, 13.4).
    const XMM: std::ops::Range<usize> = 40..104;
    const XSTATE_BV: usize = 128;
    const X87_AND_SSE: u32 = 3;
    let mut state = new.clone();
    for word in &mut state[XMM] {
        *word = u32::try_from(random.value() & 0xffff_ffff).unwrap_or(0);
    }
    state[XSTATE_BV] |= X87_AND_SSE;
    state
}
