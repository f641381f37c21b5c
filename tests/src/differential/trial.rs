//! Runs one instruction with one start state, in place and through every mechanism available for it.
//!
//! In place means: the kernel's own bytes at their own address. Every mechanism has to leave the same state:
//! registers, flags, system registers, arena, extended state, port accesses, and where and how the run ended.

use std::fmt::{self, Write};

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{
    Action, Displaced, Effect, Memory, MemoryFault, RelocateError, SlotCode, SlotKind, text,
};
use hvprobe_arch::paging::{PageTables, WalkError};
use hvprobe_arch::regs::{Regs, rflags};
use hvprobe_vm::memory::GuestRam;

use super::bench::{Bench, End, Left, PF};
use super::draft::{Exactness, GPRS};
use super::layout::{PAGE, SLOTS};
use super::random::Random;
use super::start::Start;
use super::state::Case;

/// Way in which an instruction is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mechanism {
    /// Emulated by the host.
    Emulated,
    /// As a copy that jumps back.
    Boosted,
    /// As a copy that traps.
    Trapped,
}

/// Result of a trial.
#[derive(Debug)]
pub enum Verdict {
    /// All mechanisms did the same as the instruction in place.
    Same {
        /// How the run in place ended.
        end: End,
        /// The mechanisms compared.
        mechanisms: Vec<Mechanism>,
    },
    /// The instruction could not be run to an end in place.
    NotRun(&'static str),
    /// A mechanism did something different.
    Different(Box<Difference>),
}

/// A mechanism whose effect differs from that of the instruction.
#[derive(Debug)]
pub struct Difference {
    /// The mechanism. `None` if the instruction did not finish when it ran in place, or if there is no mechanism for
    /// it.
    pub mechanism: Option<Mechanism>,
    /// Address of the instruction.
    pub at: Gva,
    /// Bytes of the instruction.
    pub bytes: Vec<u8>,
    /// The differences, one line each.
    pub what: String,
    /// Start state.
    pub start: Start,
    /// How the run in place ended.
    pub end: End,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            mechanism,
            at,
            bytes,
            what,
            start,
            end,
        } = self;
        match mechanism {
            Some(mechanism) => write!(f, "{mechanism:?}: ")?,
            None => f.write_str("in place: ")?,
        }
        writeln!(f, "{at} {} ({bytes:02x?})", text(bytes, *at))?;
        write!(f, "{what}")?;
        writeln!(f, "  in place: {end:x?}")?;
        writeln!(f, "  from: {start:x?}")
    }
}

/// The bench's memory through the page tables of a run.
struct View<'a> {
    tables: PageTables,
    ram: &'a GuestRam,
}

impl Memory for View<'_> {
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault> {
        self.tables
            .read_u64(self.ram, at)
            .map_err(|cause| MemoryFault { at, cause })
    }

    fn write_u64(&mut self, at: Gva, value: u64) -> Result<(), MemoryFault> {
        self.tables
            .write(self.ram, at, &value.to_le_bytes())
            .map_err(|cause| MemoryFault { at, cause })
    }
}

/// Runs `displaced` with the start state `case`.
pub fn run(bench: &mut Bench, displaced: &Displaced, case: &Case) -> Verdict {
    let stops: Vec<Gva> = case
        .targets
        .iter()
        .copied()
        .chain([displaced.next()])
        .collect();
    bench.plant(&stops, displaced.at());
    let verdict = compare_all(bench, displaced, case);
    bench.clear();
    verdict
}

