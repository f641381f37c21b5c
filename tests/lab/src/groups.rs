//! Which tests of a rig run in one process.
//!
//! Tests of a module share guests (`tests/src/rig/shared.rs`), which end with the process. What is to have the
//! machine for itself is in groups of its own.

use crate::job::Group;

/// How the names of tests begin that hold the time of a guest against that of its host, or keep all processors
/// busy.
const ALONE: [&str; 6] = [
    "a_server_ends_all_the_machines",
    "boot::a_probe",
    "clock::",
    "nmi::",
    "pause::",
    "stress::",
];

/// The groups of these tests of one program, in the order of their first ones.
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
    use super::*;

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
