//! Runs every decoder on the committed corpus and on random mutations of it.
//!
//! `HVPROBE_FUZZ_RUNS` sets the number of mutations for each decoder, and `HVPROBE_FUZZ_SEED` the seed of their
//! random changes. A failure prints its seed. An input that breaks a promise is written to the target folder, from
//! which it can be added to the corpus.

mod mutate;

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hvprobe_tests::fuzz::{TARGETS, Target};
use mutate::Random;

/// Default number of mutations of each target's corpus.
const RUNS: u64 = 1000;
/// Time limit for one input. Even on a busy machine, an input takes far less.
const SLOWEST: Duration = Duration::from_secs(20);

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|e| panic!("{name}={value}: {e}")),
    )
}

fn corpus_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus")
}

/// Returns the files in a folder, sorted by name.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    files.sort();
    files
}

/// Returns the inputs of a target.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    files(&corpus_folder().join(target))
        .iter()
        .map(|path| fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        .collect()
}

/// Returns the names of the files in a folder, without extensions.
fn names(folder: &Path) -> Vec<String> {
    files(folder)
        .iter()
        .filter_map(|path| Some(path.file_stem()?.to_string_lossy().into_owned()))
        .collect()
}

#[test]
fn every_target_has_a_program_and_a_corpus_and_the_other_way_round() {
    let targets = TARGETS.map(|target| target.name.to_owned());
    assert_eq!(names(&corpus_folder()), targets);
    assert_eq!(
        names(&corpus_folder().join("../fuzz_targets")),
        targets,
        "fuzz/fuzz_targets"
    );
    let manifest = fs::read_to_string(corpus_folder().join("../Cargo.toml")).unwrap();
    for target in targets {
        assert!(
            manifest.contains(&format!("name = \"{target}\"")),
            "{target}"
        );
    }
}

#[test]
fn the_corpus_gets_past_the_decoders_own_checks() {
    for target in TARGETS {
        let inputs = corpus(target.name);
        let accepted = inputs.iter().filter(|data| (target.run)(data)).count();
        eprintln!("{}: {} inputs, {accepted} sound", target.name, inputs.len());
        assert!(accepted > 0, "{}: all inputs are turned down", target.name);
        // Empty input must not break a promise either.
        (target.run)(&[]);
    }
}

#[test]
fn mutations_of_the_corpus_break_no_promise() {
    let runs = number("HVPROBE_FUZZ_RUNS").unwrap_or(RUNS);
    let seed = number("HVPROBE_FUZZ_SEED").unwrap_or_else(|| RandomState::new().hash_one("a seed"));
    eprintln!("HVPROBE_FUZZ_SEED={seed} HVPROBE_FUZZ_RUNS={runs}");
    for target in TARGETS {
        let inputs = corpus(target.name);
        // Each target has a seed of its own, so that one target can be repeated without the others.
        let mut random = Random::new(seed ^ number_of(target.name));
        let (mut sound, mut slowest) = (0, Duration::ZERO);
        for _ in 0..runs {
            let input = mutate::mutation(&mut random, &inputs);
            let start = Instant::now();
            sound += u64::from(run(target, &input, seed));
            slowest = slowest.max(start.elapsed());
        }
        eprintln!(
            "{}: {sound} of {runs} got past the checks, the slowest took {slowest:?}",
            target.name
        );
        assert!(slowest < SLOWEST, "{}: {slowest:?}", target.name);
    }
}

/// Returns a number that differs between names.
fn number_of(name: &str) -> u64 {
    name.bytes().fold(0, |sum, byte| sum * 31 + u64::from(byte))
}

/// Runs `target` on one input, and returns whether the decoder accepted it. If the input breaks a promise, writes
/// it to a file and panics.
fn run(target: Target, input: &[u8], seed: u64) -> bool {
    catch_unwind(AssertUnwindSafe(|| (target.run)(input))).unwrap_or_else(|panic| {
        let name = format!("fuzz-{}-{seed}", target.name);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::write(&path, input).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        eprintln!(
            "{}: HVPROBE_FUZZ_SEED={seed}; the input is in {}",
            target.name,
            path.display()
        );
        resume_unwind(panic)
    })
}
