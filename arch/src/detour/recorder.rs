//! The code of a detour.
//!
//! Only the copies of the displaced instructions, the jump back and the displacements of calls depend on the
//! address of a detour. So a [`Recorder`] is assembled once, its size is known before it has a place, and
//! [`Recorder::place`] fills in the rest.

use super::capture::EntryCapture;
use super::cells::MAX_RECORD_CELLS;
use super::emit::{Assembled, CALL, Cells, Emitter, Frame, Full};
use super::error::BuildError;
use super::fetching::Fetching;
use super::instance::Instances;
use super::record::{Capture, Layout, Ring};
use super::span::{JUMP, Span, here, jump};
use super::stack::StackFields;
use crate::Gva;
use crate::condition::Condition;
use crate::regs::Gpr;
use iced_x86::code_asm::registers::r11;
use iced_x86::{Decoder, DecoderOptions, FlowControl};
use std::ops::Range;

/// A probe that shares a detour.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Conditions that must all hold; otherwise, the hit is only counted as vetoed.
    pub conditions: &'a [Condition],
    /// Counter (u64) of the hits that a condition prevented.
    pub vetoed: Gva,
    /// What the detour does for the probe.
    pub part: Part<'a>,
}

/// What a detour does for a probe.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// Writes a record.
    Record {
        /// Number of the source that the record names.
        source: u32,
        /// Content of the record.
        capture: &'a Capture,
        /// Counter (u64) of the hits for which there was no room in the ring.
        lost: Gva,
        /// Whether the detour asks the host for room before it counts a hit as lost
        /// ([`ROOM_PORT`](crate::trap::ROOM_PORT)).
        waits: bool,
    },
    /// Takes an instance, and replaces the return address, which RSP points at, with the address of the
    /// instance's stub.
    Return {
        /// The instances to take from.
        instances: &'a Instances,
        /// What the instance keeps.
        capture: &'a EntryCapture,
        /// Address of the first stub, with which the [`ReturnCode`](super::ReturnCode) begins.
        stubs: Gva,
        /// Counter (u64) of the calls for which there was no free instance.
        missed: Gva,
    },
}

/// The code of a detour, before it has an address.
#[derive(Clone, Debug)]
pub struct Recorder {
    span: Span,
    /// All of the code, with space for the copies and the jump back.
    code: Vec<u8>,
    /// Offsets of the space for the copies and the jump back.
    tail: Range<usize>,
    /// Offset of the escape's int3.
    escape: Option<usize>,
    /// Offsets of calls, and their targets.
    calls: Vec<(usize, Gva)>,
    depths: Depths,
}

/// Stack depths in the code. Each pair is an offset, and the number of bytes that are on the stack from that offset
/// to the next pair's. Not valid in the copies.
type Depths = Vec<(usize, i32)>;

/// A detour.
#[derive(Clone, Debug)]
pub struct Detour {
    at: Gva,
    code: Vec<u8>,
    jump: [u8; JUMP],
    tail: Gva,
    tail_len: usize,
    escape: Option<Gva>,
    /// Addresses of each displaced instruction and of its copy.
    copies: Vec<(Gva, Gva)>,
    depths: Depths,
    /// Addresses outside the detour at which the guest may continue.
    exits: Vec<Gva>,
}

/// Registers that a detour uses, besides the stack pointer. Few of them hold arguments, because an argument is
/// captured faster from its register than from the stack.
const FRAME: Frame = Frame {
    saved: &[Gpr::Rax, Gpr::Rcx, Gpr::Rdx, Gpr::R11],
    below: 0,
    cell: r11,
};

/// Registers of a detour that reads memory in a loop, or copies the stack.
const LOOPING: Frame = Frame {
    saved: &[
        Gpr::Rax,
        Gpr::Rcx,
        Gpr::Rdx,
        Gpr::R11,
        Gpr::Rsi,
        Gpr::Rdi,
        Gpr::R8,
    ],
    below: 0,
    cell: r11,
};

