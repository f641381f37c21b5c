use expect_test::expect;
use proptest::prelude::*;

use super::*;

const PAGE: &str =
    "# Title\n\n<!-- verified: begin -->\n<!-- verified: end -->\n\n| a | table |\n|---|---|\n";

fn key(host: &str, tests: &str, kernel: &str) -> Key {
    Key {
        host: host.to_owned(),
        tests: tests.to_owned(),
        kernel: kernel.to_owned(),
    }
}

fn cell([passed, failed, skipped]: [u64; 3], commit: &str) -> Cell {
    Cell {
        counts: Counts {
            passed,
            failed,
            skipped,
        },
        commit: commit.to_owned(),
    }
}

#[test]
fn table_shows_tests_by_host_and_kernel_with_what_failed_and_was_skipped() {
    let mut table = Table::default();
    for (host, tests, kernel, counts) in [
        ("tcg", "rig::stacks", "6.12-cloud", [5, 0, 0]),
        ("tcg", "rig::stacks", "6.1-cloud", [4, 1, 0]),
        ("tcg", "rig::hist", "5.10-cloud", [2, 0, 3]),
        ("tcg", "micro_ports", NO_LINUX, [7, 0, 0]),
        ("direct", "detour", NO_LINUX, [0, 0, 4]),
        ("direct", "none", NO_LINUX, [0, 0, 0]),
    ] {
        let cell = cell(counts, "39a9bdaa");
        table.set(&key(host, tests, kernel), cell).unwrap();
    }
    let page = table.written_into(PAGE).unwrap();
    expect![[r#"
        # Title

        <!-- verified: begin -->

        | *direct* | no Linux |
        |---|---|
        | `detour` | 4 skipped, 39a9bdaa |
        | `none` | 0 passed, 39a9bdaa |

        | *tcg* | no Linux | 5.10-cloud | 6.1-cloud | 6.12-cloud |
        |---|---|---|---|---|
        | `micro_ports` | 7 passed, 39a9bdaa | | | |
        | `rig::hist` | | 2 passed, 3 skipped, 39a9bdaa | | |
        | `rig::stacks` | | | 4 passed, 1 failed, 39a9bdaa | 5 passed, 39a9bdaa |

        <!-- verified: end -->

        | a | table |
        |---|---|
    "#]]
    .assert_eq(&page);
    assert_eq!(Table::of_page(&page).unwrap(), table);
}

#[test]
fn table_without_rows_keeps_its_columns() {
    let table = "| *tcg* | no Linux | 6.1-cloud |\n|---|---|---|\n\n";
    let page = PAGE.replace(END, &format!("\n{table}{END}"));
    let read = Table::of_page(&page).unwrap();
    assert_eq!(read.to_string(), table);
    assert_eq!(read.written_into(&page).unwrap(), page);
    assert_eq!(Table::of_page(PAGE).unwrap(), Table::default());
}

fn refused(lines: &str) -> String {
    let page = PAGE.replace(END, &format!("{lines}\n{END}"));
    format!("{:#}", Table::of_page(&page).unwrap_err())
}

#[test]
fn what_is_no_table_is_refused_with_its_line() {
    const HEADING: &str = "| *tcg* | 6.1-cloud |\n|---|---|\n";
    for (lines, why) in [
        ("text", "line 4: is no line of a table"),
        ("| tcg | 6.1 |", "line 4: the host should stand first"),
        ("| *tcg* | 6.1 | 6.1 |", "line 4: a kernel is there twice"),
        ("| *tcg* | 6.1 |", "the last table has a heading only"),
        (
            "| *tcg* | 6.1 |\n|---|",
            "line 5: the heading should be followed",
        ),
    ] {
        let error = refused(lines);
        assert!(error.contains(why), "{lines}: {error}");
    }
    for (rows, why) in [
        ("| a | |", "line 6: a test should be in backquotes"),
        ("| `a` |", "line 6: a has 0 cells, but there are 1"),
        ("| `a` | |", "line 6: a ran nowhere"),
        ("| `a` | yes |", "line 6: a, 6.1-cloud: `yes` is no result"),
        (
            "| `a` | 1 failed, 2 passed, 39a9bdaa |",
            "should be `2 passed, 1 failed, 39a9bdaa`",
        ),
        ("| `a` | 1 passed, tree |", "`tree` is no commit's hash"),
        (
            "| `a` | 1 passed, 39a9bdaa |\n| `a` | 1 passed, 39a9bdaa |",
            "line 7: a is there twice",
        ),
        ("\n| *tcg* | 6.1-cloud |", "line 7: host tcg is there twice"),
    ] {
        let error = refused(&format!("{HEADING}{rows}"));
        assert!(error.contains(why), "{rows}: {error}");
    }
    for page in [
        "",
        BEGIN,
        "<!-- verified: end --><!-- verified: begin -->",
        "<!-- verified: begin --><!-- verified: begin --><!-- verified: end -->",
    ] {
        assert!(Table::of_page(page).is_err(), "{page}");
        assert!(Table::default().written_into(page).is_err(), "{page}");
    }
}

#[test]
fn names_that_would_break_the_table_are_refused() {
    for name in ["", " a", "a|b", "`a`", "*a*", "a\nb"] {
        for key in [
            key(name, "a", "b"),
            key("a", name, "b"),
            key("a", "b", name),
        ] {
            let mut table = Table::default();
            assert!(
                table.set(&key, cell([1, 0, 0], "39a9bdaa")).is_err(),
                "{key:?}"
            );
            assert_eq!(table, Table::default());
        }
    }
}

/// Cells with few different hosts, tests and kernels, so that some cells are set twice.
fn cells() -> impl Strategy<Value = Vec<(Key, Cell)>> {
    let name = || "[a-d](:: x|[.]1)?";
    let names = (name(), name(), name());
    let counts = proptest::array::uniform3(0..3_u64);
    let one = (names, counts, "[0-9a-f]{7,12}");
    let one = one.prop_map(|((host, tests, kernel), counts, commit)| {
        (key(&host, &tests, &kernel), cell(counts, &commit))
    });
    proptest::collection::vec(one, 0..20)
}

fn get<'t>(table: &'t Table, key: &Key) -> Option<&'t Cell> {
    let tests = table.hosts.get(&key.host)?.tests.get(&key.tests)?;
    tests.get(&key.kernel)
}

proptest! {
    #[test]
    fn what_is_written_is_read_and_what_was_there_stays(cells in cells()) {
        let mut table = Table::default();
        let mut expected = BTreeMap::new();
        let mut page = PAGE.to_owned();
        for (key, cell) in cells {
            table.set(&key, cell.clone()).unwrap();
            // As another run does.
            let mut read = Table::of_page(&page).unwrap();
            read.set(&key, cell.clone()).unwrap();
            page = read.written_into(&page).unwrap();
            expected.insert(key, cell);
        }
        let read = Table::of_page(&page).unwrap();
        prop_assert_eq!(&read, &table);
        for (key, cell) in &expected {
            prop_assert_eq!(get(&read, key), Some(cell));
        }
        let (before, _, after) = split(&page).unwrap();
        let (title, _, rest) = split(PAGE).unwrap();
        prop_assert_eq!((before, after), (title, rest));
    }
}
