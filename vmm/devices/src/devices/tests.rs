//! The devices without a virtual machine; the console's interrupts are counted.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::*;
use crate::exit_status::EXIT_STATUS_PORT;
use crate::serial::COM1;

mod acpi;

/// Ports of the UART's registers.
const DATA: u16 = COM1;
const INTERRUPT_ENABLE: u16 = COM1 + 1;
const INTERRUPT_IDENTIFICATION: u16 = COM1 + 2;
const LINE_CONTROL: u16 = COM1 + 3;
const MODEM_CONTROL: u16 = COM1 + 4;
const LINE_STATUS: u16 = COM1 + 5;

/// What the guest has printed.
#[derive(Debug, Default)]
struct Printed {
    bytes: Mutex<Vec<u8>>,
    is_closed: AtomicBool,
}

impl Output for Printed {
    fn print(&self, bytes: &[u8]) {
        self.bytes.lock().unwrap().extend_from_slice(bytes);
    }

    fn close(&self) {
        assert!(!self.is_closed.swap(true, Ordering::Relaxed));
    }
}

struct Machine {
    devices: Devices,
    interrupts: Arc<AtomicU64>,
    output: Arc<Printed>,
}

fn machine() -> Machine {
    let interrupts = Arc::new(AtomicU64::new(0));
    let line = Arc::clone(&interrupts);
    let output = Arc::new(Printed::default());
    let interrupt = move || {
        line.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    Machine {
        devices: Devices::new(interrupt, Arc::clone(&output) as _)
            .expect("no two devices claim the same addresses"),
        interrupts,
        output,
    }
}

impl Machine {
    fn write(&self, port: u16, data: &[u8]) -> Option<DeviceEvent> {
        self.devices.write(Space::Port, port.into(), data)
    }

    fn out(&self, port: u16, value: u8) {
        assert_eq!(self.write(port, &[value]), None);
    }

    fn inb(&self, port: u16) -> u8 {
        let mut byte = [0];
        self.devices.read(Space::Port, port.into(), &mut byte);
        byte[0]
    }

    /// Sets up the UART as a driver does when the console is opened.
    fn open(&self) {
        self.out(MODEM_CONTROL, 0x0b);
        self.out(INTERRUPT_ENABLE, 0x05);
    }

    /// Returns the number of interrupts since the last call.
    fn interrupts(&self) -> u64 {
        self.interrupts.swap(0, Ordering::Relaxed)
    }

    /// Reads all bytes that the UART has for the guest now.
    fn drain(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while self.inb(LINE_STATUS) & 1 != 0 {
            bytes.push(self.inb(DATA));
        }
        bytes
    }
}

#[test]
fn what_the_guest_writes_comes_out_in_order() {
    let machine = machine();
    for byte in b"hello" {
        machine.out(DATA, *byte);
    }
    machine.write(DATA, b" world");
    assert_eq!(*machine.output.bytes.lock().unwrap(), b"hello world");
}

#[test]
fn a_writing_driver_gets_its_interrupt() {
    let machine = machine();
    machine.out(INTERRUPT_ENABLE, 0x02);
    assert_eq!(machine.interrupts(), 1);
    // Reading the cause acknowledges it; the next byte raises it again.
    assert_eq!(machine.inb(COM1 + 2) & 0x0f, 0x02);
    machine.out(DATA, b'x');
    assert_eq!(machine.interrupts(), 1);
}

#[test]
fn input_typed_before_the_driver_is_ready_waits_for_it() {
    let machine = machine();
    assert_eq!(machine.devices.console_input(b"early"), 5);
    // A driver that probes the UART's type enables every interrupt, and disables them again.
    machine.out(INTERRUPT_ENABLE, 0x0f);
    machine.out(INTERRUPT_ENABLE, 0x00);
    assert_eq!(machine.drain(), b"");
    // With the divisor latch set, the same port is not the interrupt enable register.
    machine.out(MODEM_CONTROL, 0x0b);
    machine.out(LINE_CONTROL, 0x83);
    machine.out(INTERRUPT_ENABLE, 0x01);
    machine.out(LINE_CONTROL, 0x03);
    assert_eq!(machine.drain(), b"");
    machine.open();
    assert_eq!(machine.drain(), b"early");
}

#[test]
fn more_input_than_the_fifo_holds_arrives_whole_and_in_order() {
    let machine = machine();
    machine.open();
    let typed: Vec<u8> = (0..1000u32).map(|n| n.to_le_bytes()[0]).collect();
    assert_eq!(machine.devices.console_input(&typed), 1000);
    assert_eq!(machine.drain(), typed);
    assert!(machine.interrupts() > 0);
}

#[test]
fn data_that_a_driver_leaves_in_the_fifo_stays_an_interrupt() {
    let machine = machine();
    machine.open();
    assert_eq!(machine.devices.console_input(b"typed"), 5);
    let identified = || machine.inb(INTERRUPT_IDENTIFICATION) & 0x0f;
    for letter in b"typed" {
        assert_eq!(identified(), 0x04);
        assert_eq!(machine.inb(DATA), *letter);
    }
    assert_eq!(identified(), 0x01);
}

#[test]
fn input_beyond_the_queue_is_refused_not_lost() {
    let machine = machine();
    let flood = vec![b'x'; 1 << 20];
    let accepted = machine.devices.console_input(&flood);
    assert!(accepted > 0 && accepted < flood.len());
    assert_eq!(machine.devices.console_input(b"y"), 0);
    machine.open();
    assert_eq!(machine.drain().len(), accepted);
}

#[test]
fn a_guest_that_never_leaves_loopback_mode_does_not_hang_us() {
    let machine = machine();
    machine.out(MODEM_CONTROL, 0x1b);
    machine.out(INTERRUPT_ENABLE, 0x05);
    assert_eq!(machine.devices.console_input(b"typed"), 5);
    for _ in 0..200 {
        machine.out(DATA, b'l');
    }
    assert_eq!(machine.drain(), [b'l'; 64]);
    machine.out(MODEM_CONTROL, 0x0b);
    assert_eq!(machine.drain(), b"typed");
}

#[test]
fn resets_and_shutdowns_are_events() {
    let machine = machine();
    assert_eq!(machine.write(0x64, &[0xfe]), Some(DeviceEvent::Reset));
    assert_eq!(machine.write(0x64, &[0xd1]), None);
    // Sleep type S5 with and without the enable bit, and another sleep type.
    assert_eq!(machine.write(0x600, &[0x34]), Some(DeviceEvent::Shutdown));
    assert_eq!(machine.write(0x600, &[0x14]), None);
    assert_eq!(machine.write(0x600, &[0x24]), None);
}

#[test]
fn the_last_exit_status_counts() {
    let machine = machine();
    assert_eq!(machine.devices.guest_status(), None);
    machine.write(EXIT_STATUS_PORT, &[3]);
    assert_eq!(machine.devices.guest_status(), Some(3));
    machine.write(EXIT_STATUS_PORT, &[255]);
    assert_eq!(machine.devices.guest_status(), Some(255));
}

#[test]
fn empty_ports_read_as_ones() {
    let machine = machine();
    let mut data = [0; 4];
    machine.devices.read(Space::Port, 0xcfc, &mut data);
    assert_eq!(data, [0xff; 4]);
    assert_eq!(machine.write(0xcf8, &[0, 0, 0, 0x80]), None);
    // The CMOS clock is never about to update, and the keyboard controller is always ready.
    assert_eq!(machine.inb(0x71), 0);
    assert_eq!(machine.inb(0x64), 0);
}

#[test]
fn memory_without_a_device_reads_as_ones() {
    let machine = machine();
    for at in [0, 0x3f8, 0x600, 0xc000_0000, u64::MAX] {
        let mut data = [0; 8];
        machine.devices.read(Space::Memory, at, &mut data);
        assert_eq!(data, [0xff; 8]);
        let written = machine.devices.write(Space::Memory, at, &[0xfe, 0x34]);
        assert_eq!(written, None);
    }
}

#[test]
fn stopping_the_devices_ends_the_output() {
    let machine = machine();
    machine.out(DATA, b'x');
    assert!(!machine.output.is_closed.load(Ordering::Relaxed));
    machine.devices.stop();
    assert!(machine.output.is_closed.load(Ordering::Relaxed));
    assert_eq!(*machine.output.bytes.lock().unwrap(), b"x");
}
