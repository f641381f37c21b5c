//! Parser of the output of libFuzzer.

/// Maximum number of lines that say why a target failed.
const WORDS: usize = 4;

/// Contents of a target's log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Log {
    pub(super) runs: Option<u64>,
    pub(super) runs_a_second: Option<u64>,
    /// Number of edges of the program's control flow that inputs have reached.
    pub(super) coverage: Option<u64>,
    /// Name that libFuzzer or the sanitizer gives the failure.
    pub(super) summary: Option<String>,
    /// The file with the input that failed.
    pub(super) input: Option<String>,
    /// Lines that the program printed about the failure.
    pub(super) words: Vec<String>,
}

impl Log {
    pub(super) fn read(text: &str) -> Self {
        let mut log = Self::default();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(rest) = line.strip_prefix('#') {
                log.progress(rest);
            } else if let Some(rest) = line.strip_prefix("stat::number_of_executed_units:") {
                log.runs = rest.trim().parse().ok();
            } else if let Some(rest) = line.strip_prefix("stat::average_exec_per_sec:") {
                log.runs_a_second = rest.trim().parse().ok();
            } else if let Some(rest) = line.strip_prefix("SUMMARY: ") {
                let what = rest.split_once(": ").map_or(rest, |(_, what)| what);
                log.summary = Some(what.to_owned());
            } else if let Some((_, file)) = line.split_once("Test unit written to ") {
                log.input = Some(file.trim().to_owned());
            } else if line.contains(" panicked at ") {
                log.say(line);
                log.say(lines.next().unwrap_or_default());
            } else if line.contains("ERROR: ") {
                log.say(line);
            }
        }
        log
    }

    fn say(&mut self, line: &str) {
        if self.words.len() < WORDS {
            self.words.push(line.to_owned());
        }
    }

    /// Parses a line such as `4096 pulse  cov: 298 ft: 512 corp: 9/81b lim: 43 exec/s: 2048 rss: 51Mb`.
    fn progress(&mut self, rest: &str) {
        let mut words = rest.split_whitespace();
        let Some(runs) = words.next().and_then(|runs| runs.parse().ok()) else {
            return;
        };
        self.runs = Some(runs);
        if words.any(|word| word == "cov:") {
            self.coverage = words.next().and_then(|number| number.parse().ok());
        }
    }
}

#[cfg(test)]
pub(super) const GOOD: &str = "\
INFO: Running with entropic power schedule (0xFF, 100).
INFO: seed corpus: files: 2 min: 1b max: 40b total: 41b rss: 40Mb
#3\tINITED cov: 120 ft: 121 corp: 2/41b exec/s: 0 rss: 41Mb
#4096\tpulse  cov: 298 ft: 512 corp: 9/81b lim: 43 exec/s: 2048 rss: 51Mb
#524288\tDONE   cov: 311 ft: 600 corp: 14/181b lim: 4096 exec/s: 17476 rss: 61Mb
Done 524288 runs in 30 second(s)
stat::number_of_executed_units: 524288
stat::average_exec_per_sec:     17476
stat::new_units_added:          12
";

#[cfg(test)]
pub(super) const BAD: &str = "\
#4711\tNEW    cov: 298 ft: 512 corp: 9/81b lim: 43 exec/s: 2048 rss: 51Mb

thread '<unnamed>' (99) panicked at tests/src/fuzz/walk.rs:55:5:
a failed write changed memory
==99== ERROR: libFuzzer: deadly signal
    #0 0x55 in __sanitizer_print_stack_trace
SUMMARY: libFuzzer: deadly signal
MS: 1 ChangeBit-; base unit: 00
artifact_prefix='target/fuzz/artifacts/walk/'; Test unit written to target/fuzz/artifacts/walk/crash-12
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_to_its_end_reports_runs_and_coverage() {
        let log = Log::read(GOOD);
        assert_eq!((log.runs, log.runs_a_second), (Some(524_288), Some(17_476)));
        assert_eq!(log.coverage, Some(311));
        assert_eq!((log.summary, log.input), (None, None));
    }

    #[test]
    fn a_failure_reports_why_and_where_its_input_is() {
        let log = Log::read(BAD);
        assert_eq!((log.runs, log.coverage), (Some(4711), Some(298)));
        assert_eq!(log.summary.as_deref(), Some("deadly signal"));
        let input = "target/fuzz/artifacts/walk/crash-12";
        assert_eq!(log.input.as_deref(), Some(input));
        assert_eq!(log.words[1], "a failed write changed memory");
        assert_eq!(log.words[2], "==99== ERROR: libFuzzer: deadly signal");
    }
}
