//! Invalid definitions and options: each error has a caret under the mistake.

use expect_test::expect;

use super::place::Place;

#[test]
fn bad_definitions_are_shown_with_a_caret_before_anything_is_booted() {
    let place = Place::new();
    for (definition, expected) in [
        (
            "",
            expect![[r#"
                hvprobe: bad definition: empty definition: write `p SYMBOL`, for example `p vfs_read`
                status 2
            "#]],
        ),
        (
            "vfs_read",
            expect![[r#"
                hvprobe: bad definition: a definition starts with `p` or `r`: write `p vfs_read`
                  vfs_read
                  ^
                `perf probe` takes that: give --debug-info, or begin with `p` or `r`
                status 2
            "#]],
        ),
        (
            "p",
            expect![[r#"
            hvprobe: bad definition: missing target: a symbol or address to probe
              p
               ^
            status 2
        "#]],
        ),
        (
            "p vfs_read+",
            expect![[r#"
            hvprobe: bad definition: missing offset after `+`
              p vfs_read+
                         ^
            status 2
        "#]],
        ),
        (
            "p vfs_read+0xzz",
            expect![[r#"
            hvprobe: bad definition: `z` is no digit of the offset
              p vfs_read+0xzz
                           ^
            status 2
        "#]],
        ),
        (
            "p vfs_read-4",
            expect![[r#"
            hvprobe: bad definition: an offset counts from the symbol's start and cannot be negative
              p vfs_read-4
                        ^
            status 2
        "#]],
        ),
        (
            "p:a-b vfs_read",
            expect![[r#"
            hvprobe: bad definition: `-` cannot be here: a name has letters, digits and `_`, and starts with no digit
              p:a-b vfs_read
                 ^
            status 2
        "#]],
        ),
        (
            "r vfs_read+4",
            expect![[r#"
            hvprobe: bad definition: a return probe begins at the function's entry: leave out the offset
              r vfs_read+4
                        ^
            status 2
        "#]],
        ),
        (
            "p20 vfs_read",
            expect![[r#"
            hvprobe: bad definition: the number of calls in flight belongs to return probes: write `r20`
              p20 vfs_read
               ^
            status 2
        "#]],
        ),
        (
            "p kvm-intel:vmx_vcpu_run",
            expect![[r#"
            hvprobe: bad definition: the kernel has `_` where the file of a module has `-`
              p kvm-intel:vmx_vcpu_run
                   ^
            status 2
        "#]],
        ),
        (
            "p 0x",
            expect![[r#"
            hvprobe: bad definition: missing digits of the address
              p 0x
                  ^
            status 2
        "#]],
        ),
        (
            "p 0x11112222333344445",
            expect![[r#"
            hvprobe: bad definition: the address does not fit 64 bits
              p 0x11112222333344445
                ^
            status 2
        "#]],
        ),
        (
            "p vfs_read $retval",
            expect![[r#"
            hvprobe: bad definition: $retval is not available on probe
              p vfs_read $retval
                         ^
            status 2
        "#]],
        ),
        (
            "p vfs\x1b[2Jread",
            expect![[r#"
            hvprobe: bad definition: control character '\u{1b}': a definition is one line of ASCII
              p vfs?[2Jread
                   ^
            status 2
        "#]],
        ),
        (
            "p vfs_re\u{e4}d",
            expect![[r#"
            hvprobe: bad definition: character outside ASCII 'ä': a definition is one line of ASCII
              p vfs_reäd
                      ^
            status 2
        "#]],
        ),
    ] {
        place.check(&["run", "-p", "p vfs_write", "-p", definition], expected);
    }
    for option in [
        ["--capture", "+16(%dj)"],
        ["--capture-return", "%ax"],
        ["--set", "%sp=x"],
        ["--return", "-ENOTHING"],
        ["--jump", "vfs_write"],
        ["--when", "%di=1"],
        ["--maxactive", "5000"],
        ["--hist", "keys=count.log"],
        ["--hist", "vals=count"],
    ] {
        let output = place.run(&[&["run"], &option[..], &["-p", "r vfs_read"]].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        let lines: Vec<_> = said.lines().collect();
        assert_eq!(output.status.code(), Some(2), "{option:?}: {said}");
        let begin = format!("hvprobe: bad {}: ", option[0]);
        assert!(lines[0].starts_with(&begin), "{option:?}: {said}");
        assert_eq!(lines[1], format!("  {}", option[1]));
        assert!(lines[2].trim_start().starts_with('^'), "{option:?}: {said}");
    }
    place.check(
        &["decide", "--answer", "maybe"],
        expect![[r#"
        hvprobe: bad --answer: write proceed, return=VALUE, jump=ADDRESS or a change (%ax=…)
          maybe
          ^
        status 2
    "#]],
    );
    place.check(
        &["decide", "1"],
        expect![[r#"
        hvprobe: there is no terminal to ask at: say what to decide with --answer
        status 2
    "#]],
    );
    place.check(
        &["probe", "add", "p vfs_read+"],
        expect![[r#"
        hvprobe: bad definition: missing offset after `+`
          p vfs_read+
                     ^
        status 2
    "#]],
    );
}

#[test]
fn bad_lines_of_a_file_are_shown_with_their_number() {
    let place = Place::new();
    let events = place.file("events", b"# reads\np vfs_read\n\np:a/b vfs_open x=%dj\n");
    for command in [&["run"][..], &["vm", "boot"], &["probe", "add"]] {
        place.check(
            &[command, &["--events", &events]].concat(),
            expect![[r#"
                hvprobe: bad definition in $PLACE/events:4: Invalid register name
                  p:a/b vfs_open x=%dj
                                   ^
                status 2
            "#]],
        );
    }
    let missing = place.path("missing");
    place.check(
        &["run", "--events", missing.to_str().unwrap()],
        expect![[r#"
            hvprobe: cannot read $PLACE/missing: No such file or directory (os error 2)
            status 2
        "#]],
    );
}

#[test]
fn however_long_what_was_typed_is_little_of_it_is_printed() {
    let place = Place::new();
    let long = "x".repeat(100_000);
    let behind = |words: &str| format!("{words}{long}");
    let file = place.file("file", behind("p a\np ").as_bytes());
    let script = place.file("script", behind("k:a { ").as_bytes());
    let (definition, event, option) = (behind("p "), behind("p a "), behind("--"));
    let with_probe = |option: &str| {
        ["run", "-p", "p a", option, &long]
            .map(str::to_owned)
            .to_vec()
    };
    let mut all: Vec<Vec<String>> = [
        &["run", "-p", &long][..],
        &["run", "-p", &definition],
        &["run", "-p", &event],
        &["run", "--events", &file],
        &["run", "-e", &long],
        &["run", "--script", &script],
        &["run", &long],
        &["run", &option],
        &["doctor", &long],
        &[&long],
        &["run", "--cpus", &long],
        &["run", "--memory", &long],
        &["vm", "boot", "--label", &long],
        &["vm", "list", "--state", &long],
        &["trace", "--filter", &long],
        &["trace", "--pid", &long],
        &["probe", "add", &definition],
        &["probe", "add", "--ask", &long, "p a"],
        &["explain", &definition],
        &["completions", &long],
    ]
    .iter()
    .map(|words| words.iter().map(|word| (*word).to_owned()).collect())
    .collect();
    for option in [
        "--capture",
        "--capture-return",
        "--set",
        "--return",
        "--jump",
        "--when",
        "--maxactive",
        "--mechanism",
        "--max-rate",
        "--max-cpu",
        "--throttle",
        "--filter",
        "--hist",
        "--time",
    ] {
        all.push(with_probe(option));
    }
    for words in all {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = place.run(&words);
        let what = || {
            let words = words.iter().map(|word| &word[..word.len().min(30)]);
            words.collect::<Vec<_>>().join(" ")
        };
        assert!(matches!(output.status.code(), Some(1 | 2)), "{}", what());
        let printed = output.stderr.len() + output.stdout.len();
        assert!(printed < 4096, "{printed} bytes: {}", what());
    }
}