impl Recorder {
    /// Generates the code that serves `members`, in their order, at each hit. The jump to that code displaces
    /// `span`. Records go to `ring`.
    ///
    /// # Errors
    /// When the code cannot be generated as requested.
    pub fn new(span: &Span, ring: &Ring, members: &[Member<'_>]) -> Result<Self, BuildError> {
        let fetching = || members.iter().filter_map(|member| member.part.fetching());
        let copied = members.iter().find_map(|member| member.part.copied());
        let frame = match copied.is_some() || fetching().any(Fetching::loops) {
            true => &LOOPING,
            false => &FRAME,
        };
        if copied.is_some() && ring.capacity < 2 * u32::from(MAX_RECORD_CELLS) {
            let capacity = ring.capacity;
            return Err(BuildError::RingForStacks { capacity });
        }
        let mut emitter = Emitter::new(frame, ring)?;
        let mut escape = emitter.a.create_label();
        let highest = members.iter().flat_map(|member| member.part.stack()).max();
        let readers = fetching().next().map(|fetching| &fetching.readers);
        let escapes = highest.is_some() || readers.is_some() || copied.is_some();
        emitter.save()?;
        if let Some(highest) = highest {
            emitter.check_page(*highest, escape)?;
        }
        if let Some(readers) = readers {
            emitter.check_readable(readers, escape)?;
        }
        if let Some(fields) = copied {
            emitter.check_stack(&fields, escape)?;
        }
        for (number, member) in members.iter().enumerate() {
            emitter.member(member, &members[..number])?;
        }
        emitter.restore()?;
        let mut tail = emitter.a.create_label();
        emitter.place(&mut tail)?;
        let room = copies_len(span) + JUMP;
        for _ in 0..room {
            emitter.a.int3()?;
        }
        if escapes {
            emitter.place(&mut escape)?;
            emitter.restore()?;
        }
        let mut trap = emitter.a.create_label();
        emitter.place(&mut trap)?;
        if escapes {
            emitter.a.int3()?;
        }
        emitter.cold()?;
        emitter.cold_reads()?;
        let Assembled {
            code,
            labels: [tail, trap],
            calls,
        } = emitter.finish(0, [&tail, &trap])?;
        let tail = tail..tail + room;
        let escape = escapes.then_some(trap);
        Ok(Self {
            span: span.clone(),
            depths: depths(&code, &tail, escape, frame.rsp()),
            code,
            tail,
            escape,
            calls,
        })
    }

    /// Returns the size of the detour in bytes, which does not depend on its address.
    #[must_use]
    pub fn size(&self) -> usize {
        self.code.len()
    }

    /// Returns the detour for the address `at`. If a task may have been interrupted inside the span, `at` must
    /// [fit](Span::fits) the span.
    ///
    /// # Errors
    /// When a target is out of reach from `at`.
    pub fn place(&self, at: Gva) -> Result<Detour, BuildError> {
        let tail = here(at, &self.code[..self.tail.start]);
        let mut copied = Vec::with_capacity(self.tail.len());
        let mut copies = Vec::new();
        for (displaced, copying) in self.span.copies() {
            copies.push((displaced.at(), here(tail, &copied)));
            copying.emit(displaced, tail, &mut copied)?;
        }
        jump(self.span.end(), tail, &mut copied)?;
        let mut code = self.code.clone();
        code[self.tail.clone()].copy_from_slice(&copied);
        for (call, target) in &self.calls {
            let end = call + usize::from(CALL);
            let from = here(at, &code[..end]);
            let distance = target.0.wrapping_sub(from.0).cast_signed();
            let out_of_reach = |_| BuildError::OutOfReach {
                target: *target,
                at,
            };
            let distance = i32::try_from(distance).map_err(out_of_reach)?;
            code[call + 1..end].copy_from_slice(&distance.to_le_bytes());
        }
        Ok(Detour {
            at,
            jump: self.span.jump(at).map_err(|error| BuildError::OutOfReach {
                target: error.at,
                at,
            })?,
            tail,
            tail_len: self.tail.len(),
            escape: self.escape.map(|offset| here(at, &self.code[..offset])),
            copies,
            depths: self.depths.clone(),
            exits: self
                .span
                .copies()
                .filter_map(|(_, copying)| copying.target())
                .chain([self.span.end()])
                .collect(),
            code,
        })
    }
}

impl Detour {
    /// Returns the address of the detour, to which the jump leads.
    #[must_use]
    pub fn at(&self) -> Gva {
        self.at
    }

    /// Returns the bytes of the detour.
    #[must_use]
    pub fn code(&self) -> &[u8] {
        &self.code
    }

    /// Returns the jump to the detour, which replaces the first bytes of the displaced instructions.
    #[must_use]
    pub fn jump(&self) -> [u8; JUMP] {
        self.jump
    }

    /// Returns the address of the copies of the displaced instructions. A guest that enters the detour there, with
    /// the registers of the probepoint, skips the members.
    #[must_use]
    pub fn tail(&self) -> Gva {
        self.tail
    }

    /// Returns the address of the int3 at which the host serves the members instead of the detour; `None` if no
    /// member needs it. The guest reaches it with the registers of the probepoint, before any member took effect,
    /// in these cases:
    ///
    /// - A requested stack word is not in the stack pointer's page.
    /// - Memory is requested, but AC is set or reads are nested too deep.
    /// - A requested stack is not the task's own, is too deep, or cannot be copied upwards.
    ///
    /// The host serves the members and continues at the [tail](Self::tail).
    #[must_use]
    pub fn escape(&self) -> Option<Gva> {
        self.escape
    }

    /// Iterates over the addresses outside the detour at which the guest may continue: after the displaced
    /// instructions, and at the targets of branches among them.
    pub fn leads_to(&self) -> impl Iterator<Item = Gva> {
        self.exits.iter().copied()
    }

    /// Returns the address of the copy of the displaced instruction at `boundary`.
    #[must_use]
    pub fn resume(&self, boundary: Gva) -> Option<Gva> {
        self.copies
            .iter()
            .find_map(|(original, copy)| (*original == boundary).then_some(*copy))
    }

