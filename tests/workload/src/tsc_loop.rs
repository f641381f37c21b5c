//! Measures the cost of a call in ticks of the time stamp counter.
//!
//! Batches are short, so that many of them pass without an interrupt. The minimum is the cost of the call
//! alone, and the median the cost of a usual call.

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::error::Error;
use std::io;

use crate::calls::Call;
use crate::kprobe_event::{OwnEvent, Profile, Trigger};
use crate::sys;

const BATCHES: u64 = 100;

/// Makes about `count` calls in a hundred batches, on one CPU. Prints the number of calls, and the ticks per
/// call in the fastest batch, in the median one, and in all of them.
pub(crate) fn run(call: Call, count: u64) -> Result<(), Box<dyn Error>> {
    sys::pin(0, 0)?;
    let size = count.div_ceil(BATCHES).max(1);
    let mut batches = Vec::new();
    batch(call, size)?;
    for _ in 0..BATCHES {
        batches.push(batch(call, size)?);
    }
    batches.sort_unstable();
    let per =
        |ticks: u64, calls: u64| format!("{}.{:02}", ticks / calls, ticks % calls * 100 / calls);
    println!("calls: {}", (BATCHES + 1) * size);
    println!(
        "ticks: {} {} {}",
        per(batches[0], size),
        per(batches[batches.len() / 2], size),
        per(batches.iter().sum(), BATCHES * size),
    );
    Ok(())
}

/// Does the same as [`run`], with the guest's own probes at `place`: a symbol and fetch arguments, optionally
/// followed by `if FILTER`. `probes` has a letter for each probe: `p` for a kprobe, `r` for a kretprobe, `o` for a
/// kprobe whose int3 the kernel has replaced by a jump, and `s` for a kprobe that also records the stack.
pub(crate) fn run_probed(
    probes: &str,
    place: &str,
    call: Call,
    count: u64,
) -> Result<(), Box<dyn Error>> {
    let (place, filter) = match place.split_once(" if ") {
        Some((place, filter)) => (place, Some(filter)),
        None => (place, None),
    };
    let events: Vec<OwnEvent> = probes
        .chars()
        .map(|letter| {
            let trigger = match letter {
                'p' | 's' => Trigger::Entry,
                'o' => Trigger::Optimized,
                'r' => Trigger::Return,
                _ => return Err(format!("a probe is p, r, o or s, not {letter}").into()),
            };
            let mut event = OwnEvent::set(trigger, place)?;
            if letter == 's' {
                event.record_stacks(true)?;
            }
            Ok(event)
        })
        .collect::<Result<_, Box<dyn Error>>>()?;
    for event in &events {
        if let Some(filter) = filter {
            event.filter(filter)?;
        }
        event.enable(true)?;
        event.settle()?;
    }
    run(call, count)?;
    for event in &events {
        event.enable(false)?;
        let Profile { hits, misses } = event.profile()?;
        println!("kprobe_profile: {hits} {misses}");
    }
    Ok(())
}

/// Returns the ticks that `size` calls take.
fn batch(call: Call, size: u64) -> io::Result<u64> {
    let start = now();
    for _ in 0..size {
        call.make()?;
    }
    Ok(now().wrapping_sub(start))
}

fn now() -> u64 {
    // SAFETY: every x86-64 processor has both instructions.
    unsafe {
        _mm_lfence();
        let ticks = _rdtsc();
        _mm_lfence();
        ticks
    }
}
