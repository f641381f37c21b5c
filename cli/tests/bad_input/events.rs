//! Which events are wanted, and where they are to go.

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
fn files_that_cannot_be_written_are_told_before_anything_is_done() {
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
