use super::*;

use expect_test::{Expect, expect};

fn book(retries: u32) -> Book {
    Book::new(vec!["a".into(), "b".into(), "c".into()], retries)
}

fn passed(passed: u64) -> Ran {
    Ran::Ended {
        status: 0,
        counts: Counts {
            passed,
            ..Counts::default()
        },
        failures: Vec::new(),
        skipped: Vec::new(),
    }
}

/// Returns the result of a program of three tests, of which `tests` failed.
fn failed(tests: &[&str]) -> Ran {
    let failed = u64::try_from(tests.len()).unwrap();
    Ran::Ended {
        status: 101,
        counts: Counts {
            passed: 3_u64.saturating_sub(failed),
            failed,
            skipped: 0,
        },
        failures: tests
            .iter()
            .map(|test| failure(test, "x.rs:1: no"))
            .collect(),
        skipped: Vec::new(),
    }
}

fn fell(status: u8) -> Ran {
    Ran::Ended {
        status,
        counts: Counts::default(),
        failures: Vec::new(),
        skipped: Vec::new(),
    }
}

fn in_test(test: &str) -> Ran {
    Ran::Unfinished(Some(test.to_owned()))
}

fn failure(test: &str, why: &str) -> Failure {
    Failure {
        test: test.to_owned(),
        why: why.to_owned(),
    }
}

fn broken(reason: &str) -> Finish {
    Finish::Broken(reason.to_owned())
}

/// Compares what is due, and then the closing lines, with `expect`.
fn check(book: &Book, expect: Expect) {
    let mut text = String::new();
    for due in &book.due {
        let tests: Vec<_> = due.again.iter().map(|it| it.test.as_str()).collect();
        text += &format!("due: {} {tests:?}\n", book.names[due.step]);
    }
    for line in &book.flaky {
        text += &format!("flaky: {line}\n");
    }
    for line in &book.failed {
        text += &format!("failed: {line}\n");
    }
    text += &format!("{}\n", book.counts);
    expect.assert_eq(&text);
}