    /// For a guest whose next instruction is at `at`, returns the probepoint and the number of bytes that the
    /// detour has on the stack. `None` if `at` is outside the detour, in the copies, or at the jump back: no probe
    /// is served there.
    #[must_use]
    pub fn interrupted(&self, at: Gva) -> Option<(Gva, u64)> {
        let offset = usize::try_from(at.offset_from(self.at)?).ok()?;
        let is_copy = (self.tail..self.tail_end()).contains(&at);
        if is_copy || offset >= self.code.len() {
            return None;
        }
        let behind = self.depths.partition_point(|(from, _)| *from <= offset);
        let (_, depth) = self.depths.get(behind.checked_sub(1)?)?;
        let (probepoint, _) = self.copies.first()?;
        Some((*probepoint, u64::try_from(*depth).ok()?))
    }

    /// Returns the end of the copies and the jump back.
    fn tail_end(&self) -> Gva {
        self.tail.wrapping_add(self.tail_len as u64)
    }

    /// Returns the address of the displaced instruction whose copy is at `at`.
    #[must_use]
    pub fn in_place(&self, at: Gva) -> Option<Gva> {
        self.copies
            .iter()
            .find_map(|(original, copy)| (*copy == at).then_some(*original))
    }
}

impl Part<'_> {
    /// Returns the stack words that the part reads.
    fn stack(&self) -> &[u16] {
        match self {
            Self::Record { capture, .. } => &capture.stack,
            Self::Return { capture, .. } => &capture.stack,
        }
    }

    /// Returns the memory that the part reads.
    fn fetching(&self) -> Option<&Fetching> {
        match self {
            Self::Record { capture, .. } => capture.fetching.as_ref(),
            Self::Return { .. } => None,
        }
    }

    /// Returns the location of the stack, if the part copies it.
    fn copied(&self) -> Option<StackFields> {
        match self {
            Self::Record { capture, .. } => capture.stack_copy,
            Self::Return { .. } => None,
        }
    }
}

/// Maximum number of preceding parts whose instances a return probe's part checks for the caller. The last part
/// that took an instance knows the caller, so these parts are enough if one of them took an instance. The limit
/// keeps the size of a detour linear in the number of its members, not quadratic.
const LOOKED_BACK: usize = 4;

impl Emitter<'_> {
    /// Emits the code for `member`. The code for the members in `before` comes first, and was already emitted.
    fn member(&mut self, member: &Member<'_>, before: &[Member<'_>]) -> Result<(), BuildError> {
        let mut next = self.a.create_label();
        if !member.conditions.is_empty() {
            let vetoed = self.counting("the count of vetoed hits", member.vetoed, next)?;
            for condition in member.conditions {
                self.check(condition, vetoed)?;
            }
        }
        match member.part {
            Part::Record {
                source,
                capture,
                lost,
                waits,
            } => {
                let layout = Layout::new(capture)?;
                let copied = layout.copy().zip(capture.stack_copy);
                let cells = Cells {
                    fixed: layout.cells(),
                    more: copied.map(|(copy, _)| copy.cells()),
                };
                if let Some((_, fields)) = &copied {
                    self.count_stack(fields)?;
                }
                self.reserve(cells, Full { lost, next, waits }, capture)?;
                self.task(&layout, capture)?;
                self.values(r11, layout.values(), &capture.stack)?;
                if let (Some(rooms), Some(fetching)) = (layout.rooms(), &capture.fetching) {
                    self.fetch(rooms, fetching)?;
                }
                if let Some((copy, fields)) = &copied {
                    self.copy_stack(*copy, layout.cells(), fields)?;
                }
                self.publish(source, cells)?;
            }
            Part::Return {
                instances,
                capture,
                stubs,
                missed,
            } => {
                let missed = self.counting("the count of missed calls", missed, next)?;
                let before = before.iter().rev().map(|member| &member.part);
                let before = before.take(LOOKED_BACK);
                self.enter(before, instances, capture, stubs, missed)?;
            }
        }
        self.place(&mut next)
    }
}

/// Computes the stack depths in `code`. The code after the copies, and after the escape's int3, is reached with the
/// whole frame pushed.
fn depths(code: &[u8], tail: &Range<usize>, escape: Option<usize>, frame: i32) -> Depths {
    let mut depths = vec![(0, 0)];
    let mut depth = 0;
    for instruction in &mut Decoder::new(64, code, DecoderOptions::NONE) {
        let at = usize::try_from(instruction.ip()).unwrap_or(usize::MAX);
        let next = at + instruction.len();
        if tail.contains(&at) || Some(at) == escape {
            depth = frame;
        } else if instruction.flow_control() != FlowControl::Call {
            depth -= instruction.stack_pointer_increment();
        }
        depths.push((next, depth));
    }
    depths.dedup_by_key(|(_, depth)| *depth);
    depths
}

/// Returns the size in bytes of the copies of the displaced instructions.
fn copies_len(span: &Span) -> usize {
    span.copies()
        .map(|(displaced, copying)| copying.len(displaced))
        .sum()
}
