//! Measures how many events a second a gRPC client on this machine receives from a synthetic source, and what they
//! cost.
//!
//! ```text
//! cargo run --release --package hvprobe-tests --example event_path [SECONDS|--smoke]
//! ```
//!
//! The events go the same way as those of hits: through the collector, the server and a unix socket to clients in
//! processes of their own, which decode every event. Only the part before the collector is synthetic: a source that
//! makes events of two virtual CPUs, with all registers and a task, available every millisecond. Needs no KVM.
//!
//! The first table has a row for each rate, and then rows with additional clients. Its columns:
//! - `stuck` clients never read.
//! - `filtered` clients want a tenth of the events.
//! - `events/s` and `MB/s` are what each client without a filter received, from the first event to the last.
//! - `dropped` is the number of events that all clients without a filter lost.
//! - `server` and `client` are the CPU time, in processors, of the server's process and of the clients that read.
//! - `us/event` is the CPU time of both, divided by the number of events that arrived at clients without a filter.
//! - `server MiB` and `client MiB` are the peak memory of each, without filtered clients.
//!
//! The second table shows the time from a hit until a client has decoded its event: for hits that take an exit,
//! which are queued one by one, and for records, which are read every 5 ms.
//!
//! The last column shows whether a target is met, if there is one. First table: one client receives 2.5 million
//! events a second when more are made; each of 100 clients receives 10,000 a second without loss. Second table:
//! half of the events arrive within 5 ms, and 99 of a hundred within 20 ms.
//!
//! `--smoke` runs everything briefly; its numbers mean nothing.

mod client;
mod made;
mod meter;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hvprobe_server::{Listener, Server};
use tokio::sync::oneshot;

use client::{Got, NAME, client, stuck};
use made::{THREADS, Way};
use meter::{cpu_microseconds, end_with_parent, peak_kibibytes};

/// Conditions of one row.
#[derive(Clone, Copy, Debug)]
struct Row {
    /// Events made a second.
    rate: u64,
    way: Way,
    clients: u64,
    stuck: u64,
    filtered: u64,
    /// Target: number of events a second that reach each client; 0 if there is none.
    meant: u64,
}

impl Row {
    const fn of(rate: u64) -> Self {
        Self {
            rate,
            way: Way::Asked,
            clients: 1,
            stuck: 0,
            filtered: 0,
            meant: 0,
        }
    }

    const fn late(way: Way, clients: u64) -> Self {
        Self {
            way,
            clients,
            ..Self::of(10_000)
        }
    }
}

/// Rows of the first table.
const RATES: [Row; 10] = [
    Row::of(250_000),
    Row::of(500_000),
    Row::of(1_000_000),
    Row::of(1_500_000),
    Row::of(2_000_000),
    Row::of(2_500_000),
    Row {
        meant: 2_500_000,
        ..Row::of(3_000_000)
    },
    Row {
        stuck: 2,
        ..Row::of(1_000_000)
    },
    Row {
        filtered: 1,
        ..Row::of(1_000_000)
    },
    Row {
        clients: 100,
        meant: 10_000,
        ..Row::of(10_000)
    },
];
/// Rows of the second table.
const LATENCIES: [Row; 3] = [
    Row::late(Way::Exits, 1),
    Row::late(Way::Records, 1),
    Row::late(Way::Exits, 100),
];
/// Fraction of the target that is sufficient, because the beginning and the end of a measurement are cut off.
const ALL: f64 = 0.99;
/// Limits of the median and the 99th percentile of the time to a client, in microseconds.
const P50: u64 = 5_000;
const P99: u64 = 20_000;
/// Maximum time that a row may take beyond the time in which its events are made.
const PATIENCE: Duration = Duration::from_secs(60);
const USAGE: &str = "usage: event_path [SECONDS|--smoke]";
/// Filter that selects one event in ten.
const FILTER: &str = "tgid == 1234 && (pid == 1234 || comm == \"nobody\")";

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        [] => tables(5000),
        ["--smoke"] => tables(200),
        [seconds] => tables(1000 * seconds.parse::<u64>().context(USAGE)?),
        ["row", table, number, ms] => row(find(table, number)?, *table == "latency", ms.parse()?),
        ["client", socket, count] => client(socket, "", count.parse()?),
        ["filtered", socket, count] => client(socket, FILTER, count.parse()?),
        ["stuck", socket, count] => stuck(socket, count.parse()?),
        _ => bail!(USAGE),
    }
}

fn find(table: &str, number: &str) -> Result<Row> {
    let rows: &[Row] = match table {
        "rates" => &RATES,
        _ => &LATENCIES,
    };
    let number: usize = number.parse()?;
    rows.get(number).copied().context("no such row")
}

fn tables(milliseconds: u64) -> Result<()> {
    println!(
        "{:>10} {:>7} {:>6} {:>8} {:>10} {:>8} {:>10} {:>7} {:>7} {:>9} {:>10} {:>10} {:>7}",
        "made/s",
        "clients",
        "stuck",
        "filtered",
        "events/s",
        "MB/s",
        "dropped",
        "server",
        "client",
        "us/event",
        "server MiB",
        "client MiB",
        "verdict"
    );
    rows("rates", RATES.len(), milliseconds)?;
    println!(
        "\n{:>10} {:>7} {:>8} {:>8} {:>8} {:>8} {:>10} {:>7}",
        "made/s", "clients", "by", "p50 ms", "p99 ms", "max ms", "dropped", "verdict"
    );
    rows("latency", LATENCIES.len(), milliseconds)
}

