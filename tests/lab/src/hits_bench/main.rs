//! `hits-bench`: measures the cost of one hit, by mechanism, beside the guest's own kprobes and gdb.
//!
//! Runs inside a rig, started by `cargo lab bench hits`. One guest under hvprobe makes the same system call in
//! a loop, all in one boot: without probes, with its own kprobe and kretprobe events, with each of hvprobe's
//! mechanisms on the function of the call, and with arguments and filters. Another guest, under QEMU, runs into
//! a gdb breakpoint. The cost of the bare loop is subtracted from that of every loop with probes. In the first
//! guest a program that does little but system calls also runs with and without a probe on its path.

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
mod slowdown;
mod table;
mod targets;

use guest::Ticks;
use ours::{EMULATED, Fetch, Loop, MECHANISMS, Machine, Mechanism, OPTIMIZED, WITH_STACK, Work};
use qemu::Accelerator;
use slowdown::Slower;
use table::{Row, Unit};
use targets::{Ratio, Runs, Target};

/// The system call of the loops; the function that each call enters once, and nothing else does; and an
/// instruction in the function that this one calls, which the guest's ftrace does not touch.
const CALL: &str = "getpgid";
const FUNCTION: &str = "__x64_sys_getpgid";
const PAST_FTRACE: &str = "do_getpgid+5";
/// Fetch argument for the function's parameter, the pointer to the registers that the call was made with.
const ITS_ARGUMENT: &str = "regs=%di";
/// Probes that record the default, the call's argument, which is four bytes of memory: name, kind of hit by
/// which the engine's instructions are counted, and mechanism.
const USUAL: [(&str, Option<&str>, Mechanism); 2] = [
    (
        "kprobe, emulated, the call's argument",
        Some("emulated-read"),
        EMULATED,
    ),
    ("kprobe, optimized, the call's argument", None, OPTIMIZED),
];
/// The call that is slowed down, and the function that is probed meanwhile.
const BUSY_CALL: &str = "copy";
const BUSY_FUNCTION: &str = "vfs_read";

/// Row of the minimum cost of a hit with an exit.
const EXIT: &str = "a bare exit (out)";
const UNPROBED: &str = "the call itself, unprobed";
/// Rows of the guest's own probes. [`OWN`] has the kind and place that the workload sets for each.
const OWN_FTRACE: &str = "guest's kprobe, by ftrace";
const OWN_INT3: &str = "guest's kprobe, by int3";
const OWN_RETURN: &str = "guest's kretprobe, by ftrace";
const OWN_BOTH: &str = "guest's kprobe + kretprobe, by ftrace";
const OWN_STACK: &str = "guest's kprobe, with the stack";
const OWN: [(&str, &str, &str); 5] = [
    (OWN_FTRACE, "p", FUNCTION),
    (OWN_INT3, "p", PAST_FTRACE),
    (OWN_RETURN, "r", FUNCTION),
    (OWN_BOTH, "pr", FUNCTION),
    (OWN_STACK, "s", FUNCTION),
];
/// Instructions on which a stock guest's kernel optimizes its kprobe: the one after the entry's nop, or after
/// ENDBR64 and nop where there is an ENDBR64. The kernel does not optimize at [`PAST_FTRACE`]: there is a call
/// among the five bytes.
const OPTIMIZABLE: [&str; 2] = ["__x64_sys_read+5", "__x64_sys_read+9"];
const OWN_OPTIMIZED: &str = "guest's kprobe, optimized (read)";
const SAME_PLACE: &str = "kprobe, optimized (read)";
/// Arguments and filters that need no exit, beside the guest's own events with the same words: four bytes
/// behind two pointers, a text of 64 characters, and a hit that is filtered out.
const READER: &str = "text";
const FETCHES: [Fetch; 3] = [
    Fetch {
        name: "kprobe, optimized, +0(+0(%sp)):u32",
        own: "guest's kprobe, +0(+0(%sp)):u32",
        words: "a=+0(+0(%sp)):u32",
    },
    Fetch {
        name: "kprobe, optimized, 64 characters",
        own: "guest's kprobe, 64 characters",
        words: "a=+0(+112(%di)):ustring",
    },
    Fetch {
        name: "kprobe, optimized, filtered out",
        own: "guest's kprobe, filtered out",
        words: "a=%di if a == 1",
    },
];
/// A call that goes deep, and a function at its bottom, sixteen frames down in 6.1.
const DEEP_CALL: &str = "epoll_wait";
const DEEP_FUNCTION: &str = "datagram_poll";
const DEEP_ARGUMENT: &str = "file=%di";
const OWN_DEEP: &str = "guest's kprobe, with a deep stack";
const DEEP: &str = "kprobe, optimized, with a deep stack";
/// Number of calls whose records with stacks fit into the ring. With one processor nothing reads the ring
/// meanwhile, and a lost record costs next to nothing.
const DEEP_CALLS: u32 = 1000;
/// Limit for a hit with a stack of sixteen frames, in instructions.
const DEEP_TICKS: f64 = 400.0;
const GDB: &str = "gdb's breakpoint in QEMU";

