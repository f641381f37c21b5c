//! `cargo lab test --repeat N`: runs the tests of this machine up to N times under CPU load, until one fails.
//!
//! A test that passes a thousand times on an idle machine may fail at once on a busy one, where threads are
//! preempted at other places. So as many threads spin as there are processors. Every round has its own seed, which
//! is printed with its result.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::Result;
use hvprobe_lab::verified::Counts;

use crate::job::Job;
use crate::kind::Kind;
use crate::outcome::Finish;
use crate::process;
use crate::progress;
use crate::report::Report;
use crate::retry::Ran;
use crate::rig;
use crate::seeds::Seeds;
use crate::setup::Ready;

/// CPU load: threads that spin until this is dropped.
struct Load {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts one thread for each processor.
    fn start() -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let spin = |over: Arc<AtomicBool>| {
            move || {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        let threads = (0..process::processors()).map(|_| thread::spawn(spin(Arc::clone(&over))));
        let threads = threads.collect();
        Self { over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Runs the steps of `job` up to `times` times, each time with the next of `seeds`. Returns whether all passed.
pub(crate) fn run(job: &Job, ready: &Ready, times: u32, seeds: Seeds) -> Result<bool> {
    let deadline = Instant::now() + job.timeout;
    let _load = Load::start();
    for round in 1..=times {
        let seeds = seeds.of_round(round);
        let (start, mut counts) = (Instant::now(), Counts::default());
        for step in &job.steps {
            let mut one = job.clone();
            one.steps = vec![step.clone()];
            one.environment.extend(seeds.environment());
            one.timeout = deadline.saturating_duration_since(Instant::now());
            let mut report = Report::quiet(&one.steps);
            let outcome = rig::run(Kind::Direct, ready, &one, &mut report)?;
            let ran = report.finish();
            let why = match (&outcome.finish, &ran[..]) {
                (
                    Finish::Complete,
                    [
                        Ran::Ended {
                            status: 0,
                            counts: ended,
                            ..
                        },
                    ],
                ) => {
                    counts += *ended;
                    continue;
                }
                (
                    Finish::Complete,
                    [
                        Ran::Ended {
                            failures, status, ..
                        },
                    ],
                ) => {
                    let failures = failures.iter().map(|it| format!("{}: {}", it.test, it.why));
                    let failures: Vec<_> = failures.collect();
                    match failures.is_empty() {
                        true => format!("status {status}"),
                        false => failures.join("\n"),
                    }
                }
                (Finish::TimedOut, _) => "the time was over (--timeout)".to_owned(),
                (Finish::Interrupted(_), _) => "interrupted".to_owned(),
                (Finish::Complete | Finish::Broken(_), _) => "it did not end".to_owned(),
            };
            println!("\n{why}");
            println!(
                "round {round} of {times} failed in {}; {seeds}",
                step.name()
            );
            return Ok(false);
        }
        progress::note(&format!(
            "round {round} of {times}: {counts} in {:.1} s; {seeds}",
            start.elapsed().as_secs_f64()
        ));
    }
    println!("{times} rounds passed");
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_ends_when_it_is_dropped() {
        let load = Load::start();
        let over = Arc::clone(&load.over);
        drop(load);
        // The threads are gone, and with them their references.
        assert_eq!(Arc::strong_count(&over), 1);
    }
}
