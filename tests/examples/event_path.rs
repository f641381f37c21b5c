//! How many events a second get from a synthetic source to a gRPC client on this machine, and what
//! they cost.
//!
//! ```text
//! cargo run --release --package hvprobe-tests --example event_path [SECONDS|--smoke]
//! ```
//!
//! The way is the one that hits take: through the collector, the server and a unix socket to a
//! client in a process of its own, which decodes every event. Only what stands before the collector
//! is made up: a source that has a number of events ready every millisecond, with all registers and
//! a task, from two virtual CPUs. Needs no KVM. A row per rate, then one with two clients that never
//! read beside the one that does.
//!
//! `events/s` and `MB/s` are what that client got, from the first event to the last; `dropped` what
//! it lost; `server` and `client` the CPU time of the two processes, in processors; `us/event` both
//! together, for an event that arrived; the last two columns the most memory that each ever had.
//!
//! `--smoke` goes through all of it in a moment; its numbers mean nothing.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hvprobe_arch::Regs;
use hvprobe_hit::event::{Captured, Collector, Drained, Event, EventKind, Source};
use hvprobe_linux::task::Task;
use hvprobe_proto::v1::SubscribeRequest;
use hvprobe_proto::v1::events_client::EventsClient;
use hvprobe_server::{Listener, Server};
use hvprobe_spec::{ProbeId, RegisterSet};
use prost::Message as _;
use tokio::sync::oneshot;
use tonic::transport::Endpoint;

/// Events a second that the rows ask for.
const RATES: [u64; 5] = [250_000, 500_000, 1_000_000, 1_500_000, 2_000_000];
/// How often the source has events ready.
const TICK: Duration = Duration::from_millis(1);
/// How much longer than its events a row may take.
const PATIENCE: Duration = Duration::from_secs(60);
const USAGE: &str = "usage: event_path [SECONDS|--smoke]";
/// Under which name the events are offered.
const NAME: &str = "synthetic";

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        [] => table(5000),
        ["--smoke"] => table(200),
        [seconds] => table(1000 * seconds.parse::<u64>().context(USAGE)?),
        ["row", rate, stuck, ms] => row(rate.parse()?, stuck.parse()?, ms.parse()?),
        ["client", socket] => client(socket),
        ["stuck", socket] => stuck(socket),
        _ => bail!(USAGE),
    }
}

/// Each row is measured by a process of its own, so that it has its own peak of memory.
fn table(milliseconds: u64) -> Result<()> {
    println!(
        "{:>10} {:>6} {:>10} {:>8} {:>10} {:>7} {:>7} {:>9} {:>10} {:>10}",
        "made/s",
        "stuck",
        "events/s",
        "MB/s",
        "dropped",
        "server",
        "client",
        "us/event",
        "server MiB",
        "client MiB"
    );
    let rows = RATES.iter().map(|rate| (*rate, 0)).chain([(1_000_000, 2)]);
    for (rate, stuck) in rows {
        let numbers = [rate, stuck, milliseconds].map(|number| number.to_string());
        let mut child = own(&["row"]).args(numbers).spawn()?;
        let limit = Instant::now() + Duration::from_millis(milliseconds) + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() > limit {
                // Its clients go with it.
                child.kill()?;
                child.wait()?;
                bail!("the row of {rate} events a second did not end");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        ensure!(status.success(), "a row could not be measured");
    }
    Ok(())
}

/// Has the kernel end this process when the one that started it ends.
fn end_with_parent() -> Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(
        rustix::process::Signal::KILL,
    ))?)
}

fn own(arguments: &[&str]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(arguments);
    command
}

/// What a client tells.
#[derive(Clone, Copy, Debug)]
struct Got {
    events: u64,
    bytes: u64,
    dropped: u64,
    nanoseconds: u64,
    cpu_microseconds: u64,
    kibibytes: u64,
}

