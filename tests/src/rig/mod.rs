//! Stock Linux guests in a rig.

mod running;
mod shared;

use std::env;
use std::ops::{Add, Div};
use std::path::PathBuf;
use std::sync::LazyLock;

use hvprobe_machine::{
    Bounds, DEFAULT_CMDLINE, EndReason, Machine, MachineConfig, ProbeId, ProbeInfo, ProbeSpec,
    Refusals,
};
use hvprobe_spec::definition;

pub use running::{Ended, Running};

/// The rig the test runs in; `None`, and a line that says so, where there is none.
#[must_use]
pub fn rig(test: &str) -> Option<String> {
    let rig = env::var("HVPROBE_RIG").ok();
    if rig.is_none() {
        eprintln!("skipped: {test} needs a rig (cargo lab test)");
    }
    rig
}

/// Whether a change waits for the tests (`cargo lab test --ci`), and they are to try less.
#[must_use]
pub fn is_short() -> bool {
    env::var_os("HVPROBE_SHORT").is_some()
}

/// How many rounds a test goes, or cases it tries, that has `all` of them where there is time: a quarter of them
/// where there is none.
#[must_use]
pub fn rounds<N>(all: N) -> N
where
    N: From<u8> + Add<Output = N> + Div<Output = N>,
{
    if is_short() {
        (all + N::from(3)) / N::from(4)
    } else {
        all
    }
}

/// How many CPUs the rig has.
#[must_use]
pub fn rig_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn guest_file(name: &str) -> PathBuf {
    let cache = env::var_os("HVPROBE_CACHE").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    cache.join("guest").join(name)
}

/// A command line that makes a boot short in an emulated machine, by what none of the tests is about: the kernel
/// does not test its ciphers, goes without IPv6 and without keys of its own, and on a machine of one CPU does
/// not take the lock prefixes out of its text one by one. About its processor's faults it does what it does by
/// default.
#[must_use]
pub fn mitigated() -> String {
    format!(
        "{DEFAULT_CMDLINE} cryptomgr.notests noreplace-smp ipv6.disable=1 \
         initcall_blacklist=crypto_kdf108_init,cubictcp_register,init_encrypted,init_ima,\
         apparmor_nf_ip_init"
    )
}

/// The same, and nothing is done about the processor's faults.
#[must_use]
pub fn short() -> String {
    mitigated() + " mitigations=off"
}

/// Options of `hvprobe run` and `hvprobe vm boot` that make the boot as short as that of [`guest`], for tests that are
/// not about it.
#[must_use]
pub fn quickly() -> [&'static str; 2] {
    static CMDLINE: LazyLock<String> = LazyLock::new(short);
    ["--cmdline", CMDLINE.as_str()]
}

/// A stock guest with `cpus` CPUs that runs `command`, and in which every probe is a breakpoint.
#[must_use]
pub fn guest(cpus: u32, command: &[&str]) -> MachineConfig {
    MachineConfig {
        name: "test".to_owned(),
        kernel: guest_file("kernel"),
        initrd: Some(guest_file("initrd.cpio")),
        cmdline: short(),
        cpus,
        memory: 256 << 20,
        command: command.iter().map(|&word| word.to_owned()).collect(),
        probes: Vec::new(),
        refusals: Refusals::Fail,
        paused: false,
        optimize: false,
        bounds: Bounds::default(),
    }
}

/// The same, with jumps where they can be.
#[must_use]
pub fn optimizing_guest(cpus: u32, command: &[&str]) -> MachineConfig {
    MachineConfig {
        optimize: true,
        ..guest(cpus, command)
    }
}

/// A script that runs `command`, which NMIs may come into that nobody expects, and then prints how many each
/// CPU has had, and what the kernel has logged beside what it always says of such an NMI. The kernel
/// prints nothing on the console meanwhile: that takes longer than the NMI. Old kernels lose what many NMIs print, or the
/// ends of its lines.
#[must_use]
pub fn amid_nmis(command: &str) -> String {
    format!(
        "echo -1 >/proc/sys/kernel/printk; dmesg -c >/dev/null; {command}; \
         grep NMI: /proc/interrupts; echo 'log:'; \
         dmesg | grep -vE '\\] ((Uhhuh|Do|Dazed)[ ,.?a-zA-Z0-9]*\
         |INFO: NMI handler .* took too long to run: .*\
         |Lost [0-9]+ message\\(s\\)!\
         |unknown_nmi_error: [0-9]+ callbacks suppressed\
         |hrtimer: interrupt took [0-9]+ ns)$'; \
         echo 'end of log'; read line"
    )
}

/// An enabled probe.
///
/// # Panics
/// When `definition` is none.
#[must_use]
pub fn probe(definition: &str) -> ProbeSpec {
    match definition::parse(definition) {
        Ok(definition) => definition.into(),
        Err(error) => panic!("{}: {error}", error.render(definition)),
    }
}

/// What probe `id` of `machine` is and has counted.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn info(machine: &Machine, id: ProbeId) -> ProbeInfo {
    let found = machine.probes().into_iter().find(|probe| probe.id == id);
    found.unwrap_or_else(|| panic!("no probe {id}"))
}

/// The same of several, at one time and in their order. Each time that the probes are asked for, everything that
/// was recorded by then is handed on first.
///
/// # Panics
/// When there is one that is none.
#[must_use]
pub fn infos(machine: &Machine, ids: &[ProbeId]) -> Vec<ProbeInfo> {
    let all = machine.probes();
    let of = |id: &ProbeId| all.iter().find(|probe| probe.id == *id).cloned();
    let found = ids
        .iter()
        .map(|id| of(id).unwrap_or_else(|| panic!("no probe {id}")));
    found.collect()
}

/// Every `key: value` that was printed with this key, in lines that have come to their end.
///
/// # Panics
/// When a value is not a number.
#[must_use]
pub fn values(printed: &str, key: &str) -> Vec<i64> {
    let values = printed
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .filter_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": "));
    let number = |value: &str| value.split(' ').next()?.parse().ok();
    values
        .map(|value| number(value).unwrap_or_else(|| panic!("{key}: {value} is no number")))
        .collect()
}

/// Asserts that the guest ran its command with this status and, unless it is shared, powered off by itself, and
/// that its kernel had nothing to complain about.
///
/// # Panics
/// When it did not.
pub fn assert_clean(ended: &Ended, printed: &str, status: u8) {
    assert!(
        matches!(ended.reason, None | Some(EndReason::Shutdown))
            && ended.guest_status == Some(status),
        "{ended:?}, the guest printed:\n{printed}"
    );
    for complaint in [
        // Not what a driver calls so behind its own name.
        "] WARNING:",
        "BUG:",
        "Oops",
        // Not `install`.
        " stall",
        "soft lockup",
        "Call Trace",
        // What the guest's init says about a log that a quiet console does not show.
        "hvprobe-guest: the kernel complains",
    ] {
        assert!(
            !printed.contains(complaint),
            "the guest printed:\n{printed}"
        );
    }
}

/// An error with its sources, in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Prints the progress of a long test past the test runner, which keeps what tests print. The lab ends a rig that
/// prints nothing for long.
pub fn progress(what: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{what}");
}
