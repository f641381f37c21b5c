//! Plants detours for a function's instructions, and removes them.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{BuildError, Detour, Exit, Member, Recorder, ReturnCode, Ring, Span};

use super::arena::Arena;
use super::traps::{self, Known};

/// Allocator of the arena's memory for detours, from its start to its end.
#[derive(Debug)]
pub struct Room<'a> {
    arena: &'a Arena,
    next: Gva,
}

impl<'a> Room<'a> {
    /// Creates an allocator of all memory for detours.
    #[must_use]
    pub fn new(arena: &'a Arena) -> Self {
        let next = arena.detours().start;
        Self { arena, next }
    }

    /// Writes the code of a return probe; returns its address.
    ///
    /// # Errors
    /// When the code cannot be generated.
    pub fn returns(&mut self, ring: &Ring, exit: &Exit<'_>) -> Result<Gva, BuildError> {
        let code = ReturnCode::new(ring, exit)?;
        let at = Gva(self.next.0.next_multiple_of(16));
        self.write(at, code.code());
        Ok(at)
    }

    /// Writes the detour for `span` to the first address that fits.
    ///
    /// # Errors
    /// When the detour cannot be generated.
    pub fn detour(
        &mut self,
        span: &Span,
        ring: &Ring,
        members: &[Member<'_>],
    ) -> Result<Detour, BuildError> {
        let recorder = Recorder::new(span, ring, members)?;
        let free = self.next..self.arena.detours().end;
        let at = span.targets(free).next().expect("a place that fits");
        let detour = recorder.place(at)?;
        assert_eq!(detour.code().len(), recorder.size());
        self.write(at, detour.code());
        Ok(detour)
    }

    fn write(&mut self, at: Gva, code: &[u8]) {
        self.next = at.wrapping_add(code.len() as u64);
        assert!(self.next < self.arena.detours().end, "there is room");
        self.arena.write(at, code);
    }
}

/// A planted jump; dropping it restores the displaced instructions.
#[derive(Debug)]
pub struct Planted<'a> {
    arena: &'a Arena,
    span: Span,
    escape: Option<Known>,
    interior: Vec<Known>,
}

impl<'a> Planted<'a> {
    /// Writes the jump, and registers the int3s after which a host continues elsewhere.
    #[must_use]
    pub fn new(arena: &'a Arena, span: &Span, detour: &Detour) -> Self {
        let shaped = span.interior().filter(|offset| *offset <= 2);
        let interior = shaped.map(|offset| {
            let boundary = span.at().wrapping_add(offset);
            let copy = detour.resume(boundary).expect("a copy");
            traps::know(boundary, copy)
        });
        let planted = Self {
            arena,
            span: span.clone(),
            escape: detour
                .escape()
                .map(|escape| traps::know(escape, detour.tail())),
            interior: interior.collect(),
        };
        arena.write(span.at(), &detour.jump());
        planted
    }

    /// Returns how often the detour was left at its escape.
    #[must_use]
    pub fn escapes(&self) -> u64 {
        self.escape.as_ref().map_or(0, Known::hits)
    }

    /// Returns how often execution resumed at a boundary inside the span.
    #[must_use]
    pub fn resumed(&self) -> u64 {
        self.interior.iter().map(Known::hits).sum()
    }
}

impl Drop for Planted<'_> {
    fn drop(&mut self) {
        self.arena.write(self.span.at(), self.span.bytes());
    }
}
