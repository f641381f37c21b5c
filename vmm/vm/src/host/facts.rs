//! Facts about the host for a bug report, besides the checks: processor, KVM, kernel.
//!
//! Contains only facts that distinguish kinds of hosts. Names, addresses, serial numbers and command lines,
//! which identify a single host, are not read. A fact that cannot be read is left out.

use std::fs;
use std::path::Path;

use kvm_ioctls::{Cap, Kvm};

use super::kvm::NEEDED;

/// A property of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Subject of the fact: `processor`, `KVM` or `kernel`.
    pub of: &'static str,
    /// Name of the property.
    pub name: String,
    /// The value as it was read.
    pub value: String,
}

/// Processor features that decide how guests run, or that a guest's kernel uses. Their names are those of
/// `/proc/cpuinfo`.
const FEATURES: &str = "vmx svm ept vpid tpr_shadow vnmi npt nrip_save decodeassists vgif avic \
    hypervisor constant_tsc nonstop_tsc tsc_adjust tsc_known_freq tsc_deadline_timer tsc_scale \
    x2apic la57 smep smap umip pti ibt user_shstk fred lkgs lass xsave avx avx512f";

/// Capabilities that are used if available, besides [`NEEDED`].
const USED: [(Cap, &str); 12] = [
    (Cap::MaxVcpus, "KVM_CAP_MAX_VCPUS"),
    (Cap::NrMemslots, "KVM_CAP_NR_MEMSLOTS"),
    (
        Cap::JoinMemoryRegionsWorks,
        "KVM_CAP_JOIN_MEMORY_REGIONS_WORKS",
    ),
    (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
    (Cap::GetTscKhz, "KVM_CAP_GET_TSC_KHZ"),
    (Cap::TscControl, "KVM_CAP_TSC_CONTROL"),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::KvmclockCtrl, "KVM_CAP_KVMCLOCK_CTRL"),
    (Cap::UserNmi, "KVM_CAP_USER_NMI"),
    (Cap::X86RobustSinglestep, "KVM_CAP_X86_ROBUST_SINGLESTEP"),
    (Cap::DebugHwBps, "KVM_CAP_GUEST_DEBUG_HW_BPS"),
    (Cap::Xsave2, "KVM_CAP_XSAVE2"),
];

/// Maximum length of a module parameter's value, in bytes. Longer values are not reported, because they do not
/// distinguish kinds of hosts.
const LONGEST: usize = 32;

/// Returns the facts of this host.
#[must_use]
pub fn facts() -> Vec<Fact> {
    let root = Path::new("/");
    let mut facts = processor(root);
    if let Ok(kvm) = Kvm::new() {
        facts.push(fact("KVM", "API version", kvm.get_api_version()));
        facts.push(fact("KVM", "capabilities", capabilities(&kvm)));
    }
    facts.extend(parameters(root));
    facts.extend(kernel(root));
    facts
}

fn fact(of: &'static str, name: impl ToString, value: impl ToString) -> Fact {
    Fact {
        of,
        name: name.to_string(),
        value: value.to_string(),
    }
}

/// Returns the first line of a file, if it can be read and is not empty.
fn line(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().next()?.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

fn processor(root: &Path) -> Vec<Fact> {
    let Ok(text) = fs::read_to_string(root.join("proc/cpuinfo")) else {
        return Vec::new();
    };
    let value = |of: &str| {
        text.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == of).then_some(value.trim())
        })
    };
    let mut facts = Vec::new();
    for (name, of) in [
        ("vendor", "vendor_id"),
        ("name", "model name"),
        ("family", "cpu family"),
        ("model", "model"),
        ("stepping", "stepping"),
        ("microcode", "microcode"),
    ] {
        facts.extend(value(of).map(|value| fact("processor", name, value)));
    }
    let processors = text.lines().filter(|line| line.starts_with("processor"));
    facts.push(fact("processor", "processors", processors.count()));
    // VMX features are in a separate line.
    let all: Vec<&str> = ["flags", "vmx flags"]
        .into_iter()
        .filter_map(value)
        .flat_map(str::split_whitespace)
        .collect();
    let (with, without): (Vec<&str>, Vec<&str>) = FEATURES
        .split_whitespace()
        .partition(|feature| all.contains(feature));
    facts.push(fact("processor", "has", with.join(" ")));
    facts.push(fact("processor", "has not", without.join(" ")));
    facts
}

