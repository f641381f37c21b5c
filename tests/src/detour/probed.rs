//! Puts detours in place of a function's instructions, and takes them away again.

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{BuildError, Detour, Exit, Member, Recorder, ReturnCode, Ring, Span};

use super::arena::Arena;
use super::traps::{self, Known};

/// Room for code, which is handed out from the beginning to the end.
#[derive(Debug)]
pub struct Room<'a> {
    arena: &'a Arena,
    next: Gva,
}

impl<'a> Room<'a> {
    /// All of the arena's room.
    #[must_use]
    pub fn new(arena: &'a Arena) -> Self {
        let next = arena.detours().start;
        Self { arena, next }
    }

    /// Writes the code of a return probe.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn returns(&mut self, ring: &Ring, exit: &Exit<'_>) -> Result<Gva, BuildError> {
        let code = ReturnCode::new(ring, exit)?;
        let at = Gva(self.next.0.next_multiple_of(16));
        self.write(at, code.code());
        Ok(at)
    }

    /// Writes the detour for `span` where it fits.
    ///
    /// # Errors
    /// When it cannot be made.
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

/// A jump in place of the instructions it displaces, until dropped.
#[derive(Debug)]
pub struct Planted<'a> {
    arena: &'a Arena,
    span: Span,
    escape: Option<Known>,
    interior: Vec<Known>,
}

impl<'a> Planted<'a> {
    /// Writes the jump, and makes the int3s known that the host is to translate.
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

    /// How often a detour was left at its escape.
    #[must_use]
    pub fn escapes(&self) -> u64 {
        self.escape.as_ref().map_or(0, Known::hits)
    }

    /// How often the guest went on at an interior boundary.
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
