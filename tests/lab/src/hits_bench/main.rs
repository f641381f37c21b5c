//! `hits-bench`: measures the cost of one hit, for each mechanism, for the guest's own kprobes, and for gdb.
//!
//! Runs inside a rig, started by `cargo lab bench hits`. One guest under hvprobe makes the same system call in a
//! loop, all in one boot: without probes, with its own kprobe and kretprobe events, with each of hvprobe's
//! mechanisms at the function of the call, and with arguments and filters. Another guest, under QEMU, runs into a
//! gdb breakpoint. The cost of the bare loop is subtracted from that of every loop with probes. In the first guest
//! a program that does little but system calls also runs with and without a probe on its path.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Parser as _;

mod exits;
mod gdb;
mod goals;
mod guest;
mod measure;
mod options;
mod ours;
mod qemu;
mod slowdown;
mod subjects;
mod table;
mod targets;

use measure::progress;
use options::Options;
use ours::{EMULATED, Machine, Work};
use subjects::{BUSY_CALL, BUSY_FUNCTION, FUNCTION, GDB, OWN_FTRACE};
use table::Unit;

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
    let mut rows = measure::hits(options, &mut machine)?;
    let busy = Work {
        call: BUSY_CALL,
        calls: options.calls,
        function: BUSY_FUNCTION,
        recorded: "",
    };
    let place = measure::optimizable(&machine)?;
    rows.extend(measure::jumps(options, &mut machine, &busy, place)?);
    progress("a program with and without probes on its path");
    let ways = slowdown::measure(&mut machine, &busy, options.rounds)?;
    drop(machine);
    let mut gdb_by = "none";
    if options.gdb_hits > 1 {
        progress(GDB);
        let (row, accelerator) = measure::gdb(options, per_microsecond)?;
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
    if let Some(number) = options.counted_as("foreign") {
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
    print!("{}", targets::render(&goals::all(options, &rows, &ways)));
    Ok(())
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