/// Returns the capabilities, each with KVM's answer unless that is 1.
fn capabilities(kvm: &Kvm) -> String {
    let all = NEEDED.iter().chain(&USED);
    let words = all.map(|(capability, name)| {
        let name = name.strip_prefix("KVM_CAP_").unwrap_or(name);
        match kvm.check_extension_int(*capability) {
            1 => name.to_owned(),
            answer => format!("{name}={answer}"),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the parameters of `kvm` and of all modules whose names start with `kvm`.
fn parameters(root: &Path) -> Vec<Fact> {
    let modules = names(&root.join("sys/module"));
    let of_kvm = modules.iter().filter(|name| name.starts_with("kvm"));
    of_kvm
        .filter_map(|module| {
            let folder = root.join("sys/module").join(module).join("parameters");
            let words: Vec<String> = names(&folder)
                .iter()
                .filter_map(|name| {
                    let value = line(&folder.join(name))?;
                    let plain =
                        value.len() <= LONGEST && value.bytes().all(|b| b.is_ascii_graphic());
                    plain.then(|| format!("{name}={value}"))
                })
                .collect();
            (!words.is_empty())
                .then(|| fact("KVM", format!("parameters of {module}"), words.join(" ")))
        })
        .collect()
}

/// Returns the names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}

fn kernel(root: &Path) -> Vec<Fact> {
    let mut facts = Vec::new();
    for (name, file) in [
        ("release", "proc/sys/kernel/osrelease"),
        ("version", "proc/sys/kernel/version"),
        (
            "clocksource",
            "sys/devices/system/clocksource/clocksource0/current_clocksource",
        ),
    ] {
        facts.extend(line(&root.join(file)).map(|value| fact("kernel", name, value)));
    }
    let release = fs::read_to_string(root.join("etc/os-release")).unwrap_or_default();
    let pretty = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="));
    facts.extend(pretty.map(|name| fact("kernel", "distribution", name.trim_matches('"'))));
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn found<'a>(facts: &'a [Fact], name: &str) -> Option<&'a str> {
        let fact = facts.iter().find(|fact| fact.name == name);
        fact.map(|fact| fact.value.as_str())
    }

    #[test]
    fn processor_is_reported_with_the_features_that_matter() {
        let root = tempfile::tempdir().unwrap();
        let cpuinfo = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n\
            model name\t: Xeon\nstepping\t: 8\nflags\t\t: fpu vmx smep ibt\n\
            vmx flags\t: vnmi ept\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n";
        write(root.path(), "proc/cpuinfo", cpuinfo);
        let facts = processor(root.path());
        assert_eq!(found(&facts, "model"), Some("143"));
        assert_eq!(found(&facts, "name"), Some("Xeon"));
        assert_eq!(found(&facts, "processors"), Some("2"));
        assert_eq!(found(&facts, "has"), Some("vmx ept vnmi smep ibt"));
        assert!(found(&facts, "has not").unwrap().contains("fred"));
        assert_eq!(found(&facts, "microcode"), None);
    }

    #[test]
    fn parameters_of_kvms_modules_are_reported_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let long = "x".repeat(LONGEST + 1);
        for (name, text) in [
            ("kvm/parameters/halt_poll_ns", "200000\n"),
            ("kvm_intel/parameters/nested", "Y\n"),
            ("kvm_intel/parameters/ept", "Y\n"),
            ("kvm_intel/parameters/odd", &long),
            ("kvm_intel/refcnt", "3\n"),
            ("ext4/parameters/some", "1\n"),
        ] {
            write(root.path(), &format!("sys/module/{name}"), text);
        }
        let facts = parameters(root.path());
        assert_eq!(facts.len(), 2);
        assert_eq!(
            found(&facts, "parameters of kvm_intel"),
            Some("ept=Y nested=Y")
        );
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(kernel(root.path()), []);
        assert_eq!(processor(root.path()), []);
        write(root.path(), "proc/sys/kernel/osrelease", "6.1.0-9\n");
        write(root.path(), "etc/os-release", "ID=x\nPRETTY_NAME=\"X 1\"\n");
        let facts = kernel(root.path());
        assert_eq!(found(&facts, "release"), Some("6.1.0-9"));
        assert_eq!(found(&facts, "distribution"), Some("X 1"));
    }

    #[test]
    fn this_hosts_facts_have_a_name_and_a_value_each() {
        let facts = facts();
        assert!(facts.iter().any(|fact| fact.of == "kernel"));
        let empty = |fact: &&Fact| fact.name.is_empty() || fact.value.contains('\n');
        assert_eq!(facts.iter().find(empty), None);
    }
}
