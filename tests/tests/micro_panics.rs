//! Panics in a machine's own threads: they end that machine, with the reason, and nobody waits for ever.

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

/// How long a machine may take to end.
const LIMIT: Duration = Duration::from_secs(60);

/// Port of the serial port's data.
const SERIAL: u32 = 0x3f8;

/// Panics in the collector's thread, in the supervisor's, or in a virtual CPU's.
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

/// Panics when it is woken.
struct Alarm;

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        panic!("on purpose");
    }
}

/// How a machine ends whose guest prints and hits a probe again and again, and whose listener is `frail`.
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
        // A place has one label.
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
        // Whoever waits for the console is woken by the thread that prints.
        let alarm = Waker::from(Arc::new(Alarm));
        let mut context = Context::from_waker(&alarm);
        assert!(printed.as_mut().poll(&mut context).is_pending());
    }
    machine.resume().expect("it runs");
    let begun = Instant::now();
    let (told, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // Nobody listens after the limit.
        let _ = told.send(machine.wait());
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
