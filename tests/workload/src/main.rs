//! `workload`: programs with a known effect, run inside the guest by the end-to-end tests.
//!
//! Each subcommand promises an exact number of kernel entries of one kind and prints what it did
//! as `key: value` lines on stdout, so that a test can compare a probe's hit count with it.
//! Nothing else in the guest makes the system calls used here while a test runs.

use std::error::Error;
use std::process::ExitCode;

mod calls;
mod exit_status;
mod hammer;
mod hold_kvm;
mod kprobe_event;
mod raw;

use calls::Call;

const USAGE: &str = "\
usage: workload COMMAND
  calls NAME N           make exactly N calls of the system call NAME
                         (getpgid, getsid, sched_get_priority_max)
  reads N                read one byte from /dev/zero exactly N times
  raw NR ARGS...         make the system call number NR; an argument is a number or `buffer`, which
                         stands for fresh memory; print `result: N`, an error as -errno
  hammer SECONDS THREADS call getpgid in THREADS threads, one per CPU, for SECONDS
  stdin-hold [THREADS]   print `ready`, call getpgid in THREADS threads (default: one per CPU)
                         until a line or the end of the input arrives on stdin
  kprobe-event SYM N     set the guest's own kprobe event on SYM[+OFF], call getpgid N times,
                         print `kprobe_profile: HITS MISSES`, remove the event
  exit-status N          tell the host that the guest's command ended with status N
  hold-kvm               keep KVM's static keys steady, from the background (for rigs)
Commands that call print `calls: N`, the exact number of calls made, at the end.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("workload: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    match *words {
        ["calls", name, count] => calls::repeat(Call::named(name)?, number(count)?),
        ["reads", count] => calls::read_zeros(number(count)?),
        ["raw", number, ref arguments @ ..] => raw::call(number, arguments),
        ["hammer", seconds, threads] => hammer::for_seconds(number(seconds)?, number(threads)?),
        ["stdin-hold"] => hammer::until_input(hammer::available_cpus()?),
        ["stdin-hold", threads] => hammer::until_input(number(threads)?),
        ["kprobe-event", symbol, count] => kprobe_event::run(symbol, number(count)?),
        ["exit-status", status] => exit_status::report(number(status)?),
        ["hold-kvm"] => hold_kvm::hold(),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, Box<dyn Error>> {
    text.parse()
        .map_err(|_| format!("`{text}` is not a number in range").into())
}