const RATIOS: [Ratio; 14] = [
    ratio(EMULATED.name, EXIT, 1.25),
    ratio("return probe", EMULATED.name, 1.75),
    ratio("kprobe + return probe", "return probe", 1.25),
    ratio(OPTIMIZED.name, OWN_FTRACE, 0.25),
    ratio(OPTIMIZED.name, OWN_INT3, 0.25),
    ratio(SAME_PLACE, OWN_OPTIMIZED, 1.0),
    ratio(WITH_STACK.name, OWN_STACK, 0.25),
    ratio(DEEP, OWN_DEEP, 0.25),
    ratio("return probe, optimized", OWN_RETURN, 0.35),
    ratio("kprobe + return probe, optimized", OWN_BOTH, 0.35),
    ratio(FETCHES[0].name, FETCHES[0].own, 0.25),
    ratio(FETCHES[1].name, FETCHES[1].own, 0.25),
    ratio(FETCHES[2].name, FETCHES[2].own, 0.25),
    ratio(EMULATED.name, GDB, 0.1),
];
const RUNS: [Runs; 12] = [
    runs(EMULATED.name, 1),
    runs("kprobe, boosted", 1),
    runs("kprobe, stepped", 2),
    runs("return probe", 1),
    runs("return probe, exit at the return", 2),
    runs(OPTIMIZED.name, 0),
    runs(WITH_STACK.name, 0),
    runs(DEEP, 0),
    runs("return probe, optimized", 0),
    runs(FETCHES[0].name, 0),
    runs(FETCHES[1].name, 0),
    runs(FETCHES[2].name, 0),
];
/// Limit for the engine's instructions of an emulated hit.
const INSTRUCTIONS: f64 = 1000.0;
/// Limit for the slowdown of a program by an optimized probe on its path, in percent.
const SLOWER: f64 = 5.0;

const fn ratio(of: &'static str, to: &'static str, at_most: f64) -> Ratio {
    Ratio { of, to, at_most }
}

const fn runs(of: &'static str, at_most: u32) -> Runs {
    Runs { of, at_most }
}

/// Measures what a hit costs and prints tables.
#[derive(Debug, Parser)]
struct Options {
    /// Calls in each loop
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..))]
    calls: u32,
    /// How often every loop is timed; the shortest times and the middle ones count
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Rounds of the comparison of a program with and without a probe on its path; 0 leaves it out
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// Hits of gdb's breakpoint; 0 leaves that out, which takes long where QEMU has to emulate
    #[arg(long, default_value_t = 200)]
    gdb_hits: u32,
    /// How long one answer of a guest's shell may take; an emulator inside an emulator is slow
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    patience: u64,
    /// The engine's instructions of a kind of hit, as counted elsewhere
    #[arg(long, value_name = "KIND=NUMBER", value_parser = counted)]
    instructions: Vec<(String, u32)>,
    /// The time stamp counter counts instructions here
    #[arg(long)]
    ticks_are_instructions: bool,
    /// Folder with the guest's `kernel` and `initrd.cpio`
    #[arg(long, default_value = "/guest")]
    guest: PathBuf,
}

