//! Features of bpftrace that this language lacks, and the messages that refuse them.

use super::*;

#[test]
fn what_bpftrace_has_and_this_has_not_is_refused_by_name() {
    refused(
        &[
            "tracepoint:syscalls:sys_enter_openat { }",
            "fentry:vfs_read { }",
            "uprobe:/bin/sh:readline { }",
            "interval:hz:5 { }",
            "interval:s:0 { }",
            "kprobe:a { $x = 1; }",
            "kprobe:a { if (pid == 1) { } }",
            "kprobe:a { @start[tid] = nsecs; }",
            "kprobe:a { @ns = hist(nsecs - @start[tid]); }",
            "kprobe:a { @x++; }",
            "kprobe:a { @x = stats(arg0); }",
            "kprobe:a { @x = arg0; }",
            "kprobe:a { @x = hist(arg2 / 1024); }",
            "kprobe:a { @x = sum((int32)arg0); }",
            "kprobe:a { @x = sum(*arg0); }",
            "kprobe:a { @x[uid] = count(); }",
            "kprobe:a { @x[kstack(3)] = count(); }",
            "kprobe:a { @x[str(arg0, 16)] = count(); }",
            "kprobe:a { @x[strftime(\"%H\", nsecs)] = count(); }",
            "kprobe:a { @x[args] = count(); }",
            "kprobe:a { delete(@x[pid]); }",
            "kprobe:a { zero(@x); }",
            "kprobe:a { system(\"ls\"); }",
            "kprobe:a { print(@x, 5, 10); }",
            "kprobe:a /strncmp(comm, \"a\", 1) == 0/ { }",
            "kprobe:a /arg0 == arg1/ { }",
            "kprobe:a /(arg0 & 4) == 4/ { }",
            "kprobe:a /arg0 & 4 == 4/ { }",
            "kprobe:a /!arg0 == 4/ { }",
            "kprobe:a /@x[tid]/ { }",
            "kprobe:a /pid == $1/ { }",
        ],
        expect![[r#"
            line 1: not supported: probes of `tracepoint`; write kprobe:FUNC; for system calls kprobe:__x64_sys_NAME and its args.NAME
            tracepoint:syscalls:sys_enter_openat { }
            ^

            line 1: not supported: probes of `fentry`; write kprobe:FUNC, where args.NAME can be had, too
            fentry:vfs_read { }
            ^

            line 1: not supported: probes of `uprobe`; there are BEGIN, END, interval, kprobe and kretprobe
            uprobe:/bin/sh:readline { }
            ^

            line 1: an interval is s:N or ms:N: seconds or milliseconds
            interval:hz:5 { }
                     ^

            line 1: an interval is between 1 ms and a day
            interval:s:0 { }
                       ^

            line 1: not supported: variables; write what they stand for where it is used
            kprobe:a { $x = 1; }
                       ^

            line 1: not supported: `if`: write a clause with /CONDITION/ for each case; there are `@MAP[KEYS] = count()` and the like, printf, print, clear, delete, time and exit
            kprobe:a { if (pid == 1) { } }
                       ^

            line 1: nothing uses the times in @start: write kretprobe:FUNC { @ = hist(nsecs - @start[tid]); }
            kprobe:a { @start[tid] = nsecs; }
                       ^

            line 1: nothing keeps a time in @start: write kprobe:FUNC { @start[tid] = nsecs; }
            kprobe:a { @ns = hist(nsecs - @start[tid]); }
                                  ^

            line 1: not supported: `++`; write `= count()`
            kprobe:a { @x++; }
                         ^

            line 1: not supported: stats(); write count() and avg() of two maps
            kprobe:a { @x = stats(arg0); }
                            ^

            line 1: a map is assigned count(), sum(x), avg(x), min(x), max(x), hist(x) or lhist(x, MIN, MAX, STEP)
            kprobe:a { @x = arg0; }
                            ^

            p a arg2=$arg3:d
            @x Powers
              keys=arg2/1024.bits:size=131072 of [0]: []

            line 1: not supported: casts and calculating; write the value alone
            kprobe:a { @x = sum((int32)arg0); }
                                ^

            line 1: not supported: following a pointer so; write args.NAME->MEMBER, or str() of a text
            kprobe:a { @x = sum(*arg0); }
                                ^

            line 1: `uid` is no value; there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
            kprobe:a { @x[uid] = count(); }
                          ^

            line 1: not supported: `kstack` with something in ()
            kprobe:a { @x[kstack(3)] = count(); }
                                ^

            line 1: not supported: str() with a second value; leave it out
            kprobe:a { @x[str(arg0, 16)] = count(); }
                                  ^

            line 1: not supported: the function strftime(); there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
            kprobe:a { @x[strftime("%H", nsecs)] = count(); }
                          ^

            line 1: not supported: all arguments together; write args.NAME
            kprobe:a { @x[args] = count(); }
                              ^

            line 1: not supported: single entries of maps, but for `@NAME[tid]`, when a call began
            kprobe:a { delete(@x[pid]); }
                                 ^

            line 1: not supported: zero(): write clear(); there are `@MAP[KEYS] = count()` and the like, printf, print, clear, delete, time and exit
            kprobe:a { zero(@x); }
                       ^

            line 1: not supported: `system`; there are `@MAP[KEYS] = count()` and the like, printf, print, clear, delete, time and exit
            kprobe:a { system("ls"); }
                       ^

            line 1: not supported: dividing what is printed; leave it out
            kprobe:a { print(@x, 5, 10); }
                                  ^

            line 1: not supported: the function strncmp(); there are pid, tid, comm, cpu, nsecs, elapsed, func, probe, curtask, kstack, arg0 to arg5, args.NAME, retval, duration, str() and ksym()
            kprobe:a /strncmp(comm, "a", 1) == 0/ { }
                      ^

            line 1: not supported: comparing two values; compare one with a number or a text
            kprobe:a /arg0 == arg1/ { }
                              ^

            line 1: `&&`, `||` or the `/` behind the condition belongs here
            kprobe:a /(arg0 & 4) == 4/ { }
                                 ^

            line 1: `VALUE & BITS` is a condition by itself: whether one of the bits is set
            kprobe:a /arg0 & 4 == 4/ { }
                               ^

            line 1: what is compared behind `!` stands in parentheses: !(...)
            kprobe:a /!arg0 == 4/ { }
                       ^

            line 1: nothing keeps a time in @x: write kprobe:FUNC { @x[tid] = nsecs; }
            kprobe:a /@x[tid]/ { }
                      ^

            line 1: not supported: variables and parameters; write what they stand for
            kprobe:a /pid == $1/ { }
                             ^
        "#]],
    );
}

#[test]
fn what_comes_before_the_clauses_of_a_script_is_refused_by_name() {
    refused(
        &[
            "struct foo { int a; } kprobe:a { }",
            "config = { stack_mode = perf } kprobe:a { }",
            "config { }",
            "config = { log_size 5 }",
            "config = { log_size = 5",
            "config = { = 5 }",
            "configs = { }",
            "interval:5 { }",
            "interval:5us { }",
            "interval:0s { }",
            "kprobe:a { @[pid] = \"text\"; }",
            "kprobe:a { @[pid] = kstack; }",
            "kprobe:a { @[pid] = nsecs; }",
            "#ifdef ONE\nkprobe:a { }\n#endif",
            "# if ONE\n#define TWO\n  #else\nkprobe:a { }\n#endif",
            "kprobe:a {\n#ifndef ONE\n#if TWO\n#endif\n@ = count();\n#endif\n}",
            "kprobe:a { }\n#if ONE",
        ],
        expect![[r#"
            line 1: not supported: `struct`; leave it out, the types of the guest's kernel are known: args.NAME->MEMBER
            struct foo { int a; } kprobe:a { }
            ^

            line 1: not supported: the setting `stack_mode`; leave it out
            config = { stack_mode = perf } kprobe:a { }
                       ^

            line 1: `=` and `{` belong here: config = { NAME = VALUE; }
            config { }
                   ^

            line 1: `=` and a value belong here
            config = { log_size 5 }
                                ^

            line 1: these settings have no end: missing `}`
            config = { log_size = 5
                     ^

            line 1: the name of a setting belongs here
            config = { = 5 }
                       ^

            line 1: not supported: probes of `configs`; there are BEGIN, END, interval, kprobe and kretprobe
            configs = { }
            ^

            line 1: an interval is s:N or ms:N: seconds or milliseconds
            interval:5 { }
                     ^

            line 1: an interval is s:N or ms:N: seconds or milliseconds
            interval:5us { }
                     ^

            line 1: an interval is between 1 ms and a day
            interval:0s { }
                     ^

            line 1: not supported: texts, names and stacks in a map, which has numbers; make it a key: @[func] = count()
            kprobe:a { @[pid] = "text"; }
                                ^

            line 1: not supported: texts, names and stacks in a map, which has numbers; make it a key: @[func] = count()
            kprobe:a { @[pid] = kstack; }
                                ^

            line 1: not supported: keeping times but as @NAME[tid] = nsecs; how long a call took is `duration` in kretprobe:FUNC { ... }
            kprobe:a { @[pid] = nsecs; }
                                ^

            line 1: not supported: `#ifdef` around parts of a script; conditions are not evaluated here: leave it out, with what is not meant
            #ifdef ONE
            ^

            line 3: not supported: `#else` around parts of a script; conditions are not evaluated here: leave it out, with what is not meant
              #else
              ^

            line 2: not supported: `#ifndef` around parts of a script; conditions are not evaluated here: leave it out, with what is not meant
            #ifndef ONE
            ^

            line 2: this `#if` has no end: missing `#endif`
            #if ONE
            ^
        "#]],
    );
}
