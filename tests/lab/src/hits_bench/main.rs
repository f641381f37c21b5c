//! `hits-bench`: what one hit costs, by mechanism, beside the guest's own kprobes and gdb.
//!
//! Runs inside a rig, started by `cargo lab bench hits`. One guest under hvprobe makes the same
//! system call in a loop: without probes, with its own kprobe and kretprobe events, and with each of
//! hvprobe's mechanisms on the function behind the call, all in one boot. Another, under QEMU, runs
//! into a breakpoint of a gdb. What the bare loop costs is taken off everything.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;

mod exits;
mod gdb;
mod guest;
mod ours;
mod qemu;
mod table;

use ours::{Loop, MECHANISMS, Machine};
use qemu::Accelerator;
use table::Row;

/// The call of the loops, the function entered once by each and by nothing else, and an instruction
/// in the function it calls that the guest's ftrace has no business with.
const CALL: &str = "getpgid";
const FUNCTION: &str = "__x64_sys_getpgid";
/// The row of what every hit with an exit takes at least.
const EXIT: &str = "a bare exit (out)";
const PAST_FTRACE: &str = "do_getpgid+5";

/// Measures what a hit costs and prints a table.
#[derive(Debug, Parser)]
struct Options {
    /// Calls in each loop
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..))]
    calls: u32,
    /// Hits of gdb's breakpoint; 0 leaves that out, which takes long where QEMU has to emulate
    #[arg(long, default_value_t = 200)]
    gdb_hits: u32,
    /// The engine's instructions of a kind of hit, as counted elsewhere
    #[arg(long, value_name = "KIND=NUMBER", value_parser = counted)]
    instructions: Vec<(String, u32)>,
    /// Folder with the guest's `kernel` and `initrd.cpio`
    #[arg(long, default_value = "/guest")]
    guest: PathBuf,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hits-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    if !Path::new("/dev/kvm").exists() {
        bail!("there is no /dev/kvm");
    }
    let per_microsecond = ticks_per_microsecond();
    let mut rows = Vec::new();
    let mut machine = Machine::boot(&options.guest, FUNCTION, CALL, options.calls)?;
    let guests = [
        ("guest's kprobe, by ftrace", format!("p {FUNCTION}")),
        ("guest's kprobe, by int3", format!("p {PAST_FTRACE}")),
        ("guest's kretprobe, by ftrace", format!("r {FUNCTION}")),
        (
            "guest's kprobe + kretprobe, by ftrace",
            format!("pr {FUNCTION}"),
        ),
    ];
    let all = |machine: &mut Machine| -> Result<Vec<Loop>> {
        let mut loops = vec![machine.exit()?, machine.bare(None)?];
        for (_, own) in &guests {
            loops.push(machine.bare(Some(own))?);
        }
        for mechanism in &MECHANISMS {
            loops.push(machine.probed(mechanism)?);
        }
        Ok(loops)
    };
    let timed = all(&mut machine)?;
    machine.count()?;
    let counted = all(&mut machine)?;
    let mut loops = timed.iter().zip(&counted).map(|(timed, counted)| Loop {
        ticks: timed.ticks,
        counts: counted.counts,
    });
    let exit = loops.next().context("nothing was measured")?;
    let base = loops.next().context("only an exit was measured")?;
    rows.push(difference(EXIT, &exit, &nothing(&exit), per_microsecond));
    let names = guests.iter().map(|(name, _)| (*name, None));
    let ours = MECHANISMS.iter().map(|it| (it.name, it.counted_as));
    let instructions = |kind: &str| {
        let mut all = options.instructions.iter();
        all.find_map(|(counted, number)| (counted == kind).then_some(*number))
    };
    for ((name, kind), measured) in names.chain(ours).zip(loops) {
        rows.push(Row {
            instructions: kind.and_then(instructions),
            ..difference(name, &measured, &base, per_microsecond)
        });
    }
    drop(machine);
    if options.gdb_hits > 1 {
        rows.push(gdb(options)?);
    }
    println!();
    println!(
        "what a hit on {FUNCTION} adds, stock kernel, 1 vCPU, {} calls in 100 batches; us and ratios \
         are those of the fastest batch",
        options.calls
    );
    println!(
        "instr: instructions of hvprobe's engine, in user space, counted on a synthetic guest"
    );
    println!(
        "bare call: {} ticks; {per_microsecond:.0} ticks a us",
        base.ticks.median
    );
    print!("{}", table::render(&rows, MECHANISMS[0].name, guests[0].0));
    for (of, to) in [
        ("kprobe, emulated", EXIT),
        ("return probe", "kprobe, emulated"),
        ("kprobe + return probe", "return probe"),
        ("kprobe, optimized", guests[0].0),
        ("kprobe, optimized", guests[1].0),
        ("return probe, optimized", guests[2].0),
        ("kprobe + return probe, optimized", guests[3].0),
    ] {
        if let Some(ratio) = table::ratio(&rows, of, to) {
            println!("{of} / {to}: {ratio:.2}");
        }
    }
    if let Some(number) = instructions("foreign") {
        println!("an int3 of the guest's own: {number} instructions before it is given back");
    }
    Ok(())
}