impl Options {
    fn patience(&self) -> Duration {
        Duration::from_secs(self.patience)
    }
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
    let unit = if options.ticks_are_instructions {
        Unit::Instruction
    } else {
        Unit::Time { per_microsecond }
    };
    let mut machine = Machine::boot(&options.guest, options.patience())?;
    let mut rows = hits(options, &mut machine)?;
    let busy = Work {
        call: BUSY_CALL,
        calls: options.calls,
        function: BUSY_FUNCTION,
        recorded: "",
    };
    let place = optimizable(&machine)?;
    rows.extend(jumps(options, &mut machine, &busy, place)?);
    progress("a program with and without probes on its path");
    let ways = slowdown::measure(&mut machine, &busy, options.rounds)?;
    drop(machine);
    let mut gdb_by = "none";
    if options.gdb_hits > 1 {
        progress(GDB);
        let (row, accelerator) = gdb(options, per_microsecond)?;
        rows.push(row);
        gdb_by = accelerator.name();
    }

    let calls = options.calls;
    println!();
    println!("ticks: {}", meaning(unit));
    println!();
    println!(
        "what a hit on {FUNCTION} (where it says so, {place}) adds to a call, stock kernel, \
         1 vCPU, {} times {calls} calls in 100 batches; us and ratios are those of the fastest batch",
        options.repeats
    );
    println!(
        "instr: instructions of hvprobe's engine, in user space, counted on a synthetic guest; \
         gdb: QEMU's accelerator is {gdb_by}"
    );
    print!("{}", table::render(&rows, unit, EMULATED.name, OWN_FTRACE));
    if let Some(number) = counted_as(options, "foreign") {
        println!("an int3 of the guest's own: {number} instructions before it is given back");
    }
    if !ways.is_empty() {
        println!();
        println!(
            "what a probe on {BUSY_FUNCTION} costs a program that copies bytes from /dev/zero to \
             /dev/null: a read and a write each; {} rounds of {calls} copies in 100 batches with every \
             row, compared within their round by the fastest batch, by the middle one, which the host's \
             own interrupts are part of, and overall by all their time",
            options.rounds
        );
        print!("{}", slowdown::render(&ways, unit));
    }
    println!();
    print!("{}", targets::render(&all_targets(options, &rows, &ways)));
    Ok(())
}

/// Prints what is being measured; in a slow rig everything takes minutes.
fn progress(what: &str) {
    eprintln!("hits-bench: {what}");
}

