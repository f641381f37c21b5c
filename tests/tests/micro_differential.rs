//! The instruction policy against the processor: instructions of the stock kernel, each in place
//! and through every mechanism.
//!
//! `HVPROBE_DIFFERENTIAL_SEED` replays a seed. `HVPROBE_DIFFERENTIAL=all` tries far more, and
//! `HVPROBE_DIFFERENTIAL=0xffffffff…` one instruction, in many states.

use std::time::Instant;

use hvprobe_arch::Gva;
use hvprobe_tests::differential::bench::Bench;
use hvprobe_tests::differential::campaign::{Extent, Sample, Tally};
use hvprobe_tests::differential::coverage::Coverage;
use hvprobe_tests::differential::text::{Text, stock_kernel};

/// What every run tries.
const USUAL: Extent = Extent {
    per_form: 1,
    more: 2000,
    states: 4,
};
/// What `all` tries.
const ALL: Extent = Extent {
    per_form: 24,
    more: 50_000,
    states: 12,
};
/// States for a single instruction.
const STATES_OF_ONE: u64 = 500;

/// The stock kernel, or `None` and a line that says so.
fn kernel() -> Option<Text> {
    let Some(path) = stock_kernel() else {
        eprintln!("skipped: there is no stock kernel here (cargo lab setup)");
        return None;
    };
    match Text::open(&path) {
        Ok(text) => Some(text),
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

#[test]
fn nearly_all_of_the_kernel_takes_probes() {
    let Some(text) = kernel() else { return };
    let coverage = Coverage::of(&text);
    println!("{coverage}");
    assert!(
        coverage.refuses_at_most(5),
        "more than 0.5 % are refused:\n{coverage}"
    );
    assert!(
        coverage.total() > 1_000_000,
        "the text was not found:\n{coverage}"
    );
}

#[test]
fn every_mechanism_does_what_the_instruction_does_in_place() {
    let Some(text) = kernel() else { return };
    let mut bench = match Bench::new(&text) {
        Ok(bench) => bench,
        Err(error) => {
            eprintln!("skipped: no bench on this host: {error}");
            return;
        }
    };
    let seed = match std::env::var("HVPROBE_DIFFERENTIAL_SEED") {
        Ok(seed) => seed.parse().expect("a seed is a number"),
        Err(_) => rand_seed(),
    };
    println!("HVPROBE_DIFFERENTIAL_SEED={seed}");
    let wanted = std::env::var("HVPROBE_DIFFERENTIAL").unwrap_or_default();
    let begun = Instant::now();
    let (sample, states) = match wanted.strip_prefix("0x") {
        Some(at) => (one(&text, at), STATES_OF_ONE),
        None => {
            let extent = if wanted == "all" { ALL } else { USUAL };
            (Sample::choose(&text, seed, extent), extent.states)
        }
    };
    let chosen = begun.elapsed();
    let tally = Tally::run(&mut bench, &text, &sample.sites, seed, states);
    println!(
        "chosen from {} instructions of {} forms in {chosen:.1?}; all took {:.1?}",
        sample.among,
        sample.forms,
        begun.elapsed()
    );
    println!("{tally}");
    for difference in &tally.differences {
        println!("{difference}");
    }
    assert_eq!(tally.different, 0, "replay with HVPROBE_DIFFERENTIAL_SEED={seed}");
}

/// The instruction at this address alone.
fn one(text: &Text, at: &str) -> Sample {
    let at = Gva(u64::from_str_radix(at, 16).expect("an address is hexadecimal"));
    let mut sites = Vec::new();
    text.for_each(|site| {
        if site.at == at {
            sites.push(*site);
        }
    });
    assert!(!sites.is_empty(), "no instruction can be probed at {at}");
    Sample {
        sites,
        among: 1,
        forms: 1,
    }
}

/// A seed that differs from run to run.
fn rand_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::from(now.subsec_nanos()) ^ now.as_secs())
}