/// Measures each row in a process of its own, so that the row has its own peak of memory.
fn rows(table: &str, count: usize, milliseconds: u64) -> Result<()> {
    for number in 0..count {
        let arguments = [number.to_string(), milliseconds.to_string()];
        let mut child = own(&["row", table]).args(arguments).spawn()?;
        let limit = Instant::now() + Duration::from_millis(milliseconds) + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() > limit {
                // The clients of the row end with it.
                child.kill()?;
                child.wait()?;
                bail!("row {number} of {table} did not end");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        ensure!(status.success(), "a row could not be measured");
    }
    Ok(())
}

fn own(arguments: &[&str]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(arguments);
    command
}

/// Runs the server and the clients of a row, and prints the row.
fn row(row: Row, latency: bool, milliseconds: u64) -> Result<()> {
    end_with_parent()?;
    let all = row.rate * milliseconds / 1000;
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

    let stuck = Peer::some("stuck", socket, row.stuck)?;
    let filtered = Peer::some("filtered", socket, row.filtered)?;
    let mut clients = Peer::some("client", socket, row.clients)?.context("no client")?;
    let (before, start) = (cpu_microseconds()?, Instant::now());
    let limit = Duration::from_millis(milliseconds) + PATIENCE / 2;
    made::make(row.way, row.rate, all, limit, start, sink)?;
    let got = clients.got()?;
    let mut client_cpu = got.cpu_microseconds;
    let cpu = cpu_microseconds()? - before;
    let wall = start.elapsed();
    ensure!(
        got.events + got.dropped == all * row.clients,
        "events are missing: {got:?}"
    );
    if let Some(mut filtered) = filtered {
        let some = filtered.got()?;
        client_cpu += some.cpu_microseconds;
        let wanted = all.div_ceil(THREADS) * row.filtered;
        ensure!(
            some.events + some.dropped == wanted,
            "events are missing behind a filter: {some:?}"
        );
    }
    drop((stuck, clients, stop));
    runtime.block_on(serving)??;

    let milliseconds = |microseconds: u64| float(microseconds) / 1000.0;
    if latency {
        println!(
            "{:>10} {:>7} {:>8} {:>8.2} {:>8.2} {:>8.2} {:>10} {:>7}",
            row.rate,
            row.clients,
            format!("{:?}", row.way).to_lowercase(),
            milliseconds(got.p50),
            milliseconds(got.p99),
            milliseconds(got.max),
            got.dropped,
            verdict(got.p50 <= P50 && got.p99 <= P99),
        );
        return Ok(());
    }
    let second = float(got.nanoseconds) / 1e9 * float(row.clients);
    let wall = wall.as_secs_f64() * 1e6;
    let arrived = float(got.events) / second;
    let verdict = match row.meant {
        0 => "-",
        // If all events are to arrive, none may be dropped.
        meant => verdict(arrived >= ALL * float(meant) && (got.dropped == 0 || meant < row.rate)),
    };
    println!(
        "{:>10} {:>7} {:>6} {:>8} {:>10.0} {:>8.1} {:>10} {:>7.2} {:>7.2} {:>9.2} {:>10.1} {:>10.1} {:>7}",
        row.rate,
        row.clients,
        row.stuck,
        row.filtered,
        arrived,
        float(got.bytes) / second / 1e6,
        got.dropped,
        float(cpu) / wall,
        float(client_cpu) / wall,
        float(cpu + client_cpu) / float(got.events),
        float(peak_kibibytes()?) / 1024.0,
        float(got.kibibytes) / 1024.0,
        verdict,
    );
    Ok(())
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}

/// A process of this program with clients.
struct Peer {
    child: Child,
    says: BufReader<std::process::ChildStdout>,
}

impl Peer {
    /// Starts a process with `count` clients and waits until they have subscribed; `None` if `count` is 0.
    fn some(kind: &str, socket: &str, count: u64) -> Result<Option<Self>> {
        if count == 0 {
            return Ok(None);
        }
        let mut child = own(&[kind, socket, &count.to_string()])
            .stdout(Stdio::piped())
            .spawn()?;
        let says = child.stdout.take().context("no output")?;
        let mut peer = Self {
            child,
            says: BufReader::new(says),
        };
        ensure!(peer.line()? == "subscribed", "a client did not subscribe");
        Ok(Some(peer))
    }

    /// Waits for the results that the process prints at its end, and returns them.
    fn got(&mut self) -> Result<Got> {
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("the client said: {line}"))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.says.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // No effect on a process that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Converts a number to floating point. Ignores the lowest 20 bits of a number above `u32::MAX`.
fn float(number: u64) -> f64 {
    u32::try_from(number).map_or_else(
        |_| f64::from(u32::try_from(number >> 20).unwrap_or(u32::MAX)) * f64::from(1 << 20),
        f64::from,
    )
}
