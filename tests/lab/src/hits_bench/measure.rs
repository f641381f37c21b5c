//! Measures the loops. The row of each loop shows its cost beyond that of the loop without probes.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::exits;
use crate::guest::Ticks;
use crate::options::Options;
use crate::ours::{Loop, MECHANISMS, Machine, OPTIMIZED, WITH_STACK, Work};
use crate::qemu::{self, Accelerator};
use crate::subjects::{
    CALL, DEEP, DEEP_ARGUMENT, DEEP_CALL, DEEP_CALLS, DEEP_FUNCTION, EXIT, FETCHES, FUNCTION, GDB,
    ITS_ARGUMENT, OPTIMIZABLE, OWN, OWN_DEEP, OWN_OPTIMIZED, READER, SAME_PLACE, UNPROBED, USUAL,
};
use crate::table::Row;

/// Prints what is being measured. In a slow rig each measurement takes minutes.
pub(crate) fn progress(what: &str) {
    eprintln!("hits-bench: {what}");
}

/// Measures all ways to probe one function, and the loops for comparison with them.
pub(crate) fn hits(options: &Options, machine: &mut Machine) -> Result<Vec<Row>> {
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
            instructions: kind.and_then(|kind| options.counted_as(kind)),
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
pub(crate) fn optimizable(machine: &Machine) -> Result<&'static str> {
    let [first, second] = OPTIMIZABLE;
    match machine.try_probe(first) {
        Ok(()) => Ok(first),
        Err(_) => machine.try_probe(second).map(|()| second),
    }
}

/// Measures optimized probes (jumps) at `place`: the guest kernel's own kprobe, and hvprobe's.
pub(crate) fn jumps(
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
            // It is no error if the guest's kernel does not optimize its kprobe here.
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

/// Returns a loop with as many calls as `measured`, but no cost. Subtracting it gives the whole cost of `measured`.
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

/// Measures gdb's breakpoint, in a guest under QEMU. Also returns the accelerator with which QEMU ran the guest.
pub(crate) fn gdb(options: &Options, per_microsecond: f64) -> Result<(Row, Accelerator)> {
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

/// Divides `times` into batches of at least a hundredth of them, and returns the mean time of the fastest batch.
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
