//! Compiled scripts.

use super::*;

#[test]
fn conditions_keys_and_values_become_a_definition_and_a_histogram() {
    check(
        "kprobe:vfs_read /arg2 > 100/ { @[comm] = hist(arg2); }",
        expect![[r#"
            p vfs_read arg2=$arg3:d if arg2 > 100
            @ Powers
              keys=comm,arg2.bits:size=131072 of [0]: [Key(0)]
        "#]],
    );
    check(
        "kretprobe:vfs_read /retval >= 0 && (pid == 1 || !(comm == \"dd\"))/ {
            @bytes[tid, str(args.file->f_path.dentry->d_name.name)] = sum(retval);
            @slow = lhist(duration, 0, 10000, 1000);
        }",
        expect![[r#"
            r vfs_read retval=$retval:d s_args_file_f_path_dentry_d=+0(file->f_path.dentry->d_name.name):string if retval >= 0 && (tgid == 1 || !(comm == "dd"))
            @bytes Sum
              keys=common_pid,s_args_file_f_path_dentry_d:vals=retval:size=131072 of [0]: [Key(0), Key(1)]
            @slow Steps { min: 0, max: 10000, step: 1000 }
              keys=duration.buckets=1000:size=131072 of [0]: []
        "#]],
    );
}

#[test]
fn what_only_bpftrace_needs_is_passed_over() {
    check(
        "#!/usr/bin/env bpftrace
#ifndef BPFTRACE_HAVE_BTF
#include <linux/fs.h>
#define TWO \\
    kprobe:none { }
#endif
config = { max_map_keys = 2; log_size = 1000000 }
interval:5s, interval:100ms { time(); }
config = { }
kprobe:vfs_read {
# pragma once
    // of C:\\
    @ = count();
  # if TWO
  #  ifdef ONE /* none */
#else
    // neither
  #endif
    #endif
    #! of C:\\
    @x = count();
}",
        expect![[r#"
            p vfs_read
            @ Hits
              keys=probe:size=131072 of [0]: []
            @x Hits
              keys=probe:size=131072 of [0]: []
            every 5000 ms: [Time("%H:%M:%S\n")]
            every 100 ms: [Time("%H:%M:%S\n")]
        "#]],
    );
}

#[test]
fn the_kernel_is_a_module_of_its_own() {
    check(
        "kprobe:vmlinux:vfs_read, kretprobe:vmlinux:vfs_rea* { @[func] = count(); }",
        expect![[r#"
            p vmlinux:vfs_read
            r vmlinux:vfs_rea*
            @ Hits
              keys=probe:size=131072 of [0, 1]: [Function(0)]
        "#]],
    );
}

#[test]
fn several_probes_count_in_one_map() {
    check(
        "kprobe:vfs_read, kprobe:vfs_write, kretprobe:ext4:ext4_* { @[func, probe] = count(); }
         kprobe:vfs_open { @[func, probe] = count() }
         kprobe:vfs_fsync { @[\"sync\", 7] = count(); @[ksym(arg0), kstack] = count() }",
        expect![[r#"
            p vfs_read
            p vfs_write
            r ext4:ext4_*
            p vfs_open
            p vfs_fsync arg0=$arg1:d (stacks)
            @ Hits
              keys=probe,probe:size=131072 of [0, 1, 2, 3]: [Function(0), Probe(1)]
              keys=probe:size=131072 of [4]: [Text("sync"), Number(7)]
              keys=arg0.sym,stacktrace:size=131072 of [4]: [Symbol(0), Key(1)]
        "#]],
    );
    check(
        "kprobe:a { @ = count(); @ = count(); @x = avg(arg0); @y = min(arg0); @z = max(args.b); }",
        expect![[r#"
            p a arg0=$arg1:d args_b=b
            @ Hits
              keys=probe:size=131072 of [0]: []
              keys=probe:size=131072 of [0]: []
            @x Average
              keys=probe:vals=arg0:size=131072 of [0]: []
            @y Least
              keys=probe:vals=arg0:size=131072 of [0]: []
            @z Greatest
              keys=probe:vals=args_b:size=131072 of [0]: []
        "#]],
    );
}

#[test]
fn what_is_printed_is_left_to_the_client() {
    check(
        r#"#!/usr/bin/env hvprobe
        BEGIN { printf("begun\n"); }
        kprobe:do_sys_openat2 { // who
            printf("%-6d %s %s\n", pid, comm, str(arg1)); time("%H:%M\n"); @ = count()
        }
        /* and
           then */
        interval:s:5, interval:ms:100 { print(@, 3); clear(@); }
        END { delete(@); printf("%d%%\n", elapsed); exit(); time(); }"#,
        expect![[r#"
            p do_sys_openat2 s_arg1=+0($arg2):string
              Printf { format: Format { pieces: [Directive(Directive { left: true, zeros: false, alternate: false, plus: false, width: 6, precision: None, conversion: Signed }), Text(" "), Directive(Directive { left: false, zeros: false, alternate: false, plus: false, width: 0, precision: None, conversion: Text }), Text(" "), Directive(Directive { left: false, zeros: false, alternate: false, plus: false, width: 0, precision: None, conversion: Text }), Text("\n")] }, values: [Builtin(Pid), Builtin(Comm), Argument("s_arg1")] }
              Time("%H:%M\n")
            @ Hits
              keys=probe:size=131072 of [0]: []
            BEGIN: Printf { format: Format { pieces: [Text("begun\n")] }, values: [] }
            END: Clear { map: 0 }
            END: Printf { format: Format { pieces: [Directive(Directive { left: false, zeros: false, alternate: false, plus: false, width: 0, precision: None, conversion: Signed }), Text("%\n")] }, values: [Builtin(Elapsed)] }
            END: Exit
            END: Time("%H:%M:%S\n")
            every 5000 ms: [Print { map: 0, top: Some(3) }, Clear { map: 0 }]
            every 100 ms: [Print { map: 0, top: Some(3) }, Clear { map: 0 }]
        "#]],
    );
}

#[test]
fn what_is_fetched_once_has_one_name() {
    check(
        "k:f /args.a->b && args.a_b != 3/ { @[args.a->b, arg0] = max(arg0); \
         printf(\"%p %s\", arg0, ksym(arg0)); }",
        expect![[r#"
            p f args_a_b=a->b args_a_b_2=a_b arg0=$arg1:d if args_a_b != 0 && args_a_b_2 != 3
              Printf { format: Format { pieces: [Directive(Directive { left: false, zeros: false, alternate: false, plus: false, width: 0, precision: None, conversion: Pointer }), Text(" "), Directive(Directive { left: false, zeros: false, alternate: false, plus: false, width: 0, precision: None, conversion: Text })] }, values: [Argument("arg0"), Symbol("arg0")] }
            @ Greatest
              keys=args_a_b,arg0:vals=arg0:size=131072 of [0]: [Key(0), Key(1)]
        "#]],
    );
}

#[test]
fn names_of_values_are_those_of_filters() {
    check(
        "k:__x64_sys_openat /args.flags & (O_CREAT | O_TRUNC) || args.flags == (O_RDWR|0x40)/ { @ = count(); }
         k:f /HRTIMER_MODE_ABS == args.mode && args.on != true && args.file != NULL/ { @ = count(); }
         kr:f /retval == -EAGAIN && arg1 != NULL && arg2 == true && curtask != 0/ { @x[-EIO] = count(); }",
        expect![[r#"
            p __x64_sys_openat args_flags=flags if args_flags & O_CREAT|O_TRUNC || args_flags == O_RDWR|0x40
            p f args_mode=mode args_on=on args_file=file if args_mode == HRTIMER_MODE_ABS && args_on != true && args_file != NULL
            r f retval=$retval:d arg1=$arg2:d arg2=$arg3:d curtask=$current:u64 if retval == -11 && arg1 != 0 && arg2 == 1 && curtask != 0
            @ Hits
              keys=probe:size=131072 of [0, 1]: []
            @x Hits
              keys=probe:size=131072 of [2]: [Number(-5)]
        "#]],
    );
}

#[test]
fn names_that_nothing_defines_are_refused() {
    let refused = [
        "k:a /pid == uid/ { }",
        "k:a /uid == 0/ { }",
        "k:a /uid/ { }",
        "k:a /O_RDWR|O_CREAT == 2/ { }",
        "k:a /arg0 == SOME/ { }",
        "k:a /comm == bash/ { }",
        "k:a /args.a == -EAGIAN/ { }",
        "k:a /args.a & A|B/ { }",
        "k:a /args.a & (A|)/ { }",
        "k:a /args.a & (A||B)/ { }",
        "k:a /args.a & (4|A)/ { }",
        "k:a /(A|B) == args.a/ { }",
        "k:a /args.a == A B/ { }",
        "k:a { @[SOME] = count(); }",
        "k:a { printf(\"%d\", SOME); }",
    ];
    expect![[r#"
        line 1: `uid` is no value; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
        k:a /pid == uid/ { }
                    ^
        line 1: `uid` is no value; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
        k:a /uid == 0/ { }
             ^
        line 1: `uid` is no value; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
        k:a /uid/ { }
             ^
        line 1: names of several bits stand in parentheses: VALUE & (NAME|NAME)
        k:a /O_RDWR|O_CREAT == 2/ { }
                   ^
        line 1: `SOME` is no value, and names of values are known of args.NAME only; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
        k:a /arg0 == SOME/ { }
                     ^
        line 1: it is a text: compare it with one, in quotes
        k:a /comm == bash/ { }
             ^
        line 1: no error is called `EAGIAN`
        k:a /args.a == -EAGIAN/ { }
                       ^
        line 1: names of several bits stand in parentheses: VALUE & (NAME|NAME)
        k:a /args.a & A|B/ { }
                       ^
        line 1: the name of a value, or a number, belongs here
        k:a /args.a & (A|)/ { }
                         ^
        line 1: `|` or `)` belongs here
        k:a /args.a & (A||B)/ { }
                        ^
        line 1: not supported: casts and calculating; write the value alone
        k:a /args.a & (4|A)/ { }
                      ^
        line 1: names of several bits stand in parentheses: VALUE & (NAME|NAME)
        k:a /(A|B) == args.a/ { }
               ^
        line 1: `&&`, `||` or the `/` behind the condition belongs here
        k:a /args.a == A B/ { }
                         ^
        line 1: `SOME` is no value; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
        k:a { @[SOME] = count(); }
                ^
        line 1: `SOME` is no value; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
        k:a { printf("%d", SOME); }
                           ^
    "#]].assert_eq(&refused.map(outcome).concat());
}

#[test]
fn errors_of_what_was_made_are_those_of_the_script() {
    let text = "kprobe:vfs_read /arg1 == 2/ { @[comm] = sum(args.nothing); }";
    let program = compile(text, &read_script(text).unwrap()).unwrap();
    let place = |written: &Written, part: &str| {
        let column = written.text.find(part).expect("it is there");
        let message = String::new();
        let error = written.in_script(hvprobe_error(column, message));
        text.split_at(error.column).1.to_owned()
    };
    let definition = &program.probes[0].written;
    assert!(place(definition, "fs_read").starts_with("fs_read /"));
    assert!(place(definition, "$arg2").starts_with("arg1 == 2"));
    assert!(place(definition, "nothing").starts_with("args.nothing"));
    assert!(place(definition, "== 2").starts_with("arg1 == 2"));
    let histogram = &program.maps[0].counted[0].histogram;
    assert!(place(histogram, "comm").starts_with("comm]"));
    assert!(place(histogram, "args_nothing").starts_with("args.nothing"));
    assert!(place(histogram, "size").starts_with("@[comm]"));
}

fn hvprobe_error(column: usize, message: String) -> crate::ParseError {
    crate::ParseError { column, message }
}

#[test]
fn times_of_calls_are_those_that_return_probes_have() {
    check(
        "kprobe:vfs_read { @start[tid] = nsecs; }
         kretprobe:vfs_read /@start[tid]/ { @ns[comm] = hist(nsecs - @start[tid]); delete(@start[tid]); }
         END { clear(@start); }",
        expect![[r#"
            r vfs_read
            @ns Powers
              keys=comm,duration.bits:size=131072 of [0]: [Key(0)]
        "#]],
    );
    check(
        "k:vfs_read, k:vfs_write /pid == 7 && arg2 > 5/ { @s[tid] = nsecs; @ = count(); }
         kr:vfs_write /@s[tid] && retval > 0/ { printf(\"%d\\n\", nsecs - @s[tid]); delete(@s, tid); }",
        expect![[r#"
            p vfs_read arg2=$arg3:d if tgid == 7 && arg2 > 5
            p vfs_write arg2=$arg3:d if tgid == 7 && arg2 > 5
            r vfs_write arg2=$arg3:d retval=$retval:d if tgid == 7 && arg2 > 5 && retval > 0
              Printf { format: Format { pieces: [Directive(Directive { left: false, zeros: false, alternate: false, plus: false, width: 0, precision: None, conversion: Signed }), Text("\n")] }, values: [Builtin(Duration)] }
            @ Hits
              keys=probe:size=131072 of [0, 1]: []
        "#]],
    );
    let refused = [
        "k:a { @s[tid] = nsecs; }",
        "kr:a { @ = hist(nsecs - @s[tid]); }",
        "k:a { @s[tid] = nsecs; } kr:b { @ = hist(nsecs - @s[tid]); }",
        "k:a { @s[tid] = nsecs; } k:b { @ = hist(nsecs - @s[tid]); }",
        "k:a /pid == 1/ { @s[tid] = nsecs; } kr:a { @ = hist(nsecs - @s[tid]); }",
        "k:a /pid == 1/ { @s[tid] = nsecs; } k:b { @s[tid] = nsecs; }",
        "k:a { @s[tid] = nsecs; } kr:a /!@s[tid]/ { @ = count(); }",
        "k:a { @s[tid] = nsecs; } kr:a /@s[tid] || pid == 1/ { @ = count(); }",
        "k:a { @s[tid] = nsecs; } k:a /@s[tid]/ { @ = count(); }",
        "k:a { @s[tid] = nsecs; @s[tid] = count(); }",
        "kr:a { @s[tid] = nsecs; }",
        "BEGIN { @s[tid] = nsecs; }",
        "kr:a { delete(@s[tid]); }",
        "k:a { @s[tid] = nsecs; } k:b { delete(@s[tid]); } kr:a /@s[tid]/ { @ = count(); }",
        "k:a { @s[tid] = nsecs; } kr:b { delete(@s[tid]); } kr:a { @ = hist(nsecs - @s[tid]); }",
        "k:a { @s[tid] = nsecs; } kr:a { delete(@s[tid]); @ = hist(nsecs - @s[tid]); }",
        "k:a { @s[tid] = nsecs; } kr:a /retval < 0/ { delete(@s, tid); } kr:a { @ = hist(nsecs - @s[tid]); }",
        "k:a { @s[tid] = nsecs; } kr:a { @ = hist(nsecs - @s[tid]); } END { delete(@s[tid]); }",
        "k:a { @s[tid] = nsecs; } kr:a { @ = hist(nsecs - @s[tid]); } interval:s:1 { clear(@s); }",
        "k:a { @s[pid] = nsecs; }",
        "kr:a /@s[tid] > 5/ { @ = count(); }",
        "kr:a /@s[pid]/ { @ = count(); }",
        "kr:a { @ = hist(nsecs - 5); }",
    ];
    expect![[r#"
        line 1: nothing uses the times in @s: write kretprobe:FUNC { @ = hist(nsecs - @s[tid]); }
        k:a { @s[tid] = nsecs; }
              ^
        line 1: nothing keeps a time in @s: write kprobe:FUNC { @s[tid] = nsecs; }
        kr:a { @ = hist(nsecs - @s[tid]); }
                        ^
        line 1: @s is not kept at the entry of b, which returns here
        k:a { @s[tid] = nsecs; } kr:b { @ = hist(nsecs - @s[tid]); }
                                                 ^
        line 1: only calls that return have it: write kretprobe
        k:a { @s[tid] = nsecs; } k:b { @ = hist(nsecs - @s[tid]); }
                                                ^
        line 1: not all calls have a time in @s: ask for it, /@s[tid]/
        k:a /pid == 1/ { @s[tid] = nsecs; } kr:a { @ = hist(nsecs - @s[tid]); }
                                                            ^
        line 1: @s is kept on another condition before
        k:a /pid == 1/ { @s[tid] = nsecs; } k:b { @s[tid] = nsecs; }
                                                  ^
        line 1: not supported: `@s[tid]` but alone, or with `&&` beside it
        k:a { @s[tid] = nsecs; } kr:a /!@s[tid]/ { @ = count(); }
                                        ^
        line 1: not supported: `@s[tid]` but alone, or with `&&` beside it
        k:a { @s[tid] = nsecs; } kr:a /@s[tid] || pid == 1/ { @ = count(); }
                                       ^
        line 1: only calls that return have it: write kretprobe
        k:a { @s[tid] = nsecs; } k:a /@s[tid]/ { @ = count(); }
                                      ^
        line 1: @s has times: count in another map
        k:a { @s[tid] = nsecs; @s[tid] = count(); }
                               ^
        line 1: when a call began is kept at its entry: in kprobe
        kr:a { @s[tid] = nsecs; }
               ^
        line 1: when a call began is kept at its entry: in kprobe
        BEGIN { @s[tid] = nsecs; }
                ^
        line 1: nothing keeps a time in @s: write kprobe:FUNC { @s[tid] = nsecs; }
        kr:a { delete(@s[tid]); }
               ^
        line 1: only calls that return have it: write kretprobe
        k:a { @s[tid] = nsecs; } k:b { delete(@s[tid]); } kr:a /@s[tid]/ { @ = count(); }
                                       ^
        line 1: @s is not kept at the entry of b, which returns here
        k:a { @s[tid] = nsecs; } kr:b { delete(@s[tid]); } kr:a { @ = hist(nsecs - @s[tid]); }
                                        ^
        line 1: the times of a in @s are deleted before: delete them after their last use
        k:a { @s[tid] = nsecs; } kr:a { delete(@s[tid]); @ = hist(nsecs - @s[tid]); }
                                                                  ^
        line 1: the times of a in @s are deleted before: delete them after their last use
        k:a { @s[tid] = nsecs; } kr:a /retval < 0/ { delete(@s, tid); } kr:a { @ = hist(nsecs - @s[tid]); }
                                                                                        ^
        line 1: only calls that return have it: write kretprobe
        k:a { @s[tid] = nsecs; } kr:a { @ = hist(nsecs - @s[tid]); } END { delete(@s[tid]); }
                                                                           ^
        line 1: calls in flight would lose their times in @s: clear it at END
        k:a { @s[tid] = nsecs; } kr:a { @ = hist(nsecs - @s[tid]); } interval:s:1 { clear(@s); }
                                                                                    ^
        line 1: not supported: keeping times but as @NAME[tid] = nsecs; how long a call took is `duration` in kretprobe:FUNC { ... }
        k:a { @s[pid] = nsecs; }
                        ^
        line 1: not supported: comparing what is in a map
        kr:a /@s[tid] > 5/ { @ = count(); }
                      ^
        line 1: not supported: single entries of maps, but for `@NAME[tid]`, when a call began
        kr:a /@s[pid]/ { @ = count(); }
                 ^
        line 1: not supported: calculating with values, but for dividing one by a number where it is counted or printed
        kr:a { @ = hist(nsecs - 5); }
                              ^
    "#]].assert_eq(&refused.map(outcome).concat());
}

#[test]
fn numbers_are_divided_before_they_are_counted_or_printed() {
    check(
        "k:vfs_read { @start[tid] = nsecs; }
         kr:vfs_read { @us[arg2 / 4096] = hist((nsecs - @start[tid]) / 1000); delete(@start[tid]); }",
        expect![[r#"
            r vfs_read arg2=$arg3:d
            @us Powers
              keys=arg2/4096,duration/1000.bits:size=131072 of [0]: [Key(0)]
        "#]],
    );
    check(
        "kr:vfs_read { @ = sum(retval / 1024); @a = lhist(duration / 1000, 0, 100, 10);
            printf(\"%d\", retval / 0x10); }
         END { printf(\"%d\", elapsed / 1000000); }",
        expect![[r#"
            r vfs_read retval=$retval:d
              Printf { format: Format { pieces: [Directive(Directive { left: false, zeros: false, alternate: false, plus: false, width: 0, precision: None, conversion: Signed })] }, values: [Divided { of: Argument("retval"), by: 16 }] }
            @ Sum
              keys=probe:vals=retval/1024:size=131072 of [0]: []
            @a Steps { min: 0, max: 100, step: 10 }
              keys=duration/1000.buckets=10:size=131072 of [0]: []
            END: Printf { format: Format { pieces: [Directive(Directive { left: false, zeros: false, alternate: false, plus: false, width: 0, precision: None, conversion: Signed })] }, values: [Divided { of: Builtin(Elapsed), by: 1000000 }] }
        "#]],
    );
    let refused = [
        "k:a { @ = hist(arg0 / 0); }",
        "k:a { @ = hist(arg0 / arg1); }",
        "k:a { @ = hist(arg0 / 2 / 2); }",
        "k:a { @ = hist(comm / 2); }",
        "k:a { @ = hist(str(arg0) / 2); }",
        "k:a { @ = hist(6 / 2); }",
        "k:a { @ = hist((arg0) / 2); }",
        "k:a { @ = hist((nsecs / 2); }",
        "k:a { @ = hist(elapsed / 2); }",
        "k:a { @s[tid] = nsecs; } kr:a { @ = hist(nsecs - @s[tid] / 1000); }",
        "k:a { @ = hist(duration / 1000); }",
        "k:a /arg0 / 2 == 1/ { @ = count(); }",
    ];
    expect![[r#"
        line 1: nothing can be divided by 0
        k:a { @ = hist(arg0 / 0); }
                              ^
        line 1: not supported: dividing by anything but a number
        k:a { @ = hist(arg0 / arg1); }
                              ^
        line 1: not supported: calculating with values, but for dividing one by a number where it is counted or printed
        k:a { @ = hist(arg0 / 2 / 2); }
                                ^
        line 1: only numbers that hits have can be divided
        k:a { @ = hist(comm / 2); }
                            ^
        line 1: only numbers that hits have can be divided
        k:a { @ = hist(str(arg0) / 2); }
                                 ^
        line 1: only numbers that hits have can be divided
        k:a { @ = hist(6 / 2); }
                         ^
        line 1: not supported: casts and calculating; write the value alone
        k:a { @ = hist((arg0) / 2); }
                       ^
        line 1: `)` belongs here
        k:a { @ = hist((nsecs / 2); }
                              ^
        line 1: not supported in maps: `elapsed`; write nsecs
        k:a { @ = hist(elapsed / 2); }
                       ^
        line 1: write (nsecs - @s[tid]) / NUMBER
        k:a { @s[tid] = nsecs; } kr:a { @ = hist(nsecs - @s[tid] / 1000); }
                                                                 ^
        line 1: only calls that return have it: write kretprobe
        k:a { @ = hist(duration / 1000); }
                       ^
        line 1: `{` and what is to be done belong here
        k:a /arg0 / 2 == 1/ { @ = count(); }
                    ^
    "#]]
    .assert_eq(&refused.map(outcome).concat());
}
