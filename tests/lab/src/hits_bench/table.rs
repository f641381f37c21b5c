//! The comparison as a table, with a row for each way to probe the same function.

use std::fmt::Write;

/// Meaning of a tick of the guests' time stamp counter in this rig.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Unit {
    /// Time, at this number of ticks per microsecond.
    Time { per_microsecond: f64 },
    /// An instruction that the machine executes, whether in the guest, in KVM or in hvprobe.
    Instruction,
}

impl Unit {
    /// Converts ticks to microseconds; `None` if ticks are instructions.
    pub(crate) fn microseconds(self, ticks: f64) -> Option<f64> {
        match self {
            Self::Time { per_microsecond } => Some(ticks / per_microsecond),
            Self::Instruction => None,
        }
    }
}

/// Cost that one hit adds to a call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// Ticks of the median batch. `None` where the guest's counter stands still at a hit.
    pub(crate) median: Option<f64>,
    /// Ticks of the fastest batch, which the rest of the machine disturbs least.
    pub(crate) fastest: f64,
    /// Numbers of exits, `KVM_RUN`s and other ioctls. `None` where they were not counted.
    pub(crate) exits: Option<[f64; 3]>,
    /// Number of instructions that the engine executes in user space. `None` where they were not counted.
    pub(crate) instructions: Option<u32>,
}

/// Renders all rows. The two columns of ratios divide by the rows called `kprobe` and `reference`.
pub(crate) fn render(rows: &[Row], unit: Unit, kprobe: &str, reference: &str) -> String {
    let mut table = format!(
        "{:<40}{:>10}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}{:>11}{:>11}\n",
        "", "median", "fastest", "us", "exits", "runs", "ioctls", "instr", "x kprobe", "x guest's"
    );
    for row in rows {
        let [exits, runs, ioctls] = row.exits.map_or([None; 3], |numbers| numbers.map(Some));
        let ratio = |to: &str| ratio(rows, &row.name, to);
        let _ = writeln!(
            table,
            "{:<40}{:>10}{:>10}{:>10}{:>8}{:>8}{:>8}{:>8}{:>11}{:>11}",
            row.name,
            number(row.median, 0),
            number(Some(row.fastest), 0),
            number(unit.microseconds(row.fastest), 2),
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

/// Finds the row called `name`.
pub(crate) fn named<'r>(rows: &'r [Row], name: &str) -> Option<&'r Row> {
    rows.iter().find(|row| row.name == name)
}

/// Returns the cost of the row `of` divided by that of the row `to`. Returns `None` if a row is missing, or if one
/// of the costs is not above zero: then other work on the machine took more time than the hits, and a ratio would
/// mean nothing.
pub(crate) fn ratio(rows: &[Row], of: &str, to: &str) -> Option<f64> {
    let cost = |name| Some(named(rows, name)?.fastest).filter(|cost| *cost > 0.0);
    Some(cost(of)? / cost(to)?)
}

/// Formats a number with `places` decimals, or a dash for none.
pub(crate) fn number(value: Option<f64>, places: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.places$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    use expect_test::expect;

    fn rows() -> [Row; 3] {
        [
            Row {
                name: "guest's kprobe".to_owned(),
                median: Some(3000.4),
                fastest: 2900.0,
                exits: Some([0.0, 0.0, 0.0]),
                instructions: None,
            },
            Row {
                name: "kprobe".to_owned(),
                median: Some(30000.0),
                fastest: 29000.0,
                exits: Some([1.001, 1.0, 0.0]),
                instructions: Some(2345),
            },
            Row {
                name: "gdb".to_owned(),
                median: None,
                fastest: 1_450_000.0,
                exits: None,
                instructions: None,
            },
        ]
    }

    #[test]
    fn rows_are_compared_with_both_references() {
        let unit = Unit::Time {
            per_microsecond: 2000.0,
        };
        expect![[r#"
                                                        median   fastest        us   exits    runs  ioctls   instr   x kprobe  x guest's
            guest's kprobe                                3000      2900      1.45    0.00    0.00    0.00       -       0.10       1.00
            kprobe                                       30000     29000     14.50    1.00    1.00    0.00    2345       1.00      10.00
            gdb                                              -   1450000    725.00       -       -       -       -      50.00     500.00
        "#]]
        .assert_eq(&render(&rows(), unit, "kprobe", "guest's kprobe"));
    }

    #[test]
    fn instructions_are_not_shown_as_time() {
        let table = render(&rows()[..1], Unit::Instruction, "kprobe", "guest's kprobe");
        expect![[r#"
                                                        median   fastest        us   exits    runs  ioctls   instr   x kprobe  x guest's
            guest's kprobe                                3000      2900         -    0.00    0.00    0.00       -          -       1.00
        "#]]
        .assert_eq(&table);
    }
}
