//! `workload`: programs with a known effect, run inside the guest by the end-to-end tests.
//!
//! Each subcommand promises an exact number of kernel entries of one kind and prints what it did
//! as `key: value` lines on stdout, so that a test can compare a probe's hit count with it.
//! Nothing else in the guest makes the system calls used here while a test runs.

use std::error::Error;
use std::io;
use std::process::ExitCode;

mod calls;
mod child;
mod console;
mod debugger;
mod die;
mod exit_status;
mod fentry;
mod fetch;
mod files;
mod flight;
mod forward;
mod hammer;
mod hold_kvm;
mod kexec;
mod kprobe_event;
mod modules;
mod own_calls;
mod pit;
mod raw;
mod rng;
mod shared;
mod static_keys;
mod stress;
mod sys;
mod tracefs;
mod tsc_loop;

use calls::Call;
use flight::{deaths, execs, nested, ping_pong, sleepers};
use kprobe_event::Trigger;
use stress::Length;

const USAGE: &str = "\
usage: workload COMMAND
CALL is getpgid, getsid, sched_get_priority_max; text: getpgid of a text of 64 characters, which is nobody;
nowhere: getpgid of addresses at which there is nothing;
copy: two calls, a byte from /dev/zero to /dev/null; epoll_wait: for a chain of epoll instances;
or out: no call, but a write to an idle port.

Calls:
  calls CALL N           make exactly N calls
  reads N                read one byte from /dev/zero exactly N times
  raw NR ARGS...         make the system call number NR; an argument is a number or `buffer`, which
                         stands for fresh memory; print `result: N`, an error as -errno
  hammer SECONDS THREADS call getpgid in THREADS threads, one per CPU, for SECONDS
  stdin-hold [THREADS]   print `ready`, call getpgid in THREADS threads (default: one per CPU)
                         until a line or the end of the input arrives on stdin
  stress Ns|N SEED [WORKERS]
                         threads and processes on all CPUs make random calls for N seconds, or N
                         steps each; prints `FUNCTION: N`, the calls of each kernel function
  stress-directed SEED [WORKERS]
                         the same, as lines on stdin say: `go` ... `stop`, `go STEPS`, `end`;
                         prints the counts and `stretch N is over` when all workers rest
  tsc-loop CALL N [PROBES SYM [ARGS...]]
                         print the time stamp counter's ticks per call, fastest and median batch of
                         100, and of all together; with the guest's own PROBES on SYM[+OFF]: p, r or
                         pr, o for a kprobe that is optimized first, or s for one that
                         records the stack; with fetch arguments, and `if
                         FILTER` at the end
Long calls:
  sleepers THREADS N     each sleeps N times in nanosleep while moved between CPUs
  naps THREADS N ROUNDS  each sleeps N times in nanosleep, for no time and for 10 ms, while moved
                         between CPUs, in each round, when a line comes in; prints `nap: THREAD NS PIT SLEPT NS PIT SLEPT` for each two:
                         nanoseconds by the clock and by the interval timer, and in do_nanosleep
  ping-pong PAIRS N      pairs of processes exchange a byte through pipes N times
  nested DEPTH N         N nested calls of ep_loop_check_proc, DEPTH (1 to 4) deep
  deaths N THREADS       N processes die while THREADS + 1 tasks of theirs are in pipe_read
  execs N                N processes execute this program anew, every second one from a thread
Breakpoints and text that are not hvprobe's:
  kprobe-event SYM N [ROUNDS]
                         set the guest's own kprobe event on SYM[+OFF]; ROUNDS times (default 1)
                         enable it, call getpgid N times, disable it; print `kprobe_profile: HITS
                         MISSES`, remove the event
  kretprobe-event SYM N [ROUNDS]
                         the same with a kretprobe event
  tracefs FILE           write each line of a file, `PATH TEXT`, to that file of the guest's tracefs;
                         print `LINE ok`, `LINE absent`, `LINE ERRNO` or `LINE ERRNO COLUMN MESSAGE`
                         from its error_log; take back what was taken
  fetch FILE N ROUNDS    give the lines of a file, N at a time, to the guest's kprobe_events, read a
                         file, print what the kernel traced (`K LINE`); then read it again for each
                         group, in each round, when a line comes in
  fentry FUNCTION N      call getpgid N times before, while and after a BPF program is at the entry of
                         FUNCTION; print `attached` and wait for a line; print `runs: N`
  ptrace-debugger N      debug a child that runs into a breakpoint N times
  static-keys N          flip several static keys and tracepoints to and fro N times
  modules FILE N [READ]  load and unload a module N times, reading the file READ in between
Ends:
  die panic|triple|reboot|hang
                         print `ready`, call getpgid on all CPUs, and end the guest that way when a
                         line or the end of the input arrives on stdin
  kexec KERNEL INITRD CMDLINE
                         leave this kernel for another
  kdump KERNEL INITRD CMDLINE
                         have the kernel leave for another when it panics
