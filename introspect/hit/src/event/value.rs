//! The event type.

use hvprobe_arch::Regs;
use hvprobe_linux::task::Task;
use hvprobe_spec::{CAPTURE_MAX, ITEMS_MAX, ProbeId, RegisterSet, TextHeader};

/// What an event reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The probepoint was reached (pre-handler).
    Hit,
    /// The displaced instruction took effect (post-handler). RIP is where the guest continues.
    Post,
    /// The displaced instruction faulted, and the guest's own handler was given the fault.
    Fault {
        /// Number of the exception (SDM vol. 3, table 6-1).
        vector: u8,
        /// Error code, if that exception has one.
        error_code: Option<u32>,
    },
    /// A function returned (return handler). RIP is the return address.
    Return(Call),
}

/// The call that a return belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Number of the call, never reused on this machine.
    pub id: u64,
    /// Host time at entry, nanoseconds of `CLOCK_MONOTONIC`; 0 if it is not known.
    pub entry_ns: u64,
    /// The guest's time-stamp counter at entry; 0 if it is not known, because the entry took an exit and the
    /// return did not.
    pub entry_tsc: u64,
    /// The registers at entry.
    pub entry: Regs,
}

/// Items that were read from the guest's memory at a hit, in the order of the probe's capture. For a return probe,
/// the items of the entry come first. Unreadable items are zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Captured {
    /// `None` before the first item, so that an event without items need not carry zeros.
    bytes: Option<[u8; CAPTURE_MAX]>,
    len: u16,
    unreadable: u32,
    items: u8,
}

impl Captured {
    /// Returns an empty capture. Not a constant, because copying a constant would also copy its unused bytes.
    #[inline]
    #[must_use]
    pub fn nothing() -> Self {
        Self {
            bytes: None,
            len: 0,
            unreadable: 0,
            items: 0,
        }
    }

    /// Returns a capture of `items` items that were read before. `read` contains their bytes; `unreadable` has a
    /// bit for each item that could not be read. If the bytes do not fit, they are left out.
    #[must_use]
    pub fn again(read: &[u8], unreadable: u32, items: usize) -> Self {
        let mut captured = Self::nothing();
        captured.item(read.len(), |bytes| {
            bytes.copy_from_slice(read);
            true
        });
        captured.unreadable = unreadable;
        captured.items = u8::try_from(items).unwrap_or(u8::MAX);
        captured
    }

    /// Returns the bytes that were read.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let bytes = self.bytes.as_ref().map_or(&[][..], |bytes| bytes);
        bytes.get(..usize::from(self.len)).unwrap_or_default()
    }

    /// Returns whether the item `index` could not be read. Such an item is zeros.
    #[must_use]
    pub fn is_unreadable(&self, index: usize) -> bool {
        index < ITEMS_MAX && self.unreadable >> index & 1 == 1
    }

    /// Returns a mask of the items that could not be read. The lowest bit stands for the first item.
    #[must_use]
    pub fn unreadable(&self) -> u32 {
        self.unreadable
    }

    /// Appends an item of `len` bytes. `read` fills them and returns whether it could. An item that does not fit is
    /// left out; the items of a checked capture always fit.
    pub fn item(&mut self, len: usize, read: impl FnOnce(&mut [u8]) -> bool) {
        let start = usize::from(self.len);
        let bytes = self.bytes.get_or_insert([0; CAPTURE_MAX]);
        let Some(into) = bytes.get_mut(start..start + len) else {
            return;
        };
        let readable = read(into);
        if !readable {
            into.fill(0);
        }
        self.added(len, readable);
    }

    /// Appends a text of at most `most` bytes. `read` writes it to the front of its argument and returns its
    /// header, or `None` if it could not be read. A text that does not fit is left out.
    pub fn text(&mut self, most: usize, read: impl FnOnce(&mut [u8]) -> Option<TextHeader>) {
        let start = usize::from(self.len);
        let bytes = self.bytes.get_or_insert([0; CAPTURE_MAX]);
        let room = bytes.get_mut(start..start + TextHeader::SIZE + most);
        let Some((header, text)) = room.and_then(<[u8]>::split_first_chunk_mut) else {
            return;
        };
        let found = read(text);
        let len = found.map_or(0, |found| usize::from(found.len).min(most));
        *header = found.map_or([0; TextHeader::SIZE], TextHeader::to_bytes);
        text[len..].fill(0);
        self.added(TextHeader::SIZE + len, found.is_some());
    }

    /// Notes that an item of `len` bytes was appended.
    fn added(&mut self, len: usize, readable: bool) {
        if !readable {
            self.unreadable |= 1_u32.checked_shl(u32::from(self.items)).unwrap_or(0);
        }
        self.items = self.items.saturating_add(1);
        self.len = u16::try_from(usize::from(self.len) + len).unwrap_or(self.len);
    }
}

impl std::fmt::Debug for Captured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Captured")
            .field("bytes", &self.bytes())
            .field("unreadable", &self.unreadable)
            .finish()
    }
}

/// An event of one probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// Position in the machine's stream of events, from 0. There are no gaps: dropped events are counted separately
    /// and get no position. Until the position is assigned, this field holds a lower bound for the event's time,
    /// in the unit of [`Event::host_ns`]; the bound orders the event if its own time is not known.
    pub seq: u64,
    /// The probe that was hit.
    pub probe: ProbeId,
    /// The vCPU that hit it.
    pub vcpu: u32,
    /// Host time at which the exit was taken up or the record was made, in nanoseconds of `CLOCK_MONOTONIC`; 0 if
    /// it is not known.
    pub host_ns: u64,
    /// The guest's time-stamp counter at the same moment.
    pub guest_tsc: u64,
    /// The registers, depending on the kind of the event: at the probepoint as the pre-handler found them (RIP is
    /// the probepoint), at the return as the function left them, or after the displaced instruction.
    pub regs: Regs,
    /// Registers that the user wants to see.
    pub shown: RegisterSet,
    /// What was captured.
    pub captured: Captured,
    /// The task that ran, if the kernel's layout is known and a task could be read.
    pub task: Option<Task>,
    /// Host nanoseconds from taking up the exit until this event was made; 0 if the hit took no exit.
    pub cost_ns: u64,
}
