//! Synthetic events.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use hvprobe_arch::Regs;
use hvprobe_hit::event::{
    Captured, Collector, Drained, Event, EventKind, EventProducer, Sink, Source,
};
use hvprobe_linux::task::Task;
use hvprobe_spec::{ProbeId, RegisterSet};

use super::meter::now_ns;

/// Interval at which the source has events ready.
const TICK: Duration = Duration::from_millis(1);
/// Maximum interval between reads of records.
const RECORDS_TICK: Duration = Duration::from_millis(5);
/// One event in this many is of the thread that filtered clients select.
pub(crate) const THREADS: u64 = 10;

/// Way in which events reach the collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From a source that can be asked at any time.
    Asked,
    /// Like hits that take an exit.
    Exits,
    /// Like records of detours.
    Records,
}

/// Makes a collector deliver `all` events to `sink`, at `rate` a second. Waits until all are delivered, and drops
/// the sink, which ends the streams.
pub(crate) fn make(
    way: Way,
    rate: u64,
    all: u64,
    limit: Duration,
    start: Instant,
    sink: Sink,
) -> Result<()> {
    if way == Way::Exits {
        let (collector, mut producers) = Collector::start(1, 4096, sink)?;
        let producer = producers.first_mut().context("no virtual CPU")?;
        hits(producer, start, rate, all);
        collector.finish();
        return Ok(());
    }
    let (done, is_done) = mpsc::channel();
    let synthetic = Synthetic {
        start,
        start_ns: now_ns()?,
        tick: match way {
            Way::Records => RECORDS_TICK,
            _ => TICK,
        },
        rate,
        made: 0,
        all,
        done: Some(done),
    };
    let (collector, _producers) = Collector::start_with(vec![Box::new(synthetic)], 1, 2, sink)?;
    is_done
        .recv_timeout(limit)
        .context("the collector did not ask for all events")?;
    collector.finish();
    Ok(())
}

/// Makes hits one by one, as a virtual CPU does.
fn hits(producer: &mut EventProducer, start: Instant, rate: u64, all: u64) {
    for number in 0..all {
        let due = start + Duration::from_nanos(number.saturating_mul(1_000_000_000) / rate);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let ns = now_ns().unwrap_or(0);
        producer.turn();
        producer.push(|| event(number, ns), |_| ());
        producer.turn();
    }
}

/// Source that makes events at a constant rate.
struct Synthetic {
    start: Instant,
    /// The same as `start`, on the clock of events.
    start_ns: u64,
    tick: Duration,
    rate: u64,
    made: u64,
    all: u64,
    /// Receives a message when all events are made.
    done: Option<mpsc::Sender<()>>,
}

impl Source for Synthetic {
    fn drain(&mut self, batch: &mut Vec<Event>, most: usize) -> Drained {
        let elapsed = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        let due = (elapsed.saturating_mul(self.rate) / 1_000_000).min(self.all);
        let number = due.saturating_sub(self.made).min(most as u64);
        for _ in 0..number {
            let ns = self.start_ns + self.made.saturating_mul(1_000_000_000) / self.rate;
            batch.push(event(self.made, ns));
            self.made += 1;
        }
        // The collector still has to deliver these events. `make` waits for that by finishing the collector.
        if self.made == self.all
            && let Some(done) = self.done.take()
        {
            let _ = done.send(());
        }
        Drained {
            more: self.made < due,
            ..Drained::default()
        }
    }

    fn patience(&self) -> Option<Duration> {
        (self.made < self.all).then_some(self.tick)
    }
}

/// Returns an event that looks like a hit of `vfs_read`: most registers hold kernel addresses.
fn event(number: u64, host_ns: u64) -> Event {
    let address = 0xffff_8880_0312_3400 + number % 4096 * 64;
    let vcpu = u32::from(number % 2 == 1);
    let thread = i32::try_from(number % THREADS).unwrap_or(0);
    Event {
        kind: EventKind::Hit,
        seq: 0,
        probe: ProbeId(1 + vcpu),
        vcpu,
        host_ns,
        guest_tsc: 3_000_000_000_000 + number,
        regs: Regs {
            rax: 0xffff_ffff_8134_cc50,
            rbx: address,
            rcx: 0x1000,
            rdx: 1,
            rsi: 0x7fff_1234_5000,
            rdi: address,
            rsp: address + 0xf00,
            rbp: address + 0xf40,
            r8: 0,
            r9: address,
            r10: 0,
            r11: number,
            r12: address,
            r13: address,
            r14: 0,
            r15: 0,
            rip: 0xffff_ffff_8134_cc50,
            rflags: 0x246,
        },
        shown: RegisterSet::default(),
        captured: Captured::nothing(),
        task: Some(Task {
            pid: 1234 + thread,
            tgid: 1234,
            comm: *b"workload\0\0\0\0\0\0\0\0",
        }),
        cost_ns: 2100,
    }
}
