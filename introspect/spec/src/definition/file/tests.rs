use expect_test::{Expect, expect};

use super::*;

fn check(text: &str, expect: Expect) {
    let found = match parse_file(text) {
        Ok(events) => {
            let lines = events.definitions.iter();
            let lines = lines.map(|it| format!("{}: {}\n", it.number, it.definition));
            let counted = events.histograms.iter().map(|it| {
                let Trigger {
                    number,
                    event,
                    histogram,
                    ..
                } = it;
                format!("{number}: {event} counted by {histogram}\n")
            });
            lines.chain(counted).collect()
        }
        Err(error) => format!("{error}\n{}\n", error.render()),
    };
    expect.assert_eq(&found);
}

#[test]
fn lines_are_definitions_comments_or_nothing() {
    check(
        "# what is opened\n\np:g/e vfs_open path=%di # and where\r\n \t\nr4 vfs_open $retval",
        expect![[r#"
            3: p:g/e vfs_open path=%di
            5: r4 vfs_open $retval
        "#]],
    );
    check("", expect![""]);
    check("#p f", expect![""]);
}

#[test]
fn an_event_has_several_places_of_one_kind() {
    check(
        "p:e f a=%di\np:e g a=%si\np:kprobes/e f a=%si",
        expect![[r#"
        1: p:e f a=%di
        2: p:e g a=%si
        3: p:kprobes/e f a=%si
    "#]],
    );
    check(
        "p:e f\n\np:e  f",
        expect![[r#"
        line 3: There is already the exact same probe event, in line 1
        p:e  f
             ^
    "#]],
    );
    check(
        "p:e f\nr:kprobes/e f",
        expect![[r#"
        line 2: Probe type is different from existing probe, in line 1
        r:kprobes/e f
        ^
    "#]],
    );
    check(
        "p:e f a=%di b=%di\np:e g a=%si c=%di",
        expect![[r#"
        line 2: Argument type or name is different from existing probe, in line 1
        p:e g a=%si c=%di
                    ^
    "#]],
    );
    check(
        "p:e f a=%di b=%di:u8\np:e g a=%si:x64 b=%si:u16",
        expect![[r#"
        line 2: Argument type or name is different from existing probe, in line 1
        p:e g a=%si:x64 b=%si:u16
                        ^
    "#]],
    );
    check(
        "p:e f a=%di\np:e g",
        expect![[r#"
        line 2: Argument type or name is different from existing probe, in line 1
        p:e g
             ^
    "#]],
    );
}

#[test]
fn a_bad_line_is_shown_with_its_number() {
    check(
        "p vfs_read\n\n  p vfs_open %bar # no such\np",
        expect![[r#"
            line 3: Invalid register name
              p vfs_open %bar # no such
                         ^
        "#]],
    );
    check(
        "p:x vfs_read\n-:x",
        expect![[r#"
            line 2: not supported: removing events by definition (`-`); write `p SYMBOL` or `r SYMBOL`
            -:x
            ^
        "#]],
    );
    check(
        "p vfs_read \\\"a#b\"",
        expect![[r##"
            line 1: String is not closed with '"'
            p vfs_read \"a#b"
                          ^
        "##]],
    );
    check(
        "p f\0",
        expect![[r#"
            line 1: control character '\0': a definition is one line of ASCII
            p f?
               ^
        "#]],
    );
}

#[test]
fn filters_and_histograms_belong_to_events_of_lines_before_them() {
    check(
        "p:e vfs_read len=%dx\nr vfs_read\np:g/e vfs_open\n\
         events/kprobes/e/filter:len > 100 && comm ~ \"d*\" # why\n\
         /sys/kernel/tracing/events/g/e/trigger: hist:keys=comm\n\
         echo 'hist:keys=len:vals=len if comm == \"a#b\"' >> events/g/e/trigger # and why\n\
         \techo 'hist:keys=retval' > /sys/kernel/debug/tracing/events/kprobes/r_vfs_read_0/trigger\n\
         echo hist:keys=common_pid>events/g/e/trigger\n\
         echo 'p:late vfs_write n=$arg3' >> kprobe_events\n\
         echo \"n > 1\" > events/kprobes/late/filter",
        expect![[r#"
            1: p:e vfs_read len=%dx if len > 100 && comm ~ "d*"
            2: r vfs_read
            3: p:g/e vfs_open
            9: p:late vfs_write n=$arg3 if n > 1
            5: g/e counted by hist:keys=comm
            6: g/e counted by hist:keys=len:vals=len if comm == "a#b"
            7: kprobes/r_vfs_read_0 counted by hist:keys=retval
            8: g/e counted by hist:keys=common_pid
        "#]],
    );
}

#[test]
fn what_is_written_where_it_cannot_be_is_pointed_at() {
    let wrong = |line: &str, expected: Expect| {
        check(
            &format!("p:e vfs_read len=%dx if len > 1\np:f vfs_read\n{line}"),
            expected,
        );
    };
    wrong(
        "events/kprobes/g/filter:pid == 1",
        expect![[r#"
        line 3: No such file or directory; no line before this defines such an event
        events/kprobes/g/filter:pid == 1
               ^
    "#]],
    );
    wrong(
        "events/e/e/trigger:hist:keys=pid",
        expect![[r#"
        line 3: No such file or directory; no line before this defines such an event
        events/e/e/trigger:hist:keys=pid
               ^
    "#]],
    );
    wrong(
        "events/kprobes/e/filter:len > 1",
        expect![[r#"
        line 3: `kprobes/e` has a filter already
        events/kprobes/e/filter:len > 1
               ^
    "#]],
    );
    wrong(
        "events/kprobes/f/filter:len >",
        expect![[r#"
        line 3: Invalid value (did you forget quotes)?
        events/kprobes/f/filter:len >
                                     ^
    "#]],
    );
    wrong(
        "events/kprobes/f/filter",
        expect![[r#"
        line 3: `:` and what is written there belong here
        events/kprobes/f/filter
                               ^
    "#]],
    );
    wrong(
        "events/kprobes/f/format:x",
        expect![[r#"
        line 3: No such file or directory; there are kprobe_events, events/GROUP/EVENT/filter and events/GROUP/EVENT/trigger
        events/kprobes/f/format:x
                         ^
    "#]],
    );
    wrong(
        "events/kprobes/f:x",
        expect![[r#"
        line 3: No such file or directory; there are kprobe_events, events/GROUP/EVENT/filter and events/GROUP/EVENT/trigger
        events/kprobes/f:x
        ^
    "#]],
    );
    wrong(
        "/dev/null:x",
        expect![[r#"
        line 3: No such file or directory; there are kprobe_events, events/GROUP/EVENT/filter and events/GROUP/EVENT/trigger
        /dev/null:x
        ^
    "#]],
    );
    wrong(
        "events/kprobes/f/trigger:traceoff:1",
        expect![[r#"
        line 3: of triggers there is `hist:keys=...` only
        events/kprobes/f/trigger:traceoff:1
                                 ^
    "#]],
    );
    wrong(
        "echo '!hist:keys=pid' > events/kprobes/f/trigger",
        expect![[r#"
        line 3: not supported: removing a trigger; leave out both lines
        echo '!hist:keys=pid' > events/kprobes/f/trigger
              ^
    "#]],
    );
    wrong(
        "echo 'hist:keys=pid.hax' > events/kprobes/f/trigger",
        expect![[r#"
        line 3: write hex, sym, sym-offset, execname, log2, bits, buckets=N or usecs
        echo 'hist:keys=pid.hax' > events/kprobes/f/trigger
                            ^
    "#]],
    );
    wrong(
        "echo 'hist:keys=pid if pid ==' > events/kprobes/f/trigger",
        expect![[r#"
        line 3: Invalid value (did you forget quotes)?
        echo 'hist:keys=pid if pid ==' > events/kprobes/f/trigger
                                     ^
    "#]],
    );
    wrong(
        "echo 'hist:keys=pid > events/kprobes/f/trigger",
        expect![[r#"
        line 3: String is not closed with `'`
        echo 'hist:keys=pid > events/kprobes/f/trigger
                                                      ^
    "#]],
    );
    wrong(
        "echo 'hist:keys=pid' | tee events/kprobes/f/trigger",
        expect![[r#"
        line 3: `> FILE` or `>> FILE` belongs here
        echo 'hist:keys=pid' | tee events/kprobes/f/trigger
                             ^
    "#]],
    );
    wrong(
        "echo \"p:g vfs_read $arg1\" >> kprobe_events",
        expect![[r#"
        line 3: a shell makes something else of this; write ' instead of "
        echo "p:g vfs_read $arg1" >> kprobe_events
                           ^
    "#]],
    );
    wrong(
        "echo 'p:g vfs_read %bar' >> kprobe_events",
        expect![[r#"
        line 3: Invalid register name
        echo 'p:g vfs_read %bar' >> kprobe_events
                           ^
    "#]],
    );
    wrong(
        "echo pid==1&&cpu==0 > events/kprobes/f/filter",
        expect![[r#"
        line 3: a shell makes something else of this; put it all in '...'
        echo pid==1&&cpu==0 > events/kprobes/f/filter
                   ^
    "#]],
    );
    wrong(
        "echo 1 > events/kprobes/f/enable",
        expect![[r#"
        line 3: probes are enabled; leave this line out
        echo 1 > events/kprobes/f/enable
                                  ^
    "#]],
    );
    wrong(
        "echo",
        expect![[r#"
        line 3: a definition starts with `p` or `r`: write `p echo`
        echo
        ^
    "#]],
    );
    wrong(
        "echo '\u{e9}' > kprobe_events",
        expect![[r#"
        line 3: 'é': what is written is one line of ASCII
        echo 'é' > kprobe_events
              ^
    "#]],
    );
    wrong(
        "events/kprobes/f/filter:pid == 1\nevents/kprobes/f/trigger:hist:keys=pid",
        expect![[r#"
            line 4: an event is filtered or counted; write `if FILTER` behind the histogram
            events/kprobes/f/trigger:hist:keys=pid
                   ^
        "#]],
    );
    wrong(
        "events/kprobes/f/trigger:hist:keys=pid\nevents/kprobes/f/filter:pid == 1",
        expect![[r#"
            line 4: an event is filtered or counted; write `if FILTER` behind the histogram
            events/kprobes/f/filter:pid == 1
                   ^
        "#]],
    );
    wrong(
        "events/kprobes/e/trigger:hist:keys=len",
        expect![[r#"
        1: p:e vfs_read len=%dx if len > 1
        2: p:f vfs_read
        3: kprobes/e counted by hist:keys=len
    "#]],
    );
}
