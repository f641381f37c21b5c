//! Compares the instruction policy with the processor: runs instructions of the stock kernel in place and with
//! every mechanism.
//!
//! `HVPROBE_DIFFERENTIAL_SEED` sets the seed of a run, to repeat it. `HVPROBE_DIFFERENTIAL=all` tries far more
//! instructions and states, and `HVPROBE_DIFFERENTIAL=0xffffffff…` tries the instruction at that address with many
//! states.

use std::collections::BTreeMap;
use std::time::Instant;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Displaced, classify};
use hvprobe_tests::differential::bench::{Bench, BenchError};
use hvprobe_tests::differential::campaign::{Extent, Sample, Tally};
use hvprobe_tests::differential::state::case;
use hvprobe_tests::differential::text::{Site, Text, stock_kernel};
use hvprobe_tests::differential::trial::{self, Mechanism, Verdict};
use hvprobe_tests::rig::is_short;
use iced_x86::{Decoder, DecoderOptions};

/// Default extent on a processor, or a fast emulation of one.
const USUAL: Extent = Extent {
    one_in: 1,
    per_form: 3,
    more: 6000,
    states: 6,
};
/// Extent in an emulated machine.
const EMULATED: Extent = Extent {
    one_in: 1,
    per_form: 1,
    more: 2000,
    states: 4,
};
/// Extent of a short run (`cargo lab test --ci`).
const SHORT: Extent = Extent {
    one_in: 4,
    more: 0,
    states: 2,
    ..EMULATED
};
/// Extent with `HVPROBE_DIFFERENTIAL=all`.
const ALL: Extent = Extent {
    one_in: 1,
    per_form: 24,
    more: 50_000,
    states: 12,
};
/// Number of states for a single instruction.
const STATES_OF_ONE: u64 = 500;

/// Returns the stock kernel. Without one, prints that the test is skipped and returns `None`.
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

/// Returns a bench for the kernel `text`. Without KVM, prints that the test is skipped and returns `None`.
fn bench(text: &Text) -> Option<Bench> {
    match Bench::new(text) {
        Ok(bench) => Some(bench),
        Err(BenchError::Kvm("open /dev/kvm", error)) => {
            eprintln!("skipped: there is no KVM here: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn every_mechanism_does_what_the_instruction_does_in_place() {
    let Some(text) = kernel() else { return };
    let Some(mut bench) = bench(&text) else {
        return;
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
            let extent = match std::env::var("HVPROBE_RIG").as_deref() {
                _ if wanted == "all" => ALL,
                _ if is_short() => SHORT,
                Ok("tcg" | "bochs") => EMULATED,
                _ => USUAL,
            };
            (Sample::choose(&text, seed, extent), extent.states)
        }
    };
    println!(
        "{} of {} instructions, of {} forms, chosen in {:.1?}",
        sample.sites.len(),
        sample.among,
        sample.forms,
        begun.elapsed()
    );
    let tally = Tally::run(&mut bench, &text, &sample.sites, seed, states);
    println!("tried in {:.1?} all in all", begun.elapsed());
    println!("{tally}");
    for difference in &tally.differences {
        println!("{difference}");
    }
    assert_eq!(
        tally.different, 0,
        "replay with HVPROBE_DIFFERENTIAL_SEED={seed}"
    );
    // A small sample need not contain all of these forms and ends.
    if sample.forms > 500 {
        assert!(
            tally.forms.len() * 10 >= sample.forms * 9,
            "few of {} forms could be run:\n{tally}",
            sample.forms
        );
        for end in [
            "went on",
            "branched",
            "exception 0",
            "exception 13",
            "exception 14",
        ] {
            assert!(tally.ends.contains_key(end), "no run {end}:\n{tally}");
        }
    }
}

#[test]
fn an_instruction_that_is_not_the_one_in_place_is_noticed() {
    let Some(text) = kernel() else { return };
    let Some(mut bench) = bench(&text) else {
        return;
    };
    // Fixed, because the number of changes without effect depends on the sample.
    const SEED: u64 = 1;
    let extent = Extent {
        one_in: 8,
        per_form: 0,
        more: 400,
        states: 1,
    };
    let sample = Sample::choose(&text, SEED, extent);
    let host = bench.host(&text);
    let mut noticed = BTreeMap::new();
    let mut tried = 0;
    for site in &sample.sites {
        let Some(other) = neighbour(&text, site) else {
            continue;
        };
        let Ok(case) = case(site, &host, SEED, 0) else {
            continue;
        };
        match trial::run(&mut bench, &other, &case) {
            Verdict::NotRun(_) => {}
            Verdict::Same { .. } => tried += 1,
            Verdict::Different(difference) => {
                tried += 1;
                *noticed.entry(difference.mechanism).or_insert(0_u32) += 1;
            }
        }
    }
    println!("{noticed:?} of {tried} changed instructions noticed");
    let all: u32 = noticed.values().sum();
    assert!(tried > 200, "{tried}");
    // Some changes have no effect with the one state tried: a jump that is not taken, a flag that is set
    // anyway.
    assert!(all * 10 > tried * 7, "{noticed:?} of {tried}");
    for mechanism in [Mechanism::Emulated, Mechanism::Boosted] {
        assert!(noticed.contains_key(&Some(mechanism)), "{noticed:?}");
    }
}

/// Returns an instruction that differs from the one at `site` in one bit of its operands.
fn neighbour(text: &Text, site: &Site) -> Option<Displaced> {
    let mut code = text.code(site.at).to_vec();
    for index in (1..site.instruction.len()).rev() {
        for bit in [0x08, 0x01] {
            code[index] ^= bit;
            let mut decoder = Decoder::with_ip(64, &code, site.at.0, DecoderOptions::NONE);
            let other = decoder.decode();
            let is_like = other.code() == site.instruction.code()
                && other.len() == site.instruction.len()
                && other != site.instruction;
            if is_like && let Ok(displaced) = classify(&code, site.at) {
                return Some(displaced);
            }
            code[index] ^= bit;
        }
    }
    None
}

/// Returns a sample of the single instruction at `at`, a hexadecimal address.
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

/// Returns a seed that differs from run to run.
fn rand_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::from(now.subsec_nanos()) ^ now.as_secs())
}
