//! The code to which functions with a return probe return, and the part of a detour that makes them return
//! there.
//!
//! ```text
//!   at entry                                     at the return
//!   take an instance ─ none ─▶ missed += 1       stub: call common
//!   keep [rsp], caller, time, CPU, registers       common: save flags and 5 registers
//!   slot = rsp                                     the pushed address identifies the instance
//!   [rsp] = the instance's stub                    put the real return address in its place
//!                                                  slot = 0
//!                                                  reserve cells ─ full ─▶ lost += 1
//!                                                  fill, publish
//!                                                  free the instance
//!                                                  restore; ret
//! ```
//!
//! Each instance has a stub of its own, so that a return needs no search, whichever task or CPU it happens on.
//! The stub calls the common code, instead of pushing a number and jumping, so that calls and returns stay
//! paired for the processor's return predictor: the returns of callers further up are predicted correctly.
//!
//! If the return address found at entry is the stub of another return probe, this probe's code returns to that
//! stub. If the other probe comes earlier in the same detour, the caller (the real return address) is copied from
//! its instance at entry, because that instance may belong to another call by the time this probe's record is read.
//!
//! With supervisor shadow stacks (CET), a return to a stub would fault, so none of this is used in a guest that
//! enables them.

use super::capture::EntryCapture;
use super::emit::{
    CALL, CALL_REL32, Cells, Emitter, Frame, Full, ORIGIN, absolute, load, reachable, with_per_cpu,
};
use super::error::BuildError;
use super::instance::{CALLER, ENTRY_TSC, GENERATION, NEXT, NIL, RETURN, SLOT, TASK};
use super::instance::{InstanceLayout, Instances};
use super::record::{Capture, Layout, Ring};
use super::recorder::Part;
use crate::Gva;
use crate::regs::Gpr;
use crate::trap::INT3;
use iced_x86::code_asm::{CodeLabel, dword_ptr, qword_ptr, registers::*};
use iced_x86::{Code, Instruction, MemoryOperand, Register};

/// Distance between stubs in bytes.
pub const STUB: u32 = 16;
/// Number of bits of a call's id that count the uses of its instance.
const GENERATION_BITS: u32 = 40;
/// Bit that is set in the ids of calls with an instance, and clear in the ids of calls that the host follows.
const ID: u64 = 1 << 63;
const MAX_COUNT: u32 = 1 << 16;

/// What happens at the returns of a probe's calls.
#[derive(Clone, Copy, Debug)]
pub struct Exit<'a> {
    /// Number of the source that records name.
    pub source: u32,
    /// What is recorded at the return: no stack words, and no memory.
    pub capture: &'a Capture,
    /// The instances.
    pub instances: &'a Instances,
    /// What the instances keep of a call's entry.
    pub entry: &'a EntryCapture,
    /// Counter (u64) of the returns for which there was no room in the ring.
    pub lost: Gva,
    /// Whether the code asks the host for room before it counts a return as lost
    /// ([`ROOM_PORT`](crate::trap::ROOM_PORT)).
    pub waits: bool,
    /// Number of the first stub, counted over the stubs of all probes. Calls' ids are derived from it.
    pub first_stub: u32,
}

/// The stubs of a return probe, one after the other, followed by their common code. The bytes do not depend on
/// their address, which must be a multiple of 16 and is the address of the first stub.
#[derive(Clone, Debug)]
pub struct ReturnCode {
    code: Vec<u8>,
}

/// Registers that the common code uses. They are pushed after the address that the stub's call pushed.
const FRAME: Frame = Frame {
    saved: &[Gpr::Rax, Gpr::Rcx, Gpr::Rdx, Gpr::Rsi, Gpr::Rdi],
    below: 8,
    cell: rdi,
};

impl ReturnCode {
    /// Generates the code for `exit`, which records to `ring`.
    ///
    /// # Errors
    /// When the code cannot be generated as requested.
    pub fn new(ring: &Ring, exit: &Exit<'_>) -> Result<Self, BuildError> {
        let count = exit.instances.count;
        let is_possible = (1..=MAX_COUNT).contains(&count)
            && exit.first_stub.saturating_add(count) <= 1 << (63 - GENERATION_BITS);
        if !is_possible {
            return Err(BuildError::Instances {
                count,
                first: exit.first_stub,
            });
        }
        let mut emitter = Emitter::new(&FRAME, ring)?;
        emitter.leave(exit)?;
        emitter.cold()?;
        let stubs = count * STUB;
        let common = emitter.finish(stubs, [])?.code;
        let mut code = Vec::new();
        for stub in (0..stubs).step_by(STUB as usize) {
            code.push(CALL_REL32);
            code.extend((stubs - stub - u32::from(CALL)).to_le_bytes());
            code.resize(code.len().next_multiple_of(STUB as usize), INT3);
        }
        code.extend(common);
        Ok(Self { code })
    }

