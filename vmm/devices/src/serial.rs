//! The serial console: a 16550A from `vm-superio`, its interrupt, and a queue for input.
//!
//! What holds: input is delivered in order and none is lost once accepted. Bytes wait in a bounded
//! queue and move on when the UART's FIFO has room and the guest has switched receive interrupts on,
//! in the UART and on the way out of it: what arrives earlier, drivers throw away while they probe
//! the UART and set it up. So a guest that polls gets no input.
//!
//! The interrupt is raised by the thread that makes it due, most often the virtual CPU's own, which
//! then finds it pending when it goes on. An irqfd would have a worker of the host's kernel do it, at
//! a time of its own and by an interrupt to the processor that the guest is back on: for each byte
//! that the guest prints.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

/// The first port of the serial console.
pub(crate) const COM1: u16 = 0x3f8;
/// The interrupt of the serial console.
pub const COM1_GSI: u32 = 4;

/// How much input waits for a guest that does not read, in bytes.
const MAX_PENDING: usize = 64 << 10;

/// Registers of the UART, by offset (National Semiconductor PC16550D).
const DATA: u16 = 0;
const INTERRUPT_ENABLE: u16 = 1;
const INTERRUPT_IDENTIFICATION: u16 = 2;
const LINE_CONTROL: u16 = 3;
const MODEM_CONTROL: u16 = 4;
const LINE_STATUS: u8 = 5;

/// Interrupt enable: data has been received.
const RECEIVED: u8 = 1;
/// Interrupt identification: which interrupt is pending, none, and that data has been received.
const IDENTIFICATION: u8 = 0x0f;
const NO_INTERRUPT: u8 = 0x01;
const DATA_RECEIVED: u8 = 0x04;
/// Line status: there is data in the FIFO.
const DATA_READY: u8 = 1;
/// Modem control: the output that connects the interrupt line in a PC.
const OUT2: u8 = 1 << 3;
/// Line control: the first two registers are the baud rate's divisor.
const DIVISOR_LATCH: u8 = 1 << 7;

/// What takes the guest's output.
pub(super) type Output = Box<dyn FnMut(&[u8]) + Send>;
/// What sends an edge down the interrupt line.
pub(super) type Edge = Box<dyn Fn() -> io::Result<()> + Send>;

/// The console of one machine.
pub(super) struct Console(Mutex<State>);

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Console")
    }
}

struct State {
    uart: Serial<Interrupt, NoEvents, Sink>,
    pending: VecDeque<u8>,
    /// The guest sees the divisor in the first two registers.
    divisor: bool,
    /// The interrupt enable register.
    enabled: u8,
    /// The modem control register.
    modem: u8,
}

impl Console {
    pub(super) fn new(interrupt: Edge, sink: Output) -> Self {
        Self(Mutex::new(State {
            uart: Serial::new(Interrupt(interrupt), Sink(sink)),
            pending: VecDeque::new(),
            divisor: false,
            enabled: 0,
            modem: 0,
        }))
    }

    /// A panic of the sink leaves the UART's registers as they were, so a poisoned lock is usable.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, offset: u16, data: &[u8]) {
        let mut state = self.lock();
        for byte in data {
            // Neither the interrupt nor the sink can fail in a way the guest should see.
            if let Err(error) = state.uart.write(offset.to_le_bytes()[0], *byte) {
                tracing::debug!(%error, "console output");
            }
            match offset {
                INTERRUPT_ENABLE if !state.divisor => state.enabled = *byte,
                MODEM_CONTROL => state.modem = *byte,
                LINE_CONTROL => state.divisor = byte & DIVISOR_LATCH != 0,
                _ => {}
            }
        }
        state.feed();
    }

    pub(super) fn read(&self, offset: u16, data: &mut [u8]) {
        let mut state = self.lock();
        for byte in data {
            *byte = state.uart.read(offset.to_le_bytes()[0]);
            if offset == INTERRUPT_IDENTIFICATION {
                *byte = state.identify(*byte);
            }
        }
        if offset == DATA {
            state.feed();
        }
    }

    pub(super) fn input(&self, bytes: &[u8]) -> usize {
        let mut state = self.lock();
        let accepted = bytes.len().min(MAX_PENDING - state.pending.len());
        state.pending.extend(&bytes[..accepted]);
        state.feed();
        accepted
    }
}

impl State {
    /// Adds what `vm-superio` leaves out of the interrupt identification: data in the FIFO stays an interrupt
    /// until all of it is read. Linux' driver takes 256 bytes at most, then looks here whether there is more.
    fn identify(&mut self, found: u8) -> u8 {
        let is_idle = found & IDENTIFICATION == NO_INTERRUPT;
        let has_data = self.uart.read(LINE_STATUS) & DATA_READY != 0;
        match is_idle && has_data && self.enabled & RECEIVED != 0 {
            true => found & !IDENTIFICATION | DATA_RECEIVED,
            false => found,
        }
    }

    /// Moves input into the UART as far as it has room.
    fn feed(&mut self) {
        let receiving = self.enabled & RECEIVED != 0 && self.modem & OUT2 != 0;
        while receiving && self.uart.fifo_capacity() > 0 && !self.pending.is_empty() {
            let (bytes, _) = self.pending.as_slices();
            match self.uart.enqueue_raw_bytes(bytes) {
                // Loopback mode takes nothing from outside.
                Ok(0) => return,
                Ok(taken) => drop(self.pending.drain(..taken)),
                Err(error) => {
                    tracing::debug!(%error, "console input");
                    return;
                }
            }
        }
    }
}

/// The console's interrupt line.
struct Interrupt(Edge);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        (self.0)()
    }
}

/// Where the guest's output goes.
struct Sink(Output);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.0)(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