/// The server, with one client that reads and `stuck` that do not.
fn row(rate: u64, stuck: u64, milliseconds: u64) -> Result<()> {
    end_with_parent()?;
    let all = rate * milliseconds / 1000;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("socket");
    let socket = path.to_str().context("an odd temporary folder")?;
    let runtime = tokio::runtime::Runtime::new()?;
    let mut server = Server::new();
    let sink = server.publish(NAME);
    let listener = {
        let _entered = runtime.enter();
        Listener::bind(&path)?
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = runtime.spawn(server.serve(listener, async {
        let _asked_or_dropped = stopped.await;
    }));

    let mut others = Vec::new();
    for _ in 0..stuck {
        others.push(Peer::start("stuck", socket)?);
    }
    let mut client = Peer::start("client", socket)?;
    let (before, start) = (cpu_microseconds()?, Instant::now());
    let (done, is_done) = mpsc::channel();
    let synthetic = Synthetic {
        start,
        rate,
        made: 0,
        all,
        done: Some(done),
    };
    let (collector, _producers) = Collector::start_with(vec![Box::new(synthetic)], 1, 2, sink)?;
    is_done
        .recv_timeout(Duration::from_millis(milliseconds) + PATIENCE / 2)
        .context("the collector did not ask for all events")?;
    // With the sink go the streams.
    collector.finish();
    let line = client.line()?;
    let cpu = cpu_microseconds()? - before;
    let wall = start.elapsed();
    let got = Got::parse(&line).with_context(|| format!("the client said: {line}"))?;
    ensure!(
        got.events + got.dropped == all,
        "events are missing: {got:?}"
    );
    drop(others);
    drop(client);
    drop(stop);
    runtime.block_on(serving)??;

    let second = float(got.nanoseconds) / 1e9;
    let wall = wall.as_secs_f64() * 1e6;
    println!(
        "{:>10} {:>6} {:>10.0} {:>8.1} {:>10} {:>7.2} {:>7.2} {:>9.2} {:>10.1} {:>10.1}",
        rate,
        stuck,
        float(got.events) / second,
        float(got.bytes) / second / 1e6,
        got.dropped,
        float(cpu) / wall,
        float(got.cpu_microseconds) / wall,
        float(cpu + got.cpu_microseconds) / float(got.events),
        float(peak_kibibytes()?) / 1024.0,
        float(got.kibibytes) / 1024.0,
    );
    Ok(())
}

/// A process of this program that is a client.
struct Peer {
    child: Child,
    says: BufReader<std::process::ChildStdout>,
}

impl Peer {
    /// Returns when it has subscribed.
    fn start(kind: &str, socket: &str) -> Result<Self> {
        let mut child = own(&[kind, socket]).stdout(Stdio::piped()).spawn()?;
        let says = child.stdout.take().context("no output")?;
        let mut peer = Self {
            child,
            says: BufReader::new(says),
        };
        ensure!(peer.line()? == "subscribed", "a client did not subscribe");
        Ok(peer)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.says.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // One that is done is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Got {
    fn parse(line: &str) -> Option<Self> {
        let numbers: Vec<u64> = line
            .split(' ')
            .map(|word| word.parse().ok())
            .collect::<Option<_>>()?;
        let [
            events,
            bytes,
            dropped,
            nanoseconds,
            cpu_microseconds,
            kibibytes,
        ] = numbers[..]
        else {
            return None;
        };
        Some(Self {
            events,
            bytes,
            dropped,
            nanoseconds,
            cpu_microseconds,
            kibibytes,
        })
    }
}

async fn subscribe(socket: &str) -> Result<tonic::Streaming<hvprobe_proto::v1::SubscribeResponse>> {
    let channel = Endpoint::from_shared(format!("unix:{socket}"))?
        .connect()
        .await?;
    let request = SubscribeRequest {
        machine: NAME.to_owned(),
        ..Default::default()
    };
    let mut stream = EventsClient::new(channel)
        .subscribe(request)
        .await?
        .into_inner();
    stream.message().await?.context("the stream has ended")?;
    println!("subscribed");
    Ok(stream)
}

/// Takes all events and tells what it got.
fn client(socket: &str) -> Result<()> {
    end_with_parent()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut stream = subscribe(socket).await?;
        let (mut events, mut bytes, mut dropped) = (0, 0, 0);
        let (mut next, mut first, mut last) = (0, None, Instant::now());
        while let Some(message) = stream.message().await? {
            // What is dropped before this client has positions, but never arrives.
            for event in &message.events {
                ensure!(event.seq >= next, "events changed their order");
                next = event.seq + 1;
            }
            events += message.events.len() as u64;
            dropped += message.dropped;
            if let Some(event) = message.events.last() {
                // All are of about the same size.
                bytes += (event.encoded_len() * message.events.len()) as u64;
                last = Instant::now();
                first.get_or_insert(last);
            }
        }
        let nanoseconds = last
            .duration_since(first.context("nothing came")?)
            .as_nanos();
        println!(
            "{events} {bytes} {dropped} {nanoseconds} {} {}",
            cpu_microseconds()?,
            peak_kibibytes()?
        );
        Ok(())
    })
}

/// Subscribes and reads no more, until it is ended.
fn stuck(socket: &str) -> Result<()> {
    end_with_parent()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let _unread = subscribe(socket).await?;
        std::future::pending().await
    })
}

/// Makes events at a rate.
struct Synthetic {
    start: Instant,
    rate: u64,
    made: u64,
    all: u64,
    /// Told when all are made.
    done: Option<mpsc::Sender<()>>,
}

impl Source for Synthetic {
    fn drain(&mut self, batch: &mut Vec<Event>, most: usize) -> Drained {
        let elapsed = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        let due = (elapsed.saturating_mul(self.rate) / 1_000_000).min(self.all);
        let number = due.saturating_sub(self.made).min(most as u64);
        for _ in 0..number {
            batch.push(event(self.made));
            self.made += 1;
        }
        // These are still to be handed on, which finishing the collector does.
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
        (self.made < self.all).then_some(TICK)
    }
}

/// A hit as one of `vfs_read` is: kernel addresses in most registers.
fn event(number: u64) -> Event {
    let address = 0xffff_8880_0312_3400 + number % 4096 * 64;
    let vcpu = u32::from(number % 2 == 1);
    Event {
        kind: EventKind::Hit,
        seq: 0,
        probe: ProbeId(1 + vcpu),
        vcpu,
        host_ns: 1_000_000_000_000 + number,
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
            pid: 1234,
            tgid: 1234,
            comm: *b"workload\0\0\0\0\0\0\0\0",
        }),
        cost_ns: 2100,
    }
}

/// CPU time of this process so far.
fn cpu_microseconds() -> Result<u64> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let time = Duration::try_from(time).context("an odd clock")?;
    Ok(u64::try_from(time.as_micros())?)
}

/// The most memory that this process ever had (`VmHWM` of proc_pid_status(5)).
fn peak_kibibytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no peak of memory is told")?.parse()?)
}

/// Exact for what is counted here.
fn float(number: u64) -> f64 {
    u32::try_from(number).map_or_else(
        |_| f64::from(u32::try_from(number >> 20).unwrap_or(u32::MAX)) * f64::from(1 << 20),
        f64::from,
    )
}