/// Measures all ways to probe one function, and the loops that they are compared with.
fn hits(options: &Options, machine: &mut Machine) -> Result<Vec<Row>> {
    let work = Work {
        call: CALL,
        calls: options.calls,
        function: FUNCTION,
        recorded: ITS_ARGUMENT,
    };
    let usual = Work {
        recorded: "",
        ..work
    };
    let reading = Work {
        call: READER,
        ..work
    };
    let deep = Work {
        call: DEEP_CALL,
        calls: options.calls.min(DEEP_CALLS),
        function: DEEP_FUNCTION,
        recorded: DEEP_ARGUMENT,
    };
    let all = |machine: &mut Machine| -> Result<Vec<Loop>> {
        let mut loops = vec![machine.exit(options.calls)?, machine.bare(&work, None)?];
        for (name, probes, place) in OWN {
            progress(name);
            loops.push(machine.bare(&work, Some(&format!("{probes} {place}")))?);
        }
        for mechanism in &MECHANISMS {
            progress(mechanism.name);
            loops.push(machine.probed(&work, mechanism)?);
        }
        for (name, _, mechanism) in &USUAL {
            progress(name);
            loops.push(machine.probed(&usual, mechanism)?);
        }
        progress(READER);
        loops.push(machine.bare(&reading, None)?);
        for fetch in &FETCHES {
            progress(fetch.name);
            let own = format!("p '{FUNCTION} {}'", fetch.words);
            loops.push(machine.bare(&reading, Some(&own))?);
            loops.push(machine.fetched(&reading, fetch.words)?);
        }
        progress(DEEP);
        let own = format!("s {DEEP_FUNCTION}");
        loops.push(machine.bare(&deep, None)?);
        loops.push(machine.bare(&deep, Some(&own))?);
        loops.push(machine.probed(&deep, &WITH_STACK)?);
        Ok(loops)
    };
    let mut timed = Vec::new();
    for _ in 0..options.repeats {
        timed.push(all(machine)?);
    }
    progress("the same again, now counting exits and ioctls");
    machine.count(true)?;
    let counted = all(machine)?;
    machine.count(false)?;
    let mut loops = (0..).zip(&counted).filter_map(|(n, counted)| {
        let repeats = timed.iter().filter_map(|all| all.get(n));
        Some(Loop {
            ticks: Ticks::of_all(repeats.map(|timed| timed.ticks))?,
            counts: counted.counts,
        })
    });
    let exit = loops.next().context("nothing was measured")?;
    let base = loops.next().context("only an exit was measured")?;
    let mut rows = vec![
        difference(UNPROBED, &base, &nothing(&base)),
        difference(EXIT, &exit, &nothing(&exit)),
    ];
    let names = OWN.iter().map(|(name, ..)| (*name, None));
    let ours = MECHANISMS.iter().map(|it| (it.name, it.counted_as));
    let usual = USUAL.iter().map(|(name, kind, _)| (*name, *kind));
    for ((name, kind), measured) in names.chain(ours).chain(usual).zip(loops.by_ref()) {
        rows.push(Row {
            instructions: kind.and_then(|kind| counted_as(options, kind)),
            ..difference(name, &measured, &base)
        });
    }
    let fetches = FETCHES.iter().flat_map(|fetch| [fetch.own, fetch.name]);
    for names in [fetches.collect(), vec![OWN_DEEP, DEEP]] {
        let base = loops.next().context("nothing was read")?;
        for (name, measured) in names.into_iter().zip(loops.by_ref()) {
            rows.push(difference(name, &measured, &base));
        }
    }
    Ok(rows)
}

/// Returns which of the [`OPTIMIZABLE`] places can be probed in the guest's kernel.
fn optimizable(machine: &Machine) -> Result<&'static str> {
    let [first, second] = OPTIMIZABLE;
    match machine.try_probe(first) {
        Ok(()) => Ok(first),
        Err(_) => machine.try_probe(second).map(|()| second),
    }
}

