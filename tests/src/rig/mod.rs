//! Helpers for tests that boot stock Linux guests in a rig.

mod running;
mod shared;
mod terminal;

use std::env;
use std::path::PathBuf;
use std::sync::LazyLock;

use hvprobe_machine::{
    Bounds, DEFAULT_CMDLINE, EndReason, Machine, MachineConfig, ProbeId, ProbeInfo, ProbeSpec,
    Refusals,
};
use hvprobe_spec::definition;

pub use hvprobe_fixtures::{is_short, rounds};
pub use hvprobe_spec::chain;
pub use running::{Ended, Running};

/// Returns the name of the rig in which the test runs. Outside of a rig, prints that `test` is skipped and returns
/// `None`.
#[must_use]
pub fn rig(test: &str) -> Option<String> {
    let rig = env::var("HVPROBE_RIG").ok();
    if rig.is_none() {
        eprintln!("skipped: {test} needs a rig (cargo lab test)");
    }
    rig
}

/// Returns the number of CPUs of the rig.
#[must_use]
pub fn rig_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn guest_file(name: &str) -> PathBuf {
    let cache = env::var_os("HVPROBE_CACHE").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    cache.join("guest").join(name)
}

/// Returns a kernel command line that shortens the boot in an emulated machine by leaving out features that no test
/// is about. The kernel does not test its ciphers, and has no IPv6, no encrypted keys, no IMA and no netfilter
/// hooks of AppArmor. It requests no module for TCP and registers no functions for BPF. On a machine with one CPU,
/// it does not patch the lock prefixes in its text one by one. The mitigations of processor faults stay at their
/// defaults.
#[must_use]
pub fn mitigated() -> String {
    format!(
        "{DEFAULT_CMDLINE} cryptomgr.notests noreplace-smp ipv6.disable=1 \
         initcall_blacklist=crypto_kdf108_init,cubictcp_register,init_encrypted,init_ima,\
         apparmor_nf_ip_init,tcp_congestion_default,bpf_rstat_kfunc_init"
    )
}

/// Returns [`mitigated`] with `mitigations=off`.
#[must_use]
pub fn short() -> String {
    mitigated() + " mitigations=off"
}

/// Returns options of `hvprobe run` and `hvprobe vm boot` that make the boot as short as that of [`guest`], for
/// tests that are not about the boot.
#[must_use]
pub fn quickly() -> [&'static str; 2] {
    static CMDLINE: LazyLock<String> = LazyLock::new(short);
    ["--cmdline", CMDLINE.as_str()]
}

/// Returns the configuration of a stock guest with `cpus` CPUs that runs `command`. All its probes are breakpoints.
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

/// Returns [`guest`] with optimization: probes are jumps where possible.
#[must_use]
pub fn optimizing_guest(cpus: u32, command: &[&str]) -> MachineConfig {
    MachineConfig {
        optimize: true,
        ..guest(cpus, command)
    }
}

/// Returns a script that runs `command` while unexpected NMIs may arrive. Afterwards it prints the NMI count of
/// each CPU and the kernel log, without the lines that the kernel always logs for such an NMI. It ends when it has
/// read a line. The script keeps the kernel from printing on the console, because printing takes longer than the
/// NMI. With many NMIs, the log of an old kernel lacks messages or the ends of lines.
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

/// Returns an enabled probe for `definition`.
///
/// # Panics
/// When `definition` cannot be parsed.
#[must_use]
pub fn probe(definition: &str) -> ProbeSpec {
    match definition::parse(definition) {
        Ok(definition) => definition.into(),
        Err(error) => panic!("{}: {error}", error.render(definition)),
    }
}

/// Returns the description and counts of probe `id` of `machine`.
///
/// # Panics
/// When `machine` has no such probe.
#[must_use]
pub fn info(machine: &Machine, id: ProbeId) -> ProbeInfo {
    let found = machine.probes().into_iter().find(|probe| probe.id == id);
    found.unwrap_or_else(|| panic!("no probe {id}"))
}

/// Returns the description and counts of each of the probes `ids`, in this order. Lists the probes only once,
/// because each listing first delivers everything recorded so far.
///
/// # Panics
/// When `machine` lacks one of the probes.
#[must_use]
pub fn infos(machine: &Machine, ids: &[ProbeId]) -> Vec<ProbeInfo> {
    let all = machine.probes();
    let of = |id: &ProbeId| all.iter().find(|probe| probe.id == *id).cloned();
    let found = ids
        .iter()
        .map(|id| of(id).unwrap_or_else(|| panic!("no probe {id}")));
    found.collect()
}

/// Returns the value of every complete line `key: value` in `printed`.
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

/// Asserts that the command ended with `status`, that the guest powered off by itself unless it is shared, and
/// that its kernel logged no complaint.
///
/// # Panics
/// When one of these does not hold.
pub fn assert_clean(ended: &Ended, printed: &str, status: u8) {
    assert!(
        matches!(ended.reason, None | Some(EndReason::Shutdown))
            && ended.guest_status == Some(status),
        "{ended:?}, the guest printed:\n{printed}"
    );
    for complaint in [
        // With the bracket that ends the time stamp: a driver's own message may have WARNING after the driver's
        // name, and must not match.
        "] WARNING:",
        "BUG:",
        "Oops",
        // With the space, so that `install` does not match.
        " stall",
        "soft lockup",
        "Call Trace",
        // Printed by the guest's init for a log that a quiet console does not show.
        "hvprobe-guest: the kernel complains",
    ] {
        assert!(
            !printed.contains(complaint),
            "the guest printed:\n{printed}"
        );
    }
}

/// Prints the progress of a long test directly to standard error, because the test runner captures what tests
/// print. The lab ends a rig that prints nothing for long.
pub fn progress(what: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{what}");
}
