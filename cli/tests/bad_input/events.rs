//! Invalid options for the choice and the destination of events.

use expect_test::expect;

use crate::place::Place;

#[test]
fn filters_that_cannot_be_read_are_shown_where_they_are_wrong() {
    let place = Place::new();
    place.check(
        &["trace", "--filter", "pid =="],
        expect![[r#"
        hvprobe: bad --filter: Invalid value (did you forget quotes)?
          pid ==
                ^
        status 2
    "#]],
    );
}

#[test]
fn files_that_cannot_be_written_are_reported_before_anything_is_done() {
    let place = Place::new();
    for command in ["run", "trace"] {
        place.check(
            &[command, "--output", "/nowhere/hits"],
            expect![[r#"
            hvprobe: cannot write /nowhere/hits: No such file or directory (os error 2)
            status 1
        "#]],
        );
    }
}

#[test]
fn histograms_in_files_are_refused_where_they_are_wrong() {
    let place = Place::new();
    let wrong = place.file(
        "wrong",
        b"p:e vfs_read\necho 'hist:keys=x.low2' > events/kprobes/e/trigger\n",
    );
    for command in ["run", "trace"] {
        place.check(&[command, "--events", &wrong], expect![[r#"
            hvprobe: bad definition in $PLACE/wrong:2: write hex, sym, sym-offset, execname, log2, bits, buckets=N or usecs
              echo 'hist:keys=x.low2' > events/kprobes/e/trigger
                                ^
            status 2
        "#]]);
    }
    let right = place.file(
        "right",
        b"p:e vfs_read\nevents/kprobes/e/trigger:hist:keys=comm\n",
    );
    place.check(&["probe", "add", "--events", &right], expect![[r#"
        hvprobe: bad hist in $PLACE/right:2: `hvprobe probe add` counts nothing: give the file to `hvprobe run` or `hvprobe trace`
          events/kprobes/e/trigger:hist:keys=comm
                                   ^
        status 2
    "#]]);
    place.check(
        &["vm", "boot", "--kernel", "/dev/null", "--events", &right],
        expect![[r#"
            hvprobe: bad hist in $PLACE/right:2: `hvprobe vm boot` counts nothing: give the file to `hvprobe run` or `hvprobe trace`
              events/kprobes/e/trigger:hist:keys=comm
                                       ^
            status 2
        "#]],
    );
}

#[test]
fn what_shows_histograms_needs_some() {
    let place = Place::new();
    let events = place.file("events", b"p:e vfs_read\n");
    for words in [
        &["trace", "--interval", "5"][..],
        &["trace", "--bars", "--events", &events],
    ] {
        place.check(words, expect![[r#"
            hvprobe: --bars and --interval go with histograms: give --hist, or --events with a file that has `hist` triggers
            status 2
        "#]]);
    }
}
