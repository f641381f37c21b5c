use expect_test::{Expect, expect};

use super::*;

fn check(programs: &[&str], files: &[&str], expected: Expect) {
    let folder = tempfile::tempdir().unwrap();
    let path = |index: usize| folder.path().join(format!("{index}.bt"));
    for (index, text) in files.iter().enumerate() {
        std::fs::write(path(index), text).unwrap();
    }
    let args = ScriptArgs {
        programs: programs.iter().map(|&text| text.to_owned()).collect(),
        scripts: (0..files.len()).map(path).collect(),
    };
    let outcome = match Script::read(&args) {
        Ok(None) => "nothing".to_owned(),
        Ok(Some(script)) => {
            let specs = script.specs(&HitArgs::default(), &HoldArgs::default());
            let specs = specs.unwrap().into_iter().map(|spec| spec.definition);
            specs.collect::<Vec<_>>().join("\n")
        }
        Err(error) => error.0,
    };
    expected.assert_eq(&outcome.replace(&folder.path().display().to_string(), "$FOLDER"));
}

#[test]
fn programs_and_files_are_one_script() {
    check(&[], &[], expect!["nothing"]);
    check(
        &["kprobe:a { @ = count(); }", "END { clear(@); }"],
        &["#!/usr/bin/env bpftrace\nkprobe:b { @ = count(); }\n"],
        expect![[r#"
            p a
            p b"#]],
    );
}

#[test]
fn clauses_of_returns_are_registered_in_reverse_so_that_they_run_in_their_order() {
    check(
        &["kretprobe:a { } kprobe:b { } kretprobe:a, kprobe:c { } kretprobe:d { }"],
        &[],
        expect![[r#"
            p b
            p c
            r d
            r a
            r a"#]],
    );
}

#[test]
fn probes_are_found_by_what_the_server_answers_to_their_registration() {
    let args = ScriptArgs {
        programs: vec!["kretprobe:a { } kprobe:b_* { } kprobe:c { }".to_owned()],
        scripts: Vec::new(),
    };
    let script = Script::read(&args).unwrap().unwrap();
    // The return probe is registered last. The pattern gave two probes, and one definition was skipped.
    let expected = HashMap::from([(7, 1), (8, 1), (9, 0)]);
    let found = script.positions(&[7, 8, 9], &[0, 0, 2]);
    assert_eq!(found.unwrap(), expected);
    for (entries, why) in [
        (vec![0, 3], "the server has registered no probe 3"),
        (
            vec![0],
            "the server has registered 2 probes and named 1 of them",
        ),
        (
            Vec::new(),
            "the server has registered 2 probes and named 0 of them",
        ),
    ] {
        let error = script.positions(&[7, 8], &entries).unwrap_err();
        assert_eq!(error.to_string(), why);
    }
}

#[test]
fn only_what_the_script_takes_is_recorded() {
    let args = ScriptArgs {
        programs: vec!["kprobe:a { } kprobe:b { @ = sum(arg0); }".to_owned()],
        scripts: Vec::new(),
    };
    let script = Script::read(&args).unwrap().unwrap();
    for spec in script
        .specs(&HitArgs::default(), &HoldArgs::default())
        .unwrap()
    {
        let registers = spec.actions.and_then(|actions| actions.registers);
        assert_eq!(registers.map(|set| set.registers.len()), Some(0));
        assert!(!spec.default_arguments);
    }
}

#[test]
fn mistakes_are_shown_in_the_part_where_they_are() {
    check(
        &["kprobe:a {", "}"],
        &[],
        expect![[r#"
        bad -e: this clause has no end: missing `}`
          kprobe:a {
                   ^"#]],
    );
    check(
        &["kprobe:a { @ = count(); }"],
        &[
            "kprobe:b { }\n",
            "\nkprobe:c { }\nkprobe:d { @ = sum(arg0); }",
        ],
        expect![[r#"
            bad script in $FOLDER/1.bt:3: @ is assigned something else before
              kprobe:d { @ = sum(arg0); }
                         ^"#]],
    );
    check(
        &[],
        &["kprobe:b {\n  @ = sum(x);\n}"],
        expect![[r#"
        bad script in $FOLDER/0.bt:2: `x` is no value; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
            @ = sum(x);
                    ^"#]],
    );
}

#[test]
fn stacks_are_recorded_where_they_are_asked_for() {
    let args = ScriptArgs {
        programs: vec!["kprobe:a { @[kstack] = count(); } kprobe:b { }".to_owned()],
        scripts: Vec::new(),
    };
    let script = Script::read(&args).unwrap().unwrap();
    let specs = script.specs(&HitArgs::default(), &HoldArgs::default());
    let items = specs.unwrap().into_iter().map(|spec| {
        let captured = spec.actions.map(|actions| actions.capture.len());
        captured.unwrap_or(0)
    });
    assert_eq!(items.collect::<Vec<_>>(), [1, 0]);
}

#[test]
fn what_a_server_refuses_is_shown_in_the_script() {
    let args = ScriptArgs {
        programs: vec!["kprobe:a { @ = sum(args.nothing); }".to_owned()],
        scripts: Vec::new(),
    };
    let script = Script::read(&args).unwrap().unwrap();
    let text = &script.program.probes[0].written.text;
    let column = text.find("=nothing").unwrap() + 1;
    let error = script.wrong_in(
        &script.program.probes[0].written,
        ParseError {
            column,
            message: "no such thing".to_owned(),
        },
    );
    expect![[r#"
        bad -e: no such thing
          kprobe:a { @ = sum(args.nothing); }
                             ^"#]]
    .assert_eq(&error.0);
}
