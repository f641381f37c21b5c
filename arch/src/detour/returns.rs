//! The code that functions with a return probe return to, and the part of a detour that makes them.
//!
//! ```text
//!   at entry                                     at the return
//!   take an instance ─ none ─▶ missed += 1       stub: call common
//!   keep [rsp], caller, time, CPU, registers       common: save flags and 5 registers
//!   slot = rsp                                     the pushed address tells the instance
//!   [rsp] = the instance's stub                    put the real return address in its place
//!                                                  slot = 0
//!                                                  reserve cells ─ full ─▶ lost += 1
//!                                                  fill, publish
//!                                                  free the instance
//!                                                  restore; ret
//! ```
//!
//! Each instance has a stub of its own, so that nothing is searched for when the function returns,
//! whichever task or CPU that is. The stub calls, instead of pushing a number and jumping, so that
//! for the processor's return predictor calls and returns stay paired: the callers further up return
//! as predicted.
//!
//! If the return address found at entry is the stub of another return probe, that one's turn comes
//! when this one's code returns to it. Of one that came before in the same detour the caller is taken over, as its
//! instance may be another call's by the time that this one's record is read.
//!
//! With supervisor shadow stacks (CET) a return to a stub would fault; a guest that enables them takes
//! none of this.

use super::emit::{
    CALL, CALL_REL32, Cells, Emitter, Frame, Full, ORIGIN, absolute, load, load_per_cpu, reachable,
};
use super::instance::{CALLER, ENTRY_CPU, ENTRY_TSC, GENERATION, NEXT, NIL, RETURN, SLOT, TASK};
use super::{BuildError, Capture, EntryCapture, InstanceLayout, Instances, Layout, Part, Ring};
use crate::Gva;
use crate::regs::Gpr;
use crate::trap::INT3;
use iced_x86::code_asm::{CodeLabel, dword_ptr, qword_ptr, registers::*};
use iced_x86::{Code, Instruction, MemoryOperand, Register};

/// The distance between stubs in bytes.
pub const STUB: u32 = 16;
/// Bits of a call's id that count the uses of its instance.
const GENERATION_BITS: u32 = 40;
/// What tells these ids from others.
const ID: u64 = 1 << 63;
const MAX_COUNT: u32 = 1 << 16;

/// What ends the calls of a return probe.
#[derive(Clone, Copy, Debug)]
pub struct Exit<'a> {
    /// The source that records name.
    pub source: u32,
    /// What is recorded at the return; no stack words.
    pub capture: &'a Capture,
    /// The instances.
    pub instances: &'a Instances,
    /// What they hold.
    pub entry: &'a EntryCapture,
    /// Counts (u64) the returns for which there was no room in the ring.
    pub lost: Gva,
    /// Whether the host is asked for room before ([`ROOM_PORT`](crate::trap::ROOM_PORT)).
    pub waits: bool,
    /// The number of the first stub, among all probes' stubs: the calls' ids are made of it.
    pub first_stub: u32,
}

/// The stubs of a return probe, one after the other, and then what they have in common. The bytes do
/// not depend on where they will be, which must be a multiple of 16: there is the first stub.
#[derive(Clone, Debug)]
pub struct ReturnCode {
    code: Vec<u8>,
}

/// The registers it uses, pushed above the address that the stub's call pushed.
const FRAME: Frame = Frame {
    saved: &[Gpr::Rax, Gpr::Rcx, Gpr::Rdx, Gpr::Rsi, Gpr::Rdi],
    below: 8,
    cell: rdi,
};

impl ReturnCode {
    /// The code for `exit`, which records on `ring`.
    ///
    /// # Errors
    /// When it cannot be made as asked for.
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

    /// Its bytes, of which the first are the first stub.
    #[must_use]
    pub fn code(&self) -> &[u8] {
        &self.code
    }
}

impl Emitter<'_> {
    /// Takes an instance for the call that begins here, or goes to `missed`. What came `before` in this detour may have
    /// put its own stub in the place of the return address.
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
        self.time(r11)?;
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
        // If the instance has been taken meanwhile, this is no next one; then it is not the first any
        // more, or the tag is another.
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
            load_per_cpu(a, Code::Mov_r64_rm64, Register::RAX, current)?;
            a.mov(qword_ptr(r11 + TASK), rax)?;
        }
        if let Some(cpu) = capture.cpu {
            load_per_cpu(a, Code::Mov_r32_rm32, Register::EAX, cpu)?;
            a.mov(dword_ptr(r11 + ENTRY_CPU), eax)?;
        }
        self.values(r11, layout.values(), &capture.stack)?;
        let a = &mut self.a;
        a.lea(rax, slot)?;
        a.mov(qword_ptr(r11 + SLOT), rax)?;
        // From the instance's offset to the stub's.
        a.shr(ecx, shift - STUB.trailing_zeros())?;
        a.lea(rcx, qword_ptr(rcx + absolute(stubs)))?;
        a.mov(slot, rcx)?;
        Ok(())
    }

    /// Makes RAX, which was found in the place of the return address, where the function returns to, if it is a stub of
    /// a probe that came `before`: its call is in flight. Uses RDX.
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

    /// Ends a call: all of the common code but its cold pieces.
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
        self.reserve(cells, full)?;
        self.header(&layout, capture)?;
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
            // Time and values are in the same order in both.
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

    /// Makes RAX the offset, among the instances, of the one RSI points at.
    fn index(&mut self, instances: &Instances) -> Result<(), BuildError> {
        let [a, b, c, d, ..] = instances.at.0.to_le_bytes();
        self.a.mov(eax, esi)?;
        self.a.sub(eax, i32::from_le_bytes([a, b, c, d]))?;
        Ok(())
    }

    /// Where RSP points at the probepoint, above RSP.
    fn slot(&self) -> i32 {
        self.frame().rsp()
    }
}

/// Checks that code can name the instances, and gives the logarithm of their distance.
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