fn compare_all(bench: &mut Bench, displaced: &Displaced, case: &Case) -> Verdict {
    let different = |mechanism, what, end| {
        Verdict::Different(Box::new(Difference {
            mechanism,
            at: displaced.at(),
            bytes: displaced.bytes().to_vec(),
            what,
            start: case.start,
            end,
        }))
    };
    bench.fill_arena(&case.arena);
    let expected = bench.run(&case.start, case.extended.as_ref());
    match &expected.end {
        End::CannotEmulate(bytes) if bytes.starts_with(displaced.bytes()) => {
            return Verdict::NotRun("this host's KVM cannot carry it out");
        }
        End::CannotEmulate(_) | End::Other(_) => {
            return different(None, "  it came to no end\n".to_owned(), expected.end);
        }
        End::At(_) | End::Exception { .. } => {}
    }
    let mut mechanisms = Vec::new();
    for mechanism in [Mechanism::Emulated, Mechanism::Boosted, Mechanism::Trapped] {
        bench.fill_arena(&case.arena);
        let what = match mechanism {
            Mechanism::Emulated => emulated(bench, displaced, case, &expected),
            Mechanism::Boosted => copied(bench, displaced, case, &expected, SlotKind::Boosted),
            Mechanism::Trapped => copied(bench, displaced, case, &expected, SlotKind::Trapped),
        };
        match what {
            None => {}
            Some(what) if what.is_empty() => mechanisms.push(mechanism),
            Some(what) => {
                return different(Some(mechanism), what, expected.end);
            }
        }
    }
    if mechanisms.is_empty() {
        return different(
            None,
            "  no mechanism is offered for it\n".to_owned(),
            expected.end,
        );
    }
    Verdict::Same {
        end: expected.end,
        mechanisms,
    }
}

/// Emulates the instruction as the host does, and returns the differences; `None` if the host does not emulate it.
fn emulated(
    bench: &mut Bench,
    displaced: &Displaced,
    case: &Case,
    expected: &Left,
) -> Option<String> {
    let Action::Emulate(_) = displaced.action() else {
        return None;
    };
    let mut regs = case.start.regs;
    let mut view = View {
        tables: bench.tables(&case.start),
        ram: bench.ram(),
    };
    match displaced.emulate(&mut regs, &mut view) {
        // The time for which interrupts stay held off is not visible at a stop.
        Ok(Effect::Done | Effect::Shadow) => {
            // Lets the processor continue from the emulated state: to the stop, or into a fault.
            let start = Start { regs, ..case.start };
            let left = bench.run(&start, case.extended.as_ref());
            Some(differences(expected, &left, case.exactness))
        }
        Err(fault) => {
            let mut what = String::new();
            if regs != case.start.regs {
                what.push_str("  the fault changed registers\n");
            }
            if bench.arena() != case.arena {
                what.push_str("  the fault changed memory\n");
            }
            if !is_same_fault(&expected.end, &fault, &case.start.regs)
                && !is_fault_of_push(&expected.end, &fault, &case.start.regs, &mut view)
            {
                let _ = writeln!(what, "  fault: {fault}: {}", fault.cause);
            }
            Some(what)
        }
    }
}

/// Returns whether `end` is the exception that `fault` stands for.
fn is_same_fault(end: &End, fault: &MemoryFault, regs: &Regs) -> bool {
    let End::Exception {
        vector, cr2, rip, ..
    } = end
    else {
        return false;
    };
    match fault.cause {
        WalkError::NotPresent { at, .. } => {
            *vector == PF && *cr2 == Some(at.0) && rip.0 == regs.rip
        }
        // #SS or #GP. Some processors jump to such an address and fault only there.
        WalkError::NonCanonical { at } => {
            matches!(vector, 12 | 13) && rip.0 == regs.rip || rip.0 == at.0
        }
        _ => false,
    }
}

/// Returns whether `end` is the fault of a call's push, for a call whose target is non-canonical as well. Which
/// of the two faults comes first differs between processors (the SDM's CALL checks its target before it
/// pushes).
fn is_fault_of_push(end: &End, fault: &MemoryFault, regs: &Regs, mem: &mut impl Memory) -> bool {
    let WalkError::NonCanonical { .. } = fault.cause else {
        return false;
    };
    let pushed = mem.write_u64(Gva(regs.rsp.wrapping_sub(8)), 0);
    pushed.is_err_and(|fault| is_same_fault(end, &fault, regs))
}

/// Runs a copy of the instruction, and returns the differences; `None` if the instruction has no copy.
fn copied(
    bench: &mut Bench,
    displaced: &Displaced,
    case: &Case,
    expected: &Left,
    kind: SlotKind,
) -> Option<String> {
    let place = Random::new(&[displaced.at().0]).below(PAGE / 32) * 32;
    let slot = Gva(SLOTS + place);
    let code = match kind {
        SlotKind::Boosted => displaced.boosted(slot),
        SlotKind::Trapped => displaced.trapped(slot),
    };
    let code = match code {
        Ok(code) => code,
        Err(RelocateError::Emulated { .. }) => return None,
        Err(error) => return Some(format!("  {error}\n")),
    };
    bench.write(slot, code.bytes());
    let mut start = case.start;
    start.regs.rip = slot.0;
    if kind == SlotKind::Trapped {
        start.regs.rflags &= !rflags::IF;
    }
    let mut left = bench.run(&start, case.extended.as_ref());
    if kind == SlotKind::Trapped {
        left.regs.rflags |= case.start.regs.rflags & rflags::IF;
    }
    let mut what = put_in_place(displaced, &code, &mut left);
    what.push_str(&differences(expected, &left, case.exactness));
    Some(what)
}

