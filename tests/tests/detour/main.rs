//! Tests detours, which run in this process, and compares them with the instructions that they displace.
#![allow(
    clippy::unwrap_used,
    reason = "a test fails where something is not as it must be"
)]

mod compare;
mod copies;
mod deep;
mod edges;
mod followed;
mod interrupts;
mod kernel;
mod loads;
mod migrated;
mod overtaken;
mod returns;
mod rings;
mod stack_copies;
mod stops;
mod unfinished;
mod world;

use hvprobe_arch::Gva;
use hvprobe_arch::detour::{Capture, Layout, Record, Ring};
use hvprobe_arch::regs::{Gpr, RegisterSet};
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::reader::Reader;
use hvprobe_tests::detour::traps;
use iced_x86::IcedError;
use iced_x86::code_asm::CodeAssembler;
use std::sync::atomic::Ordering;

/// Writes code at `at` and returns its bytes.
fn assemble(
    arena: &Arena,
    at: Gva,
    build: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    build(&mut a).unwrap();
    let code = a.assemble(at.0).unwrap();
    arena.write(at, &code);
    code
}

/// Returns an empty set of registers.
fn no_registers() -> RegisterSet {
    RegisterSet::from_iter([])
}

/// Returns a capture of RDI only, which holds the first argument of a C function.
fn argument() -> Capture {
    Capture {
        registers: RegisterSet::from_iter([Gpr::Rdi]),
        ..Capture::default()
    }
}

/// Returns a ring whose doorbell is ignored.
fn quiet(arena: &Arena, capacity: u32) -> Ring {
    traps::install();
    arena.ring(capacity, capacity - 1, 0)
}

/// Returns the next record, if there is one.
fn next(reader: &mut Reader<'_>, layout: &Layout) -> Option<Record> {
    let (header, bytes) = reader.next_record().unwrap()?;
    let record = layout.decode(&bytes).unwrap();
    assert_eq!(record.source, header.source);
    Some(record)
}

/// Yields the processor to the reader if the ring is more than half full.
fn give_way(arena: &Arena, ring: &Ring) {
    let head = arena.word(ring.head).load(Ordering::SeqCst);
    if head.wrapping_sub(arena.tail(ring)) > u64::from(ring.capacity / 2) {
        std::thread::yield_now();
    }
}