/// Measures the kernel's jump and ours, both at `place`.
fn jumps(
    options: &Options,
    machine: &mut Machine,
    busy: &Work,
    place: &'static str,
) -> Result<Vec<Row>> {
    let work = Work {
        function: place,
        ..*busy
    };
    let own = format!("o {place}");
    let (mut bases, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.repeats {
        progress("jumps");
        bases.push(machine.bare(&work, None)?.ticks);
        ours.push(machine.probed(&work, &OPTIMIZED)?.ticks);
        match machine.bare(&work, Some(&own)) {
            Ok(own) => theirs.push(own.ticks),
            // The guest's kernel need not optimize its kprobe.
            Err(error) => progress(&format!("without {OWN_OPTIMIZED}: {error:#}")),
        }
    }
    let base = Ticks::of_all(bases.into_iter()).context("nothing was measured")?;
    let rows = [(OWN_OPTIMIZED, theirs), (SAME_PLACE, ours)];
    let rows = rows.into_iter().filter_map(|(name, loops)| {
        let ticks = Ticks::of_all(loops.into_iter())?;
        Some(Row {
            name: name.to_owned(),
            median: Some(ticks.median - base.median),
            fastest: ticks.fastest - base.fastest,
            exits: None,
            instructions: None,
        })
    });
    Ok(rows.collect())
}

fn counted_as(options: &Options, kind: &str) -> Option<u32> {
    let mut all = options.instructions.iter();
    all.find_map(|(counted, number)| (counted == kind).then_some(*number))
}

fn all_targets(options: &Options, rows: &[Row], ways: &[Slower]) -> Vec<Target> {
    let slower = ways.iter().find(|way| way.name == OPTIMIZED.name);
    let mut targets = vec![Target {
        what: format!(
            "{} on {BUSY_FUNCTION}: copying slower by percent",
            OPTIMIZED.name
        ),
        at_most: SLOWER,
        measured: slower.map(|way| way.percent),
    }];
    targets.extend(RATIOS.iter().map(|ratio| ratio.target(rows)));
    targets.push(Target {
        what: format!("{}: instructions of the engine", EMULATED.name),
        at_most: INSTRUCTIONS,
        measured: counted_as(options, "emulated").map(f64::from),
    });
    if options.ticks_are_instructions {
        targets.push(Target {
            what: format!("{DEEP}: instructions"),
            at_most: DEEP_TICKS,
            measured: table::named(rows, DEEP).map(|row| row.fastest),
        });
    }
    targets.extend(RUNS.iter().map(|runs| runs.target(rows)));
    targets.push(targets::ioctls(rows));
    targets
}

fn meaning(unit: Unit) -> String {
    let guest = "of the guest's time stamp counter, read by the guest before and after each batch";
    match unit {
        Unit::Time { per_microsecond } => {
            format!("{guest}; {per_microsecond:.0} are a microsecond on the wall")
        }
        Unit::Instruction => {
            format!("{guest}; each is an instruction of the whole machine, none is time")
        }
    }
}

/// Returns a loop of as many calls as `measured`, at no cost.
fn nothing(measured: &Loop) -> Loop {
    let mut nothing = *measured;
    (nothing.ticks.fastest, nothing.ticks.median) = (0.0, 0.0);
    nothing.counts = exits::Counts::default();
    nothing
}

/// Returns the cost of `measured` beyond that of `base`, per call.
fn difference(name: &str, measured: &Loop, base: &Loop) -> Row {
    let per_call = |of: fn(&Loop) -> u64| {
        let more = of(measured).saturating_sub(of(base));
        u32::try_from(more).map_or(f64::INFINITY, f64::from) / f64::from(measured.ticks.calls)
    };
    Row {
        name: name.to_owned(),
        median: Some(measured.ticks.median - base.ticks.median),
        fastest: measured.ticks.fastest - base.ticks.fastest,
        exits: Some([
            per_call(|of| of.counts.exits),
            per_call(|of| of.counts.runs),
            per_call(|of| of.counts.other_ioctls),
        ]),
        instructions: None,
    }
}

fn gdb(options: &Options, per_microsecond: f64) -> Result<(Row, Accelerator)> {
    let doctor = Command::new("hvprobe")
        .args(["doctor", "--json"])
        .output()
        .context("cannot start hvprobe")?;
    let accelerator = Accelerator::for_breakpoints(&String::from_utf8_lossy(&doctor.stdout));
    let hits = options.gdb_hits;
    let patience = options.patience();
    let times = qemu::breakpoint(accelerator, &options.guest, FUNCTION, CALL, hits, patience)?;
    let row = Row {
        name: GDB.to_owned(),
        median: None,
        fastest: fastest_batch(&times).as_secs_f64() * 1e6 * per_microsecond,
        exits: None,
        instructions: None,
    };
    Ok((row, accelerator))
}

/// Parses `KIND=NUMBER`.
fn counted(text: &str) -> Result<(String, u32)> {
    let (kind, number) = text.split_once('=').context("no `=`")?;
    Ok((kind.to_owned(), number.parse()?))
}

/// Returns the shortest mean time of batches, each of which is at least a hundredth of `times`.
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

/// Measures the rate of the rig's time stamp counter, which is also that of its guests.
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

#[cfg(test)]
mod tests {
    use super::*;

    use hvprobe_lab::documented;

    #[test]
    fn the_page_of_figures_shows_these_tables() {
        let page = documented::page(documented::PERFORMANCE).unwrap();
        let shown = &documented::headings(&page, "boot")["hits"];
        let unit = Unit::Instruction;
        let tables = [
            table::render(&[], unit, EMULATED.name, OWN_FTRACE),
            slowdown::render(&[], unit),
            targets::render(&[]),
        ];
        let tables = tables.concat();
        let printed: Vec<_> = tables.lines().filter_map(documented::heading).collect();
        assert_eq!(*shown, printed);
    }
}