Others:
  held COMMAND...        print `ready`, run the command when a line arrives on stdin, print `over`,
                         and wait for another line
  nothing                end at once
  exit-status N          report to the host that the guest's command ended with status N
  forward FROM TO        connect whoever comes to the TCP port FROM with TO (for rigs)
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

/// Runs a command between two lines of stdin, so that a test can prepare for it and examine its effects.
fn held(command: &[&str]) -> Result<(), Box<dyn Error>> {
    let line = || io::stdin().read_line(&mut String::new()).map(drop);
    println!("ready");
    line()?;
    run(command)?;
    println!("over");
    Ok(line()?)
}

/// Default number of stress workers per CPU: a thread and a process that stay, and a thread and a process that
/// move.
const WORKERS_PER_CPU: usize = 4;

fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    match *words {
        ["calls", name, count] => calls::repeat(Call::named(name)?, number(count)?),
        ["reads", count] => calls::read_zeros(number(count)?),
        ["raw", number, ref arguments @ ..] => raw::call(number, arguments),
        ["hammer", seconds, threads] => hammer::for_seconds(number(seconds)?, number(threads)?),
        ["stdin-hold"] => hammer::until_input(sys::available_cpus()?),
        ["stdin-hold", threads] => hammer::until_input(number(threads)?),
        ["stress", length, seed, ref workers @ ..] => {
            let length =
                Length::parse(length).ok_or("a stress takes `30s` or a number of steps")?;
            stress::for_length(length, number(seed)?, stress_workers(workers)?)
        }
        ["stress-directed", seed, ref workers @ ..] => {
            stress::directed(number(seed)?, stress_workers(workers)?)
        }
        ["tsc-loop", name, count] => tsc_loop::run(Call::named(name)?, number(count)?),
        ["tsc-loop", name, count, probes, ref place @ ..] => {
            tsc_loop::run_probed(probes, &place.join(" "), Call::named(name)?, number(count)?)
        }
        ["sleepers", threads, count] => sleepers::run(number(threads)?, number(count)?),
        ["naps", threads, count, rounds] => {
            sleepers::naps(number(threads)?, number(count)?, number(rounds)?)
        }
        ["ping-pong", pairs, count] => ping_pong::run(number(pairs)?, number(count)?),
        ["nested", depth, count] => nested::run(number(depth)?, number(count)?),
        ["deaths", rounds, threads] => deaths::run(number(rounds)?, number(threads)?),
        ["execs", count] => execs::run(number(count)?),
        [
            event @ ("kprobe-event" | "kretprobe-event"),
            symbol,
            count,
            ref rounds @ ..,
        ] => {
            let trigger = if event == "kprobe-event" {
                Trigger::Entry
            } else {
                Trigger::Return
            };
            let rounds = optional(rounds)?.unwrap_or(1);
            kprobe_event::run(trigger, symbol, number(count)?, rounds)
        }
        ["tracefs", file] => tracefs::run(file),
        ["fetch", file, group, rounds] => fetch::run(file, number(group)?, number(rounds)?),
        ["fentry", function, count] => fentry::run(function, number(count)?),
        ["ptrace-debugger", count] => debugger::run(number(count)?),
        ["static-keys", count] => static_keys::run(number(count)?),
        ["modules", file, count] => modules::run(file, number(count)?, None),
        ["modules", file, count, read] => modules::run(file, number(count)?, Some(read)),
        ["die", how] => die::amid_calls(die::How::named(how)?),
        ["kexec", kernel, initrd, cmdline] => kexec::run(kexec::When::Now, kernel, initrd, cmdline),
        ["kdump", kernel, initrd, cmdline] => {
            kexec::run(kexec::When::Crash, kernel, initrd, cmdline)
        }
        ["held", ref command @ ..] => held(command),
        ["nothing"] => Ok(()),
        ["exit-status", status] => exit_status::report(number(status)?),
        ["forward", from, to] => forward::run(from, to),
        ["hold-kvm"] => hold_kvm::hold(),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

fn stress_workers(words: &[&str]) -> Result<usize, Box<dyn Error>> {
    Ok(match optional(words)? {
        Some(workers) => workers,
        None => WORKERS_PER_CPU * sys::available_cpus()?,
    })
}

/// Parses the last word, which may be absent, as a number.
fn optional<T: std::str::FromStr>(words: &[&str]) -> Result<Option<T>, Box<dyn Error>> {
    match *words {
        [] => Ok(None),
        [word] => number(word).map(Some),
        _ => Err(USAGE.into()),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, Box<dyn Error>> {
    text.parse()
        .map_err(|_| format!("`{text}` is not a number in range").into())
}