/// Translates the end of a run as the host does after an exit: replaces an address inside the slot by that of the
/// original code. Returns a line of text if there is no such address, and an empty text otherwise.
fn put_in_place(displaced: &Displaced, code: &SlotCode, left: &mut Left) -> String {
    let is_inside = |at: Gva| {
        at.offset_from(code.at())
            .is_some_and(|offset| offset < code.bytes().len() as u64)
    };
    let (at, translated) = match &mut left.end {
        End::At(at) if is_inside(*at) => {
            let end = displaced.trap_end(code, *at);
            (at, end)
        }
        End::Exception { rip, .. } if is_inside(*rip) => {
            let there = displaced.in_place(code, *rip);
            (rip, there)
        }
        _ => return String::new(),
    };
    let Some(translated) = translated else {
        return format!("  {at} in the slot at {} means nothing\n", code.at());
    };
    *at = translated;
    left.regs.rip = translated.0;
    String::new()
}

/// Returns the differences between two runs, one line each.
fn differences(expected: &Left, left: &Left, exactness: Exactness) -> String {
    let mut what = String::new();
    if expected.end != left.end {
        let _ = writeln!(
            what,
            "  end: {:x?} instead of {:x?}",
            left.end, expected.end
        );
    }
    let (wanted, found) = (
        determined(expected.regs, exactness),
        determined(left.regs, exactness),
    );
    for gpr in GPRS {
        let (wanted, found) = (wanted.get(gpr), found.get(gpr));
        if wanted != found {
            let _ = writeln!(what, "  {gpr:?}: {found:#x} instead of {wanted:#x}");
        }
    }
    for (name, wanted, found) in [
        ("RIP", wanted.rip, found.rip),
        ("RFLAGS", wanted.rflags, found.rflags),
    ] {
        if wanted != found {
            let _ = writeln!(what, "  {name}: {found:#x} instead of {wanted:#x}");
        }
    }
    if expected.system != left.system {
        let _ = writeln!(
            what,
            "  system registers: {:x?} instead of {:x?}",
            left.system, expected.system
        );
    }
    if let Some(at) = first_difference(&expected.arena, &left.arena) {
        let _ = writeln!(
            what,
            "  memory: at {at:#x} of the arena {:#x} instead of {:#x}",
            left.arena[at], expected.arena[at]
        );
    }
    if let (Some(wanted), Some(found)) = (&expected.extended, &left.extended)
        && let Some(at) = first_difference(&wanted[..], &found[..])
    {
        let _ = writeln!(
            what,
            "  extended state: word {at} is {:#x} instead of {:#x}",
            found[at], wanted[at]
        );
    }
    if expected.ports != left.ports {
        let _ = writeln!(
            what,
            "  ports: {:x?} instead of {:x?}",
            left.ports, expected.ports
        );
    }
    what
}

fn first_difference<T: PartialEq>(a: &[T], b: &[T]) -> Option<usize> {
    // They are nearly always equal, which this comparison finds fast.
    if a == b {
        return None;
    }
    a.iter().zip(b).position(|(a, b)| a != b)
}

/// Returns the registers with all undetermined parts cleared.
fn determined(mut regs: Regs, exactness: Exactness) -> Regs {
    match exactness {
        Exactness::Exact => {}
        // The instruction clears the upper halves of RAX and RDX.
        Exactness::Clock => {
            regs.rax &= !0xffff_ffff;
            regs.rdx &= !0xffff_ffff;
        }
        Exactness::Random(destination) => {
            regs.set(destination, 0);
            regs.rflags &= !rflags::ARITHMETIC;
        }
    }
    regs
}

#[cfg(test)]
mod tests;
