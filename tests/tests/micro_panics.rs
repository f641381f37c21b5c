//! Tests that a panic in one of a machine's own threads ends the machine and is reported as the reason, and that no
//! caller waits for ever.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use hvprobe_hit::event::Event;
use hvprobe_machine::{EndReason, Listen, Machine, ProbeSpec, ThrottleNotice};
use hvprobe_spec::Budget;
use hvprobe_tests::micro::MicroKernel;
use hvprobe_tests::rig::probe;
use hvprobe_vm::host;
use iced_x86::code_asm::registers::{al, dx, eax, edx};

/// Time limit for the end of a machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Data port of the serial port.
const SERIAL: u32 = 0x3f8;

/// Listener that panics in the collector's, the supervisor's or a virtual CPU's thread.
#[derive(Clone, Copy, Debug)]
enum Frail {
    Collector,
    Supervisor,
    Vcpu,
}

impl Listen for Frail {
    fn hear(&mut self, events: &[Event], _: u64) -> bool {
        let panics = matches!(self, Self::Collector) && !events.is_empty();
        assert!(!panics, "on purpose");
        true
    }

    fn note(&mut self, _: &[ThrottleNotice]) {
        assert!(!matches!(self, Self::Supervisor), "on purpose");
    }
}

/// Waker that panics.
struct Alarm;

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        panic!("on purpose");
    }
}

/// Boots a machine whose guest repeatedly prints and hits a probe, with the listener `frail`. Returns the reason
/// for which the machine ends, or `None` without a suitable KVM.
fn ending_of(frail: Frail) -> Option<EndReason> {
    match host::catch_mode() {
        Ok(Some(_)) => {}
        Ok(None) | Err(_) => {
            eprintln!("skipped: needs a KVM that lets int3 be caught");
            return None;
        }
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut config = MicroKernel::assemble(|kernel| {
        let (spot, again) = (kernel.asm().create_label(), kernel.asm().create_label());
        let mut again = again;
        let asm = kernel.asm();
        // An instruction can have only one label.
        asm.nop()?;
        asm.set_label(&mut again)?;
        asm.mov(edx, SERIAL)?;
        asm.mov(eax, u32::from(b'.'))?;
        asm.out(dx, al)?;
        asm.call(spot)?;
        asm.jmp(again)?;
        kernel.function("spot", spot)?;
        kernel.asm().ret()
    })
    .expect("the code assembles")
    .build(folder.path())
    .expect("the micro-kernel can be written");
    config.paused = true;
    config.probes = vec![ProbeSpec {
        budget: Some(Budget {
            max_rate: Some(1),
            ..Budget::default()
        }),
        ..probe("p spot")
    }];
    let machine = Machine::boot(config).expect("it boots");
    machine.listen(Box::new(frail));
    let mut console = machine.console();
    let mut printed = pin!(console.next());
    if matches!(frail, Frail::Vcpu) {
        // The virtual CPU's thread, which prints, wakes the task that waits for the console.
        let alarm = Waker::from(Arc::new(Alarm));
        let mut context = Context::from_waker(&alarm);
        assert!(printed.as_mut().poll(&mut context).is_pending());
    }
    machine.resume().expect("it runs");
    let begun = Instant::now();
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // After the limit, the receiver is gone.
        let _ = sender.send(machine.wait());
    });
    let ending = ended.recv_timeout(LIMIT).expect("the machine ends");
    assert!(begun.elapsed() < LIMIT);
    Some(ending.reason)
}

#[test]
fn panic_of_the_collector_ends_its_machine_with_the_reason() {
    if let Some(reason) = ending_of(Frail::Collector) {
        let expected = "the collector of events panicked".to_owned();
        assert_eq!(reason, EndReason::Crash(expected));
    }
}

#[test]
fn panic_of_the_supervisor_ends_its_machine_with_the_reason() {
    if let Some(reason) = ending_of(Frail::Supervisor) {
        let expected = "the machine's supervisor panicked".to_owned();
        assert_eq!(reason, EndReason::Crash(expected));
    }
}

#[test]
fn panic_of_a_virtual_cpu_ends_its_machine_with_the_reason() {
    if let Some(reason) = ending_of(Frail::Vcpu) {
        let expected = "a virtual CPU's thread panicked".to_owned();
        assert_eq!(reason, EndReason::Crash(expected));
    }
}
