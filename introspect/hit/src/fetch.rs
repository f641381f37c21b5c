//! Following the pointers of a fetch argument at a hit.
//!
//! Invariant: an argument is read at the hit, from the memory that its definition names. If any part of an item
//! cannot be read, the whole item is unreadable: neither a part of it nor zeros are returned in its place. The work
//! is bounded by the pointers and the length of the item.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::{Gva, Regs};
use hvprobe_spec::{Base, Fetched, Memory, Pointer, Read, TextHeader};

use super::context::{Scene, is_of_process};
use crate::event::Captured;

/// Size of the smallest page. Either all memory of a page can be read, or none.
const PAGE: u64 = 4096;

/// Appends the data that `fetched` reads. `regs` are the registers at the hit; at a return, `entry` are the
/// registers at the entry.
pub(super) fn fetch<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    into: &mut Captured,
    fetched: &Fetched,
    regs: &Regs,
    entry: Option<&Regs>,
) {
    match (fetched.read, reach(scene, fetched, regs, entry)) {
        (Read::Bytes(len), None) => into.item(len.into(), |_| false),
        (Read::Bytes(len), Some(There::Value(value))) => into.item(len.into(), |bytes| {
            let value = value.to_le_bytes();
            let (front, behind) = bytes.split_at_mut(value.len().min(bytes.len()));
            front.copy_from_slice(&value[..front.len()]);
            behind.fill(0);
            true
        }),
        (Read::Bytes(len), Some(There::At(at))) => {
            into.item(len.into(), |bytes| scene.read(at, bytes));
        }
        (Read::Text(most), Some(There::At(at))) => {
            into.text(most.into(), |bytes| text(scene, at, bytes));
        }
        (Read::Text(most), None | Some(There::Value(_))) => into.text(most.into(), |_| None),
    }
}

/// Reads the whole text whose beginning `fetched` captures to the front of `bytes`, as far as there is space.
/// Returns `None` if it cannot be read.
pub(super) fn whole_text<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    fetched: &Fetched,
    regs: &Regs,
    entry: Option<&Regs>,
    bytes: &mut [u8],
) -> Option<TextHeader> {
    match (fetched.read, reach(scene, fetched, regs, entry)?) {
        (Read::Text(_), There::At(at)) => text(scene, at, bytes),
        _ => None,
    }
}

/// Returns what the pointers of `fetched` lead to.
fn reach<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    fetched: &Fetched,
    regs: &Regs,
    entry: Option<&Regs>,
) -> Option<There> {
    let base = match fetched.base {
        Base::Register(register) => regs.get(register),
        Base::Entry(register) => entry?.get(register),
        Base::Constant(value) => value,
        Base::Task => scene.task()?.0,
    };
    follow(scene, base, &fetched.pointers)
}

/// Target of pointers.
enum There {
    /// There were no pointers: the value itself.
    Value(u64),
    /// The memory at this address.
    At(Gva),
}

fn follow<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    base: u64,
    pointers: &[Pointer],
) -> Option<There> {
    let Some((last, before)) = pointers.split_last() else {
        return Some(There::Value(base));
    };
    let mut value = base;
    for pointer in before {
        let mut bytes = [0; 8];
        let at = address(value, *pointer)?;
        value = scene
            .read(at, &mut bytes)
            .then(|| u64::from_le_bytes(bytes))?;
    }
    Some(There::At(address(value, *last)?))
}

/// Returns the address that `pointer` leads to from `value`, if it is in the memory that `pointer` requires.
fn address(value: u64, pointer: Pointer) -> Option<Gva> {
    let at = Gva(value.wrapping_add_signed(pointer.offset));
    let right = match pointer.memory {
        Memory::Kernel => !is_of_process(at),
        Memory::User => is_of_process(at),
        Memory::Either => true,
    };
    right.then_some(at)
}

/// Reads the text at `at` to the front of `bytes`, page by page, because the memory after the text's end may not be
/// readable.
fn text<M: PhysMemory + ?Sized, C>(
    scene: &Scene<'_, M, C>,
    at: Gva,
    bytes: &mut [u8],
) -> Option<TextHeader> {
    let mut read = 0;
    while read < bytes.len() {
        let from = at.wrapping_add(read as u64);
        let in_page = usize::try_from(PAGE - from.0 % PAGE).ok()?;
        let end = bytes.len().min(read + in_page);
        let piece = &mut bytes[read..end];
        if !scene.read(from, piece) {
            return None;
        }
        if let Some(end) = piece.iter().position(|byte| *byte == 0) {
            return header(read + end, false);
        }
        read += piece.len();
    }
    // A text that fits exactly is complete if the byte after it can be read and is NUL.
    let mut next = [1];
    scene.read(at.wrapping_add(read as u64), &mut next);
    header(read, next != [0])
}

fn header(len: usize, truncated: bool) -> Option<TextHeader> {
    let len = u16::try_from(len).ok()?;
    Some(TextHeader { len, truncated })
}