#[test]
fn without_retries_a_failure_is_final() {
    let mut book = book(0);
    book.record(
        vec![passed(3), failed(&["t", "u"]), fell(139)],
        &Finish::Complete,
    );
    check(
        &book,
        expect![[r#"
            failed: b: t
            failed: b: u
            failed: c (status 139)
            4 passed, 3 failed, 0 skipped
        "#]],
    );
}

#[test]
fn failed_test_alone_runs_again_and_passes_with_a_line() {
    let mut book = book(1);
    book.record(
        vec![passed(3), failed(&["t", "u"]), passed(1)],
        &Finish::Complete,
    );
    check(
        &book,
        expect![[r#"
            due: b ["t", "u"]
            5 passed, 0 failed, 0 skipped
        "#]],
    );
    book.record(vec![passed(2)], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            flaky: b: t (passed at the second try; first: x.rs:1: no)
            flaky: b: u (passed at the second try; first: x.rs:1: no)
            7 passed, 0 failed, 0 skipped
        "#]],
    );
}

#[test]
fn what_fails_twice_has_failed() {
    let mut book = Book::new(vec!["a".into()], 1);
    book.record(vec![failed(&["t", "u"])], &Finish::Complete);
    let again = Ran::Ended {
        status: 101,
        counts: Counts {
            passed: 1,
            failed: 1,
            skipped: 0,
        },
        failures: vec![failure("u", "y.rs:2: other")],
        skipped: Vec::new(),
    };
    book.record(vec![again], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            flaky: a: t (passed at the second try; first: x.rs:1: no)
            failed: a: u (2 tries)
            2 passed, 1 failed, 0 skipped
        "#]],
    );
}

#[test]
fn broken_rig_leaves_the_running_program_and_those_after_it_due() {
    let mut book = book(1);
    book.record(
        vec![passed(3), in_test("t"), Ran::NotBegun],
        &broken("the rig stood still"),
    );
    check(
        &book,
        expect![[r#"
            due: b []
            due: c []
            3 passed, 0 failed, 0 skipped
        "#]],
    );
    book.record(vec![passed(3), passed(3)], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            flaky: b: t (passed at the second try; first: did not end: the rig stood still)
            9 passed, 0 failed, 0 skipped
        "#]],
    );
}

#[test]
fn program_that_stands_still_twice_fails_and_those_after_it_still_run() {
    let mut book = book(1);
    book.record(
        vec![passed(1), in_test("t"), Ran::NotBegun],
        &broken("still"),
    );
    book.record(vec![in_test("t"), Ran::NotBegun], &broken("still"));
    check(
        &book,
        expect![[r#"
            due: c []
            failed: b (in t: did not end: still) (2 tries)
            1 passed, 1 failed, 0 skipped
        "#]],
    );
    book.record(vec![passed(1)], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            failed: b (in t: did not end: still) (2 tries)
            2 passed, 1 failed, 0 skipped
        "#]],
    );
}

#[test]
fn rig_that_never_comes_up_uses_up_all_tries() {
    let mut book = book(1);
    let nothing = || vec![Ran::NotBegun, Ran::NotBegun, Ran::NotBegun];
    book.record(nothing(), &broken("no module"));
    book.record(nothing(), &broken("no module"));
    check(
        &book,
        expect![[r#"
            flaky: the rig, between tests: no module
            flaky: the rig, between tests: no module
            failed: a (did not begin: no module) (2 tries)
            failed: b (did not begin: no module) (2 tries)
            failed: c (did not begin: no module) (2 tries)
            0 passed, 3 failed, 0 skipped
        "#]],
    );
}

#[test]
fn rig_that_breaks_after_its_last_test_is_not_passed_over() {
    let mut book = book(1);
    book.record(vec![passed(1), passed(1), passed(1)], &broken("panic"));
    check(
        &book,
        expect![[r#"
            flaky: the rig, between tests: panic
            3 passed, 0 failed, 0 skipped
        "#]],
    );
}

#[test]
fn program_that_fell_over_runs_again_as_a_whole_and_counts_once() {
    let mut book = Book::new(vec!["a".into()], 1);
    // Two tests failed, then the process died: there is no result line.
    let died = Ran::Ended {
        status: 134,
        counts: Counts::default(),
        failures: vec![failure("t", "no"), failure("u", "no")],
        skipped: Vec::new(),
    };
    book.record(vec![died], &Finish::Complete);
    book.record(vec![passed(3)], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            flaky: a (ended at the second try; first: status 134)
            3 passed, 0 failed, 0 skipped
        "#]],
    );
}

#[test]
fn failed_test_that_does_not_run_again_has_not_passed() {
    let mut book = Book::new(vec!["a".into()], 1);
    book.record(vec![failed(&["t", "u"])], &Finish::Complete);
    book.record(vec![passed(1)], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            failed: a (it ran too few tests) (2 tries)
            failed: a: t (x.rs:1: no)
            failed: a: u (x.rs:1: no)
            1 passed, 2 failed, 0 skipped
        "#]],
    );
}

#[test]
fn status_that_contradicts_the_result_is_a_failure() {
    let mut book = book(0);
    let liar = Ran::Ended {
        status: 0,
        counts: Counts {
            passed: 1,
            failed: 1,
            skipped: 0,
        },
        failures: vec![failure("t", "no")],
        skipped: Vec::new(),
    };
    let other = Ran::Ended {
        status: 1,
        counts: Counts {
            passed: 3,
            ..Counts::default()
        },
        failures: Vec::new(),
        skipped: Vec::new(),
    };
    book.record(vec![liar, other, passed(1)], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            failed: a (tests failed, but its status is 0)
            failed: b (status 1)
            1 passed, 2 failed, 0 skipped
        "#]],
    );
}

#[test]
fn first_reason_is_kept_over_several_tries() {
    let mut book = Book::new(vec!["a".into()], 2);
    let alone = |why: &str| Ran::Ended {
        status: 101,
        counts: Counts {
            failed: 1,
            ..Counts::default()
        },
        failures: vec![failure("t", why)],
        skipped: Vec::new(),
    };
    book.record(vec![in_test("t")], &broken("still"));
    book.record(vec![alone("second")], &Finish::Complete);
    book.record(vec![passed(1)], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            flaky: a: t (passed at the third try; first: did not end: still)
            1 passed, 0 failed, 0 skipped
        "#]],
    );
}

#[test]
fn what_is_due_when_the_time_is_over_has_failed() {
    let mut book = book(1);
    book.record(
        vec![failed(&["t"]), Ran::Unfinished(None), Ran::NotBegun],
        &Finish::TimedOut,
    );
    book.give_up();
    check(
        &book,
        expect![[r#"
            failed: a (not run again)
            failed: a: t (x.rs:1: no)
            failed: b (did not end: the time was over)
            failed: c (did not begin)
            2 passed, 3 failed, 0 skipped
        "#]],
    );
}

#[test]
fn arguments_of_a_second_try_name_the_tests_and_keep_options() {
    let arguments: Vec<OsString> = [
        "test",
        "--doc",
        "--",
        SHOW,
        "filter",
        "--exact",
        "--ignored",
        "--skip",
        "slow",
        "--test-threads",
        "2",
        "other",
        "--skip=x",
    ]
    .map(Into::into)
    .to_vec();
    assert_eq!(
        only(&arguments, ["m::t", "u"]),
        [
            "test",
            "--doc",
            "--",
            SHOW,
            "--exact",
            "--ignored",
            "--test-threads",
            "2",
            "m::t",
            "u"
        ]
    );
}

#[test]
fn step_of_one_test_names_it_once() {
    let mut book = Book::new(vec!["a: m::t".into(), "a: u".into(), "a: v".into()], 1);
    let first = vec![failed(&["m::t"]), in_test("u"), Ran::NotBegun];
    book.record(first, &broken("still"));
    let second = vec![passed(1), in_test("u"), failed(&["v"])];
    book.record(second, &broken("still"));
    book.record(vec![passed(1)], &Finish::Complete);
    check(
        &book,
        expect![[r#"
            flaky: a: m::t (passed at the second try; first: x.rs:1: no)
            flaky: a: v (passed at the second try; first: x.rs:1: no)
            failed: a: u (did not end: still) (2 tries)
            6 passed, 1 failed, 0 skipped
        "#]],
    );
}

#[test]
fn what_is_divided_among_lanes_comes_together_again() {
    let mut whole = book(1);
    let due = std::mem::take(&mut whole.due);
    let [a, b, c] = due.try_into().expect("three");
    let mut one = whole.lane(vec![a, c]);
    let mut other = whole.lane(vec![b]);
    one.record(vec![failed(&["x"]), Ran::NotBegun], &broken("it died"));
    other.record(vec![passed(2)], &Finish::Complete);
    let tried: Vec<_> = one.due.iter().map(Due::was_tried).collect();
    assert_eq!(tried, [true, false]);
    whole.take_in(one);
    whole.take_in(other);
    check(
        &whole,
        expect![[r#"
        due: a ["x"]
        due: c []
        flaky: the rig, between tests: it died
        4 passed, 0 failed, 0 skipped
    "#]],
    );
    whole.record(vec![passed(1), passed(4)], &Finish::Complete);
    check(
        &whole,
        expect![[r#"
        flaky: the rig, between tests: it died
        flaky: a: x (passed at the second try; first: x.rs:1: no)
        9 passed, 0 failed, 0 skipped
    "#]],
    );
}

#[test]
fn what_came_of_a_program_is_counted_in_all_its_tries_if_it_began() {
    let mut whole = book(1);
    let due = std::mem::take(&mut whole.due);
    let [a, b, c] = due.try_into().expect("three");
    let mut one = whole.lane(vec![a, c]);
    let mut other = whole.lane(vec![b]);
    one.record(vec![failed(&["x"]), Ran::NotBegun], &broken("it died"));
    other.record(vec![in_test("t")], &broken("it died"));
    whole.take_in(one);
    whole.take_in(other);
    let came = |book: &Book| -> Vec<_> {
        let came = book.results.iter();
        came.map(|it| it.map(|counts| counts.to_string()).unwrap_or_default())
            .collect()
    };
    let first = [
        "2 passed, 0 failed, 0 skipped",
        "0 passed, 0 failed, 0 skipped",
        "",
    ];
    assert_eq!(came(&whole), first);
    whole.due.sort_by_key(|due| due.step);
    whole.record(
        vec![passed(1), in_test("t"), Ran::NotBegun],
        &broken("it died"),
    );
    whole.give_up();
    let last = [
        "3 passed, 0 failed, 0 skipped",
        "0 passed, 1 failed, 0 skipped",
        "",
    ];
    assert_eq!(came(&whole), last);
    assert_eq!(whole.counts.failed, 2, "one did not begin");
}