/// What as many calls of nothing take.
fn nothing(measured: &Loop) -> Loop {
    let mut nothing = *measured;
    (nothing.ticks.fastest, nothing.ticks.median) = (0.0, 0.0);
    nothing.counts = exits::Counts::default();
    nothing
}

/// What `measured` took more than `base`, per call.
fn difference(name: &str, measured: &Loop, base: &Loop, per_microsecond: f64) -> Row {
    let fastest = measured.ticks.fastest - base.ticks.fastest;
    let median = measured.ticks.median - base.ticks.median;
    let per_call = |of: fn(&Loop) -> u64| {
        let more = of(measured).saturating_sub(of(base));
        u32::try_from(more).map_or(f64::INFINITY, f64::from) / f64::from(measured.ticks.calls)
    };
    Row {
        name: name.to_owned(),
        ticks: Some((fastest, median)),
        microseconds: fastest / per_microsecond,
        exits: Some([
            per_call(|of| of.counts.exits),
            per_call(|of| of.counts.runs),
            per_call(|of| of.counts.other_ioctls),
        ]),
        instructions: None,
    }
}

fn gdb(options: &Options) -> Result<Row> {
    let doctor = Command::new("hvprobe")
        .args(["doctor", "--json"])
        .output()
        .context("cannot start hvprobe")?;
    let accelerator = Accelerator::for_breakpoints(&String::from_utf8_lossy(&doctor.stdout));
    let hits = options.gdb_hits;
    let times = qemu::breakpoint(accelerator, &options.guest, FUNCTION, CALL, hits)?;
    Ok(Row {
        name: format!("gdb's breakpoint in QEMU ({})", accelerator.name()),
        ticks: None,
        microseconds: fastest_batch(&times).as_secs_f64() * 1e6,
        exits: None,
        instructions: None,
    })
}

/// Reads `KIND=NUMBER`.
fn counted(text: &str) -> Result<(String, u32)> {
    let (kind, number) = text.split_once('=').context("no `=`")?;
    Ok((kind.to_owned(), number.parse()?))
}

/// The shortest mean time in batches of at least a hundredth.
fn fastest_batch(times: &[Duration]) -> Duration {
    let mean = |batch: &[Duration]| {
        let number = u32::try_from(batch.len()).unwrap_or(u32::MAX);
        batch.iter().sum::<Duration>() / number.max(1)
    };
    times
        .chunks_exact(times.len().div_ceil(100).max(1))
        .map(mean)
        .min()
        .unwrap_or_default()
}

/// The rate of the rig's time stamp counter, which its guests have, too.
fn ticks_per_microsecond() -> f64 {
    // SAFETY: every x86-64 processor has the instruction.
    let now = || unsafe { std::arch::x86_64::_rdtsc() };
    let (clock, start) = (Instant::now(), now());
    while clock.elapsed().as_millis() < 50 {
        std::hint::spin_loop();
    }
    let ticks = now().wrapping_sub(start);
    let microseconds = clock.elapsed().as_secs_f64() * 1e6;
    u32::try_from(ticks).map_or(f64::INFINITY, f64::from) / microseconds
}
