//! Groups of tests that run in one process in a rig.
//!
//! Tests of a module share guests (`tests/src/rig/shared.rs`), which end with the process. Tests that need the
//! machine for themselves are in groups of their own.

use crate::job::Group;

/// Prefixes of the names of tests that need the machine for themselves, because they depend on timing (of a guest
/// relative to its host, or of a server).
const ALONE: [&str; 4] = [
    "a_server_ends_all_the_machines",
    "boot::a_probe",
    "clock::",
    "pause::",
];

/// Long tests that `cargo lab test --ci` leaves to `cargo lab nightly`. For every change, similar but shorter tests
/// run: with fewer virtual CPUs, at other instructions, on the engine or a server without a guest, or on parts of
/// what these tests check together. Some of the long tests are about features that only newer kernels have.
const NIGHTLY: [&str; 44] = [
    "api::clock_steps::a_wall_clock_that_is_set_changes_what_times_stand_for_and_nothing_else",
    "api::killed::clients_that_are_killed_at_random_moments_leave_nothing_behind",
    "api::misuse::nonsense_about_a_machine_leaves_its_guest_as_it_was",
    "api::unread::hundreds_of_streams_that_nobody_reads_keep_no_other_client_waiting",
    "churn::calls_of_four_vcpus_come_home_whatever_comes_and_goes",
    "churn::calls_of_two_vcpus_come_home_whatever_comes_and_goes",
    "cli::report_of_the_doctor_describes_all_of_the_host_but_which_one_it_is",
    "cli::what_a_trace_plants_goes_with_it_when_it_ends_dies_or_does_not_run_for_long",
    "clock::a_nap_takes_as_long_as_the_guest_says_on_four_cpus",
    "clock::a_nap_takes_as_long_as_the_guest_says_on_one_cpu",
    "coexist::any_order::whatever_the_guest_and_we_do_neither_comes_in_the_others_way",
    "control::a_forced_mechanism_counts_every_call_of_two_busy_vcpus",
    "control::thousands_are_registered_in_one_call_or_none",
    "events_files::traces_count_what_their_files_say_and_print_the_rest",
    "explain::probes_become_what_was_said_of_them",
    "features::functions_in_rust_take_probes_and_are_as_they_were_afterwards",
    "features::functions_that_return_through_a_thunk_are_probed_like_any_other",
    "features::tasks_that_are_preempted_lazily_are_all_counted",
    "hist::every_hit_is_counted_with_and_without_exits",
    "kernels::counts",
    "kernels::kaslr",
    "kernels::mechanisms",
    "kernels::modules",
    "kernels::returns",
    "kernels::returns_without_exits",
    "kexec::probes_are_gone_with_the_kernel_that_a_panic_leaves",
    "modules::arguments::histograms_and_stacks_wait_with_the_probes_of_a_module",
    "modules::builds::files_of_a_module_lead_to_the_build_that_they_are_of",
    "oops::an_oops_names_the_probed_function",
    "optimized::every_call_of_busy_vcpus_is_counted_while_the_probe_changes_its_mechanism",
    "optimized::hot_functions_carry_jumps_further_in_too",
    "pause::a_guest_that_was_paused_sees_no_stall",
    "pause::a_large_guest_that_was_paused_for_long_sees_no_stall",
    "probes::hundreds_of_probes_all_over_the_kernel_leave_the_guest_sound",
    "returns::hits_and_missed_are_the_calls_on_one_and_two_vcpus",
    "script::maps_are_those_of_the_guests_own_histograms",
    "script::traces_carry_out_scripts_for_as_long_as_they_run",
    "script::what_the_guest_has_not_is_shown_in_the_script",
    "stacks::modules::functions_of_modules_are_named_in_printed_stacks",
    "stacks::stacks_are_printed_with_their_functions_though_the_guest_has_ended",
    "stacks::stacks_are_those_that_the_guests_own_kernel_records",
    "stress::every_call_of_four_vcpus_is_accounted_for_while_jumps_and_breakpoints_take_turns",
    "stress::every_call_of_four_vcpus_is_accounted_for_while_probes_come_and_go",
    "syscalls::calls_take_what_the_guests_own_events_say",
];

/// Test programs that need not run in a rig for every change if they ran on this machine: those about servers and
/// threads, and one that tries the same instructions on any processor.
const OF_SERVERS: [&str; 5] = [
    "micro_decide",
    "micro_differential",
    "micro_fleet",
    "micro_host",
    "micro_panics",
];

/// Returns those of [`OF_SERVERS`] that are left to `cargo lab nightly` in the rig, because all their tests ran on
/// this machine. `skipped` lists the tests that were skipped on this machine.
pub(crate) fn left_in_rig(skipped: &[String]) -> Vec<&'static str> {
    let ran = |name: &&str| !skipped.iter().any(|line| line.starts_with(*name));
    OF_SERVERS.into_iter().filter(ran).collect()
}

/// Prefixes of the names of test programs, and of modules of the test program `rig`, that need not run with every
/// guest kernel: their kernel is synthetic, or they test the clients of a server. Other tests check what depends on
/// the guest's kernel.
const OF_NO_KERNEL: [&str; 4] = ["api::", "cli::", "cli_vm::", "micro_"];

