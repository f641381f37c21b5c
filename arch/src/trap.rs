//! Constants of the ways in which control passes from the guest to hvprobe: the breakpoint instruction, the I/O
//! ports that only hvprobe answers, exceptions, and the gates of the interrupt descriptor table.

/// The breakpoint instruction.
pub const INT3: u8 = 0xcc;

/// Port that the patched #BP entry writes to. Its number is the opcode of `nop`. So if the patch replaces two
/// one-byte `nop`s while a vCPU is interrupted between them, the vCPU still continues with a `nop`. No device of a
/// PC answers there.
pub const GATE_PORT: u8 = 0x90;

/// Port that a detour writes to when the ring fills up. No device of a PC answers there either.
pub const DOORBELL_PORT: u8 = 0x91;

/// Port that a detour writes to when the ring has no room for a hit that must not be lost. The host answers in AL:
/// nonzero if the detour should try again. No device of a PC answers there either. (Port 0x92, the next number,
/// belongs to a device of PCs.)
pub const ROOM_PORT: u8 = 0x93;

/// All ports that only hvprobe answers.
pub const PORTS: [u8; 3] = [GATE_PORT, DOORBELL_PORT, ROOM_PORT];

/// Number of vectors of an interrupt descriptor table (SDM vol. 3, 6.10).
pub const VECTORS: u64 = 256;

/// Size in bytes of a gate in the interrupt descriptor table (SDM vol. 3, 6.14.1).
pub const GATE_SIZE: usize = 16;

/// Size in bytes of a whole interrupt descriptor table.
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
    /// The first vector of interrupts.
    pub const INTERRUPTS: u8 = 32;
}
