//! The comparison as a table: a row per way to probe the same function.

use std::fmt::Write;

/// What one hit adds to a call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// Ticks of the guest's time stamp counter: fastest batch, middle batch. None where it stands
    /// still at a hit.
    pub(crate) ticks: Option<(f64, f64)>,
    /// Of the fastest batch, which the rest of the machine disturbs least.
    pub(crate) microseconds: f64,
    /// Exits, `KVM_RUN`s, other ioctls; none where they were not counted.
    pub(crate) exits: Option<[f64; 3]>,
    /// Of the engine, in user space; none where they were not counted.
    pub(crate) instructions: Option<u32>,
}

/// All rows; `kprobe` and `reference` name those that the two columns of ratios divide by.
pub(crate) fn render(rows: &[Row], kprobe: &str, reference: &str) -> String {
    let mut table = format!(
        "{:<40}{:>10}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}{:>11}{:>11}\n",
        "", "median", "fastest", "us", "exits", "runs", "ioctls", "instr", "x kprobe", "x guest's"
    );
    for row in rows {
        let (fastest, middle) = row.ticks.unzip();
        let [exits, runs, ioctls] = row.exits.map_or([None; 3], |numbers| numbers.map(Some));
        let ratio = |to: &str| ratio(rows, &row.name, to);
        let _ = writeln!(
            table,
            "{:<40}{:>10}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}{:>11}{:>11}",
            row.name,
            number(middle, 0),
            number(fastest, 0),
            number(Some(row.microseconds), 2),
            number(exits, 2),
            number(runs, 2),
            number(ioctls, 2),
            number(row.instructions.map(f64::from), 0),
            number(ratio(kprobe), 2),
            number(ratio(reference), 2),
        );
    }
    table
}

/// How many times the time of the row `to` that of the row `of` is.
pub(crate) fn ratio(rows: &[Row], of: &str, to: &str) -> Option<f64> {
    let microseconds = |name: &str| {
        let row = rows.iter().find(|row| row.name == name)?;
        Some(row.microseconds)
    };
    Some(microseconds(of)? / microseconds(to)?)
}

fn number(value: Option<f64>, places: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.places$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    use expect_test::expect;

    #[test]
    fn rows_are_compared_with_both_references() {
        let rows = [
            Row {
                name: "guest's kprobe".to_owned(),
                ticks: Some((2900.0, 3000.4)),
                microseconds: 1.5,
                exits: Some([0.0, 0.0, 0.0]),
                instructions: None,
            },
            Row {
                name: "kprobe".to_owned(),
                ticks: Some((28000.0, 30000.0)),
                microseconds: 15.0,
                exits: Some([1.001, 1.0, 0.0]),
                instructions: Some(2345),
            },
            Row {
                name: "gdb".to_owned(),
                ticks: None,
                microseconds: 750.0,
                exits: None,
                instructions: None,
            },
        ];
        expect![[r#"
                                                        median   fastest        us   exits    runs  ioctls   instr   x kprobe  x guest's
            guest's kprobe                                3000      2900      1.50    0.00    0.00    0.00       -       0.10       1.00
            kprobe                                       30000     28000     15.00    1.00    1.00    0.00    2345       1.00      10.00
            gdb                                              -         -    750.00       -       -       -       -      50.00     500.00
        "#]]
        .assert_eq(&render(&rows, "kprobe", "guest's kprobe"));
    }
}
