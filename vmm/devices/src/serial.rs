//! The serial console: a 16550A from `vm-superio`, its interrupt, and a queue for input.
//!
//! Invariant: input is delivered in order, and no accepted byte is lost. Bytes wait in a bounded queue. They move
//! into the UART's FIFO when it has room and the guest has enabled receive interrupts, both in the UART and at its
//! OUT2 output. Drivers discard input that arrives earlier, while they probe and set up the UART. As a consequence,
//! a guest that only polls gets no input.
//!
//! The thread whose access makes an interrupt due also raises it. Usually that is the thread of the vCPU that takes
//! the interrupt, so the interrupt is pending when the vCPU continues. With an irqfd, a worker of the host kernel
//! would raise it later, when the guest runs again. That would take an IPI to the guest's processor for each byte
//! that the guest prints.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use acpi_tables::aml::{EISAName, IO, Interrupt as Irq, Name, ResourceTemplate, ZERO};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

use super::acpi::Tables;
use super::address::AddressRange;
use super::device::{Device, DeviceEvent};

/// First port of the serial console.
pub(crate) const COM1: u16 = 0x3f8;
/// Interrupt of the serial console.
pub const COM1_GSI: u32 = 4;

/// Maximum number of bytes of input that wait for a guest that does not read.
const MAX_PENDING: usize = 64 << 10;

/// Number of registers.
const REGISTERS: u8 = 8;
/// Registers of the UART, by offset (National Semiconductor PC16550D).
const DATA: u64 = 0;
const INTERRUPT_ENABLE: u64 = 1;
const INTERRUPT_IDENTIFICATION: u64 = 2;
const LINE_CONTROL: u64 = 3;
const MODEM_CONTROL: u64 = 4;
const LINE_STATUS: u8 = 5;

/// Interrupt enable: received data.
const RECEIVED: u8 = 1;
/// Interrupt identification: mask of the pending interrupt.
const IDENTIFICATION: u8 = 0x0f;
/// Interrupt identification: no interrupt is pending.
const NO_INTERRUPT: u8 = 0x01;
/// Interrupt identification: received data.
const DATA_RECEIVED: u8 = 0x04;
/// Line status: the FIFO has data.
const DATA_READY: u8 = 1;
/// Modem control: the output that gates the interrupt line in a PC.
const OUT2: u8 = 1 << 3;
/// Line control: the first two registers are the baud rate divisor.
const DIVISOR_LATCH: u8 = 1 << 7;

/// Receiver of the guest's output. Its methods are called with the console locked, so they must not block or call
/// back.
pub trait Output: fmt::Debug + Send + Sync {
    /// Takes bytes that the guest has printed. Called on a vCPU's thread.
    fn print(&self, bytes: &[u8]);

    /// Ends the output. Called after the guest has ended.
    fn close(&self);
}

/// Function that sends an edge on the interrupt line.
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
    /// Whether the first two registers are the baud rate divisor.
    divisor: bool,
    /// The interrupt enable register.
    enabled: u8,
    /// The modem control register.
    modem: u8,
}

impl Console {
    pub(super) fn new(interrupt: Edge, output: Arc<dyn Output>) -> Self {
        Self(Mutex::new(State {
            uart: Serial::new(Interrupt(interrupt), Sink(output)),
            pending: VecDeque::new(),
            divisor: false,
            enabled: 0,
            modem: 0,
        }))
    }

    /// Locks the state. A poisoned lock is usable, because a panic in the sink leaves the UART's registers
    /// unchanged.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn input(&self, bytes: &[u8]) -> usize {
        let mut state = self.lock();
        let accepted = bytes.len().min(MAX_PENDING - state.pending.len());
        state.pending.extend(&bytes[..accepted]);
        state.feed();
        accepted
    }
}

impl Device for Console {
    fn ranges(&self) -> Vec<AddressRange> {
        vec![AddressRange::ports(COM1, REGISTERS.into())]
    }

    /// Adds the device object from which the driver learns the interrupt's number.
    fn describe(&self, tables: &mut Tables) {
        let irq = Irq::new(true, true, false, false, COM1_GSI);
        let ports = IO::new(COM1, COM1, 1, REGISTERS);
        let resources = ResourceTemplate::new(vec![&ports, &irq]);
        tables.add_device(
            "COM1",
            &[
                Name::new("_HID".into(), &EISAName::new("PNP0501")),
                Name::new("_UID".into(), &ZERO),
                Name::new("_CRS".into(), &resources),
            ],
        );
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
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

    fn write(&self, offset: u64, data: &[u8]) -> Option<DeviceEvent> {
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
        None
    }

    fn stop(&self) {
        self.lock().uart.writer().0.close();
    }
}

impl State {
    /// Returns the value of the interrupt identification register, for which `vm-superio` has returned `found`.
    /// Adds an interrupt that `vm-superio` leaves out: received data stays an interrupt until the FIFO is empty.
    /// Linux' driver reads at most 256 bytes, then checks this register for more.
    fn identify(&mut self, found: u8) -> u8 {
        let is_idle = found & IDENTIFICATION == NO_INTERRUPT;
        let has_data = self.uart.read(LINE_STATUS) & DATA_READY != 0;
        match is_idle && has_data && self.enabled & RECEIVED != 0 {
            true => found & !IDENTIFICATION | DATA_RECEIVED,
            false => found,
        }
    }

    /// Moves input into the UART while its FIFO has room, if the guest has enabled receive interrupts.
    fn feed(&mut self) {
        let receiving = self.enabled & RECEIVED != 0 && self.modem & OUT2 != 0;
        while receiving && self.uart.fifo_capacity() > 0 && !self.pending.is_empty() {
            let (bytes, _) = self.pending.as_slices();
            match self.uart.enqueue_raw_bytes(bytes) {
                // In loopback mode the UART accepts no input.
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

/// Adapter from [`Output`] to [`Write`].
struct Sink(Arc<dyn Output>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.print(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
