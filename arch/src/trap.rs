//! How a guest's execution comes to us: the breakpoint instruction, the ports that only we answer, the
//! exceptions and the gates they go through. Each number stands here once.

/// The breakpoint instruction.
pub const INT3: u8 = 0xcc;

/// The port the patched #BP entry writes to. Its number is the opcode of `nop`, so a virtual CPU
/// that was interrupted between the first two bytes of `nop nop` while the entry was patched goes
/// on as if nothing had happened. Nothing in a PC answers there.
pub const GATE_PORT: u8 = 0x90;

/// The port that detours write to when the ring fills up. Nothing in a PC answers there either.
pub const DOORBELL_PORT: u8 = 0x91;

/// The port that detours write to when there is no room in the ring for a hit that is not to be lost.
/// The host answers in AL: not zero where it is worth another look. Nothing in a PC answers there either,
/// unlike at the port before it.
pub const ROOM_PORT: u8 = 0x93;

/// How many vectors an interrupt descriptor table has (SDM vol. 3, 6.10).
pub const VECTORS: u64 = 256;

/// Bytes of a gate in the interrupt descriptor table (SDM vol. 3, 6.14.1).
pub const GATE_SIZE: usize = 16;

/// Bytes of a whole interrupt descriptor table.
pub const IDT_SIZE: usize = 4096;

/// Numbers of exceptions (SDM vol. 3, table 6-1).
pub mod vector {
    /// The non-maskable interrupt.
    pub const NMI: u8 = 2;
    /// #BP.
    pub const BREAKPOINT: u8 = 3;
    /// #GP.
    pub const GENERAL_PROTECTION: u8 = 13;
    /// #PF.
    pub const PAGE_FAULT: u8 = 14;
    /// #MC.
    pub const MACHINE_CHECK: u8 = 18;
    /// The first that is an interrupt.
    pub const INTERRUPTS: u8 = 32;
}
