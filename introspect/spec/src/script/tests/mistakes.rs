//! Errors in scripts and their positions.

use super::*;

#[test]
fn what_is_no_script_is_refused_where_it_ends_to_be_one() {
    refused(
        &[
            "",
            " // nothing\n",
            "kprobe",
            "kprobe:",
            "kprobe:vfs_read",
            "kprobe:vfs_read {",
            "kprobe:vfs_read }",
            "kprobe:vfs_read { @ = count() ",
            "kprobe:vfs_read { @ = count() @ = count() }",
            "kprobe:vfs_read {\n  @x\n}",
            "kprobe:vfs_read { @x[ = count(); }",
            "kprobe:vfs_read { @x[pid = count(); }",
            "kprobe:vfs_read { @x[] = count(); }",
            "kprobe:vfs_read { printf(\"a }",
            "kprobe:vfs_read /* why",
            "kprobe:vfs_read / { }",
            "kprobe:vfs_read /pid == 1 { }",
            "kprobe:vfs_read // { }",
            ", kprobe:a {}",
        ],
        expect![[r#"
            line 1: an empty script: write `kprobe:vfs_read { @[comm] = count(); }`

            ^

            line 2: an empty script: write `kprobe:vfs_read { @[comm] = count(); }`

            ^

            line 1: `:FUNCTION` belongs here
            kprobe
                  ^

            line 1: the name of a function, or a pattern, belongs here
            kprobe:
                   ^

            line 1: `{` and what is to be done belong here
            kprobe:vfs_read
                           ^

            line 1: this clause has no end: missing `}`
            kprobe:vfs_read {
                            ^

            line 1: `{` and what is to be done belong here
            kprobe:vfs_read }
                            ^

            line 1: `;` or `}` belongs here
            kprobe:vfs_read { @ = count() 
                                          ^

            line 1: `;` or `}` belongs here
            kprobe:vfs_read { @ = count() @ = count() }
                                          ^

            line 3: `=` belongs here; a map is assigned count(), sum(x), avg(x), min(x), max(x), hist(x) or lhist(x, MIN, MAX, STEP)
            }
            ^

            line 1: a value belongs here; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
            kprobe:vfs_read { @x[ = count(); }
                                  ^

            line 1: `,` or `]` belongs here
            kprobe:vfs_read { @x[pid = count(); }
                                     ^

            line 1: a value belongs here; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
            kprobe:vfs_read { @x[] = count(); }
                                 ^

            line 1: this text has no end: missing `"`
            kprobe:vfs_read { printf("a }
                                     ^

            line 1: this comment has no end: missing `*/`
            kprobe:vfs_read /* why
                            ^

            line 1: a value belongs here; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
            kprobe:vfs_read / { }
                              ^

            line 1: `&&`, `||` or the `/` behind the condition belongs here
            kprobe:vfs_read /pid == 1 { }
                                      ^

            line 1: `{` and what is to be done belong here
            kprobe:vfs_read // { }
                                  ^

            line 1: a probe belongs here: BEGIN, END, interval:s:N, kprobe:FUNC or kretprobe:FUNC
            , kprobe:a {}
            ^
        "#]],
    );
}

#[test]
fn what_makes_no_sense_is_refused_where_it_stands() {
    refused(
        &[
            "BEGIN /pid == 1/ { }",
            "BEGIN, kprobe:a { }",
            "BEGIN { @ = count(); }",
            "BEGIN { printf(\"%d\", pid); }",
            "END { print(@x); }",
            "kprobe:a { print(@x); }",
            "kprobe:a { @x = sum(comm); }",
            "kprobe:a { @x = sum(1); }",
            "kprobe:a { @x = count(); @x = sum(arg0); }",
            "kprobe:a { @x = count(); @x[pid] = count(); }",
            "kprobe:a { @x = sum(retval); }",
            "kprobe:a { @x = hist(duration); }",
            "kprobe:a { @x[elapsed] = count(); }",
            "kprobe:a { @x = lhist(arg0, -5, 10, 5); }",
            "kprobe:a { @x = lhist(arg0, 0, 10, 3); }",
            "kprobe:a { @x = lhist(arg0, 10, 10, 5); }",
            "kprobe:a { @x = lhist(arg0, 0, 5000, 1); }",
            "kprobe:a { @x[arg6] = count(); }",
            "kprobe:a { printf(\"%s\", pid); }",
            "kprobe:a { printf(\"%d\", comm); }",
            "kprobe:a { printf(\"%d %d\", pid); }",
            "kprobe:a { printf(\"a\", pid); }",
            "kprobe:a { printf(\"%f\", pid); }",
            "kprobe:a { printf(\"%5\"); }",
            "kprobe:a { printf(\"%999d\", pid); }",
            "kprobe:a { printf(\"\\q\"); }",
            "kprobe:a { time(\"%Q\"); }",
            "kprobe:a /comm > \"a\"/ { }",
            "kprobe:a /comm == 1/ { }",
            "kprobe:a /pid == \"a\"/ { }",
            "kprobe:a /comm/ { }",
            "kprobe:a /1/ { }",
            "kprobe:a /nsecs > 5/ { }",
            "kprobe:a /comm == \"ü\"/ { }",
            "kprobe:a+16 /arg0 == 1/ { }",
            "kretprobe:a+1 { }",
            "kprobe:a, kprobe:1b { }",
            "kprobe:a*+3 { }",
            "kprobe:a { @x[99999999999999999999] = count(); }",
        ],
        expect![[r#"
            line 1: a condition belongs to kprobe and kretprobe: leave it out
            BEGIN /pid == 1/ { }
                  ^

            line 1: kprobe and kretprobe stand in clauses of their own
            BEGIN, kprobe:a { }
                   ^

            line 1: hits are counted in clauses of kprobe and kretprobe
            BEGIN { @ = count(); }
                    ^

            line 1: there is no hit that has it: only numbers, texts, nsecs and elapsed are printed here
            BEGIN { printf("%d", pid); }
                                 ^

            line 1: nothing is counted in @x
            END { print(@x); }
                  ^

            line 1: not supported at hits; write it in interval:s:N or END
            kprobe:a { print(@x); }
                       ^

            line 1: sum() is of a number
            kprobe:a { @x = sum(comm); }
                                ^

            line 1: this is always the same: write count()
            kprobe:a { @x = sum(1); }
                                ^

            line 1: @x is assigned something else before
            kprobe:a { @x = count(); @x = sum(arg0); }
                                     ^

            line 1: @x has 0 keys before
            kprobe:a { @x = count(); @x[pid] = count(); }
                                     ^

            line 1: only calls that return have it: write kretprobe
            kprobe:a { @x = sum(retval); }
                                ^

            line 1: only calls that return have it: write kretprobe
            kprobe:a { @x = hist(duration); }
                                 ^

            line 1: not supported in maps: `elapsed`; write nsecs
            kprobe:a { @x[elapsed] = count(); }
                          ^

            line 1: not supported: steps below 0; what is less stands in the first row
            kprobe:a { @x = lhist(arg0, -5, 10, 5); }
                                        ^

            line 1: both bounds are multiples of the step
            kprobe:a { @x = lhist(arg0, 0, 10, 3); }
                                               ^

            line 1: the upper bound is more than the lower one, and a signed number
            kprobe:a { @x = lhist(arg0, 10, 10, 5); }
                                            ^

            line 1: lhist has at most 1000 steps
            kprobe:a { @x = lhist(arg0, 0, 5000, 1); }
                            ^

            line 1: there are arg0 to arg5: what a function is passed in registers
            kprobe:a { @x[arg6] = count(); }
                          ^

            line 1: %s prints a text, and this is a number: write %d, or str()
            kprobe:a { printf("%s", pid); }
                                    ^

            line 1: %d prints a number, and this is a text: write %s
            kprobe:a { printf("%d", comm); }
                                    ^

            line 1: the format has 2 directives for 1 values
            kprobe:a { printf("%d %d", pid); }
                              ^

            line 1: the format has 0 directives for 1 values
            kprobe:a { printf("a", pid); }
                                   ^

            line 1: `%f` is not supported; there are %d %u %x %X %o %p %c %s and %%
            kprobe:a { printf("%f", pid); }
                                ^

            line 1: a letter of the directive is missing: write %% for `%`
            kprobe:a { printf("%5"); }
                                 ^

            line 1: at most 256 characters
            kprobe:a { printf("%999d", pid); }
                                  ^

            line 1: behind `\` there can be n, t, r, " and \
            kprobe:a { printf("\q"); }
                               ^

            line 1: there are %H %M %S %T %Y %m %d %F %j %s and %%
            kprobe:a { time("%Q"); }
                             ^

            line 1: texts are compared with == and !=
            kprobe:a /comm > "a"/ { }
                           ^

            line 1: it is a text: compare it with one, in quotes
            kprobe:a /comm == 1/ { }
                      ^

            line 1: it is a number: compare it with one, or write str() for the text there
            kprobe:a /pid == "a"/ { }
                      ^

            line 1: this is no condition: compare it with something
            kprobe:a /comm/ { }
                      ^

            line 1: this is no condition: compare it with something
            kprobe:a /1/ { }
                      ^

            line 1: not supported in a condition; there are pid, tid, comm, cpu, arg0 to arg5, args.NAME, retval, curtask and str()
            kprobe:a /nsecs > 5/ { }
                      ^

            line 1: compared are at most 255 characters of ASCII without quotes
            kprobe:a /comm == "ü"/ { }
                              ^

            line 1: $arg* can be used only on function entry or exit
            kprobe:a+16 /arg0 == 1/ { }
                         ^

            line 1: a return probe begins at the function's entry: leave out the offset
            kretprobe:a+1 { }
                       ^

            line 1: a symbol starts with no digit, an address with 0x
            kprobe:a, kprobe:1b { }
                             ^

            line 1: an offset belongs to one function: a pattern has none
            kprobe:a*+3 { }
                     ^

            line 1: the number does not fit 64 bits
            kprobe:a { @x[99999999999999999999] = count(); }
                          ^
        "#]],
    );
}

#[test]
fn bounds_keep_what_is_read_small() {
    let head = |text: &str| outcome(text).lines().next().unwrap_or_default().to_owned();
    let deep = format!("kprobe:a /{}1/ {{ }}", "(".repeat(40_000));
    let nots = format!("kprobe:a /{}pid/ {{ }}", "!".repeat(40_000));
    let tests = format!("kprobe:a /pid{}/ {{ }}", "&&pid".repeat(1000));
    let clauses = "kprobe:a{}".repeat(1000);
    let points = format!("kprobe:a{} {{ }}", ",kprobe:a".repeat(1000));
    let statements = format!("kprobe:a {{ {} }}", "exit();".repeat(1000));
    let maps: String = (0..100).map(|at| format!("@m{at}=count();")).collect();
    let maps = format!("kprobe:a {{ {maps} }}");
    let long = format!("kprobe:a {{ @x[args.{}] = count(); }}", "a".repeat(1000));
    let fetched: String = (0..50)
        .map(|at| format!("@[args.argument_{at}]=count();"))
        .collect();
    let fetched = format!("kprobe:a {{ {fetched} }}");
    let symbol = format!("kprobe:{} {{ }}", "a".repeat(600));
    let all = [
        deep,
        nots,
        tests,
        clauses,
        points,
        statements,
        maps,
        long,
        fetched,
        symbol,
        " ".repeat(SCRIPT_MAX + 1),
        "kprobe:a { @x[1,2,3,4,5,6,7,8] = count(); }".to_owned(),
        format!("kprobe:a {{ printf(\"{}\"); }}", "a".repeat(2000)),
    ];
    let all: Vec<_> = all.iter().map(|text| head(text)).collect();
    expect![[r#"
        line 1: at most 32 parentheses and `!`
        line 1: at most 32 parentheses and `!`
        line 1: at most 64 comparisons
        line 1: a script has at most 256 clauses
        line 1: a clause has at most 256 probes
        line 1: a clause has at most 256 statements
        line 1: more than 64 maps, or ways to count in them
        line 1: at most 200 characters behind args
        line 1: too much is fetched, or too much compared, in one clause
        line 1: symbol longer than 511 characters
        line 1: a script has at most 64 KiB
        line 1: at most 7 keys
        line 1: a text has at most 1024 characters"#]]
    .assert_eq(&all.join("\n"));
}