/// Returns whether the result of the program or test `name` may depend on the guest's kernel.
pub(crate) fn asks_the_kernel(name: &str) -> bool {
    !OF_NO_KERNEL.iter().any(|begins| name.starts_with(begins))
}

/// Approximate time of a module's tests in an emulated machine, in seconds, without the [`NIGHTLY`] tests.
const SECONDS: [(&str, usize); 31] = [
    ("actions::", 22),
    ("api::", 55),
    ("boot::", 24),
    ("churn::", 18),
    ("cli::", 45),
    ("cli_vm::", 33),
    ("coexist::", 48),
    ("conformance::", 5),
    ("control::", 25),
    ("definitions::", 38),
    ("events_files::", 10),
    ("explain::", 5),
    ("features::", 9),
    ("hist::", 20),
    ("kernels::", 1),
    ("kexec::", 13),
    ("modules::", 27),
    ("nmi::", 20),
    ("oops::", 1),
    ("optimized::", 30),
    ("probes::", 32),
    ("reads::", 13),
    ("returns::", 58),
    ("scale::", 31),
    ("script::", 18),
    ("soak::", 20),
    ("stacks::", 31),
    ("stress::", 50),
    ("stripped::", 1),
    ("stuck::", 14),
    ("syscalls::", 10),
];

/// Returns the approximate time of a group in an emulated machine, in seconds. The time decides how groups are
/// divided among machines that run in parallel, so that these end at about the same time.
pub(crate) fn seconds(group: &Group) -> usize {
    let known = SECONDS.iter().find(|(name, _)| group.name == *name);
    // The other groups are of micro-kernels, whose tests are short.
    known.map_or(group.tests.len(), |(_, seconds)| *seconds)
}

/// Removes the [`NIGHTLY`] tests from `tests`, and returns them.
pub(crate) fn leave_to_the_night(tests: &mut Vec<String>) -> Vec<String> {
    tests
        .extract_if(.., |test| NIGHTLY.contains(&test.as_str()))
        .collect()
}

/// Divides the tests of one program into groups. The groups are in the order of their first tests.
pub(crate) fn of(tests: Vec<String>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for test in tests {
        let module = test.find("::").map_or(0, |at| at + 2);
        let name = test[..module].to_owned();
        let is_alone = ALONE.iter().any(|begins| test.starts_with(begins));
        let same = |group: &&mut Group| group.name == name && group.is_alone == is_alone;
        match groups.iter_mut().find(same) {
            Some(group) => group.tests.push(test),
            None => groups.push(Group {
                name,
                tests: vec![test],
                is_alone,
            }),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// If a test were renamed but not its entry in the list, the test would run for every change.
    #[test]
    fn tests_that_are_left_to_the_night_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/rig");
        for test in NIGHTLY {
            let (module, name) = test.rsplit_once("::").unwrap();
            let file = module.replace("::", "/") + ".rs";
            let source = std::fs::read_to_string(root.join(file)).unwrap();
            assert!(source.contains(&format!("fn {name}()")), "{test}");
        }
        for (module, _) in SECONDS {
            let file = root.join(module.trim_end_matches(':')).with_extension("rs");
            assert!(file.exists(), "{module}");
        }
        let mut tests = vec!["a".to_owned(), NIGHTLY[0].to_owned()];
        assert_eq!(leave_to_the_night(&mut tests), [NIGHTLY[0]]);
        assert_eq!(tests, ["a"]);
    }

    #[test]
    fn what_no_kernel_makes_otherwise_is_recognized_by_its_name() {
        for name in ["rig-0a1b", "returns::a", "clients::b"] {
            assert!(asks_the_kernel(name), "{name}");
        }
        for name in ["micro_fleet-0a1b", "api::killed::c", "cli::d", "cli_vm::e"] {
            assert!(!asks_the_kernel(name), "{name}");
        }
    }

    #[test]
    fn what_was_skipped_here_is_not_left_out_in_the_rig() {
        assert_eq!(left_in_rig(&[]), OF_SERVERS);
        let skipped = ["micro_fleet-0a1b: a".to_owned(), "hvprobe: b".to_owned()];
        let left = left_in_rig(&skipped);
        assert!(
            left.len() == 4 && !left.contains(&"micro_fleet"),
            "{left:?}"
        );
    }

    #[test]
    fn tests_of_a_module_are_a_group_without_those_that_are_alone() {
        let tests = [
            "boot::a",
            "clock::a",
            "boot::a_probe",
            "boot::b",
            "c",
            "clock::b::c",
            "d",
        ];
        let groups = of(tests.map(str::to_owned).to_vec());
        let groups: Vec<_> = groups
            .iter()
            .map(|it| (it.name.as_str(), it.tests.join(" "), it.is_alone))
            .collect();
        let expected = [
            ("boot::", "boot::a boot::b", false),
            ("clock::", "clock::a clock::b::c", true),
            ("boot::", "boot::a_probe", true),
            ("", "c d", false),
        ];
        assert_eq!(
            groups,
            expected.map(|(name, tests, alone)| (name, tests.to_owned(), alone))
        );
    }
}