    /// Returns the bytes, which begin with the first stub.
    #[must_use]
    pub fn code(&self) -> &[u8] {
        &self.code
    }
}

impl Emitter<'_> {
    /// Emits code that takes an instance for the call that begins here, or jumps to `missed`. A part in `before`,
    /// which runs earlier in this detour, may already have put its own stub in place of the return address.
    pub(super) fn enter<'p>(
        &mut self,
        before: impl Iterator<Item = &'p Part<'p>>,
        instances: &Instances,
        capture: &EntryCapture,
        stubs: Gva,
        missed: CodeLabel,
    ) -> Result<(), BuildError> {
        let layout = InstanceLayout::new(capture)?;
        let shift = check(instances, &layout)?;
        let count = u64::from(instances.count.saturating_sub(1));
        reachable("the stubs", stubs)?;
        reachable("the last stub", stubs.wrapping_add(count * u64::from(STUB)))?;
        let slot = qword_ptr(rsp + self.slot());
        let at = absolute(instances.at);
        let mut retry = self.a.create_label();
        self.time(r11, capture.cpu)?;
        let a = &mut self.a;
        load(
            a,
            Code::Mov_r64_rm64,
            Register::RAX,
            absolute(instances.free),
        )?;
        a.set_label(&mut retry)?;
        a.mov(ecx, eax)?;
        a.cmp(ecx, NIL.cast_signed())?;
        a.je(missed)?;
        a.mov(rdx, rax)?;
        a.sub(rdx, rcx)?;
        a.shl(rcx, shift)?;
        // If the instance was taken meanwhile, this word is not the index of the next one. But then the instance is
        // not the first any more, or the tag has changed, so the exchange fails.
        a.mov(ecx, dword_ptr(rcx + (at + i64::from(NEXT))))?;
        a.or(rdx, rcx)?;
        a.lock().cmpxchg(qword_ptr(absolute(instances.free)), rdx)?;
        a.jne(retry)?;
        a.mov(ecx, eax)?;
        a.shl(rcx, shift)?;
        a.mov(qword_ptr(rcx + (at + i64::from(ENTRY_TSC))), r11)?;
        a.lea(r11, qword_ptr(rcx + at))?;
        a.inc(qword_ptr(r11 + GENERATION))?;
        a.mov(rax, slot)?;
        a.mov(qword_ptr(r11 + RETURN), rax)?;
        self.find_caller(before)?;
        let a = &mut self.a;
        a.mov(qword_ptr(r11 + u32::from(CALLER)), rax)?;
        if let Some(current) = capture.current {
            with_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, current)?;
            a.mov(qword_ptr(r11 + TASK), rax)?;
        }
        self.values(r11, layout.values(), &capture.stack)?;
        let a = &mut self.a;
        a.lea(rax, slot)?;
        a.mov(qword_ptr(r11 + SLOT), rax)?;
        // Turns the offset of the instance into that of its stub.
        a.shr(ecx, shift - STUB.trailing_zeros())?;
        a.lea(rcx, qword_ptr(rcx + absolute(stubs)))?;
        a.mov(slot, rcx)?;
        Ok(())
    }

    /// Emits code that loads RAX with the caller if RAX, the return address that was found, is a stub of a part in
    /// `before`. That stub's instance knows the caller, because its call is in flight. Uses RDX.
    fn find_caller<'p>(
        &mut self,
        before: impl Iterator<Item = &'p Part<'p>>,
    ) -> Result<(), BuildError> {
        let mut found = self.a.create_label();
        for part in before {
            let Part::Return {
                instances,
                capture,
                stubs,
                ..
            } = part
            else {
                continue;
            };
            let shift = check(instances, &InstanceLayout::new(capture)?)?;
            let stubs_len = i32::try_from(instances.count * STUB).unwrap_or(i32::MAX);
            let mut other = self.a.create_label();
            let a = &mut self.a;
            a.lea(rdx, qword_ptr(rax + absolute(*stubs).wrapping_neg()))?;
            a.cmp(rdx, stubs_len)?;
            a.jae(other)?;
            a.shl(rdx, shift - STUB.trailing_zeros())?;
            let caller = absolute(instances.at) + i64::from(CALLER);
            a.mov(rax, qword_ptr(rdx + caller))?;
            a.jmp(found)?;
            self.place(&mut other)?;
        }
        self.place(&mut found)
    }

    /// Emits the common code, which ends a call, without its cold code.
    fn leave(&mut self, exit: &Exit<'_>) -> Result<(), BuildError> {
        let Exit {
            source,
            capture,
            instances,
            entry,
            ..
        } = *exit;
        let shift = check(instances, &InstanceLayout::new(entry)?)?;
        let layout = Layout::of_return(capture, entry)?;
        let pushed = qword_ptr(rsp + (self.slot() - 8));
        let mut free = self.a.create_label();
        self.save()?;
        let a = &mut self.a;
        a.mov(rsi, pushed)?;
        let first = ORIGIN.cast_signed() + i64::from(CALL);
        let first = MemoryOperand::with_base_displ(Register::RIP, first);
        a.add_instruction(Instruction::with2(Code::Lea_r64_m, Register::RDX, first)?)?;
        a.sub(rsi, rdx)?;
        a.shl(rsi, shift - STUB.trailing_zeros())?;
        a.lea(rsi, qword_ptr(rsi + absolute(instances.at)))?;
        a.mov(rax, qword_ptr(rsi + RETURN))?;
        a.mov(pushed, rax)?;
        a.mov(qword_ptr(rsi + SLOT), 0)?;

        let full = Full {
            lost: exit.lost,
            next: free,
            waits: exit.waits,
        };
        let cells = Cells {
            fixed: layout.cells(),
            more: None,
        };
        self.reserve(cells, full, capture)?;
        self.task(&layout, capture)?;
        self.values(rdi, layout.values(), &[])?;
        if let Some(call) = layout.call() {
            self.index(instances)?;
            let a = &mut self.a;
            a.shl(rax, GENERATION_BITS - shift)?;
            a.mov(rdx, ID | u64::from(exit.first_stub) << GENERATION_BITS)?;
            a.add(rax, rdx)?;
            a.mov(rdx, qword_ptr(rsi + GENERATION))?;
            a.shl(rdx, 64 - GENERATION_BITS)?;
            a.shr(rdx, 64 - GENERATION_BITS)?;
            a.add(rax, rdx)?;
            a.mov(qword_ptr(rdi + call.id()), rax)?;
            a.mov(rax, qword_ptr(rsi + u32::from(CALLER)))?;
            a.mov(qword_ptr(rdi + call.return_address()), rax)?;
            // The record and the instance have time and values in the same order.
            for (from, to) in (u32::from(ENTRY_TSC)..).step_by(8).zip(call.copied()) {
                a.mov(rax, qword_ptr(rsi + from))?;
                a.mov(qword_ptr(rdi + to), rax)?;
            }
        }
        self.publish(source, cells)?;

        self.place(&mut free)?;
        self.index(instances)?;
        let mut retry = self.a.create_label();
        let a = &mut self.a;
        a.mov(ecx, eax)?;
        a.shr(ecx, shift)?;
        load(
            a,
            Code::Mov_r64_rm64,
            Register::RAX,
            absolute(instances.free),
        )?;
        a.set_label(&mut retry)?;
        a.mov(dword_ptr(rsi + u32::from(NEXT)), eax)?;
        a.mov(rdx, rax)?;
        a.shr(rdx, 32)?;
        a.inc(edx)?;
        a.shl(rdx, 32)?;
        a.or(rdx, rcx)?;
        a.lock().cmpxchg(qword_ptr(absolute(instances.free)), rdx)?;
        a.jne(retry)?;
        self.restore()?;
        self.a.ret()?;
        Ok(())
    }

    /// Loads RAX with the distance in bytes from the first instance to the one that RSI points at.
    fn index(&mut self, instances: &Instances) -> Result<(), BuildError> {
        let [a, b, c, d, ..] = instances.at.0.to_le_bytes();
        self.a.mov(eax, esi)?;
        self.a.sub(eax, i32::from_le_bytes([a, b, c, d]))?;
        Ok(())
    }

    /// Returns the offset from RSP to the stack pointer at the probepoint.
    fn slot(&self) -> i32 {
        self.frame().rsp()
    }
}

/// Checks that code can encode the addresses of the instances. Returns the binary logarithm of their distance.
fn check(instances: &Instances, layout: &InstanceLayout) -> Result<u32, BuildError> {
    let stride = u64::try_from(layout.stride()).unwrap_or(u64::MAX);
    let end = instances
        .at
        .wrapping_add(u64::from(instances.count) * stride);
    reachable("the free list", instances.free)?;
    reachable("the return instances", instances.at)?;
    reachable("the end of the return instances", end)?;
    Ok(stride.trailing_zeros())
}
