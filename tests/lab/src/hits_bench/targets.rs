//! Targets for the costs, beside the measured values.

use std::fmt::Write;

use crate::table::{Row, named, number, ratio};

/// An upper limit, and the value measured for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Target {
    pub(crate) what: String,
    pub(crate) at_most: f64,
    /// `None` where it was not measured.
    pub(crate) measured: Option<f64>,
}

/// Limit for the cost of one row as a multiple of that of another.
#[derive(Debug)]
pub(crate) struct Ratio {
    pub(crate) of: &'static str,
    pub(crate) to: &'static str,
    pub(crate) at_most: f64,
}

/// Limit for the entries into the guest (`KVM_RUN`) per hit of a row.
#[derive(Debug)]
pub(crate) struct Runs {
    pub(crate) of: &'static str,
    pub(crate) at_most: u32,
}

/// Number of exits or ioctls per hit that is tolerated because they may have nothing to do with hits.
const STRAY: f64 = 0.1;

impl Ratio {
    pub(crate) fn target(&self, rows: &[Row]) -> Target {
        Target {
            what: format!("{} / {}", self.of, self.to),
            at_most: self.at_most,
            measured: ratio(rows, self.of, self.to),
        }
    }
}

impl Runs {
    pub(crate) fn target(&self, rows: &[Row]) -> Target {
        let exits = named(rows, self.of).and_then(|row| row.exits);
        // A hit takes at least this many entries. If there are fewer, the loop that was subtracted did other work
        // than the call, and the value is useless.
        let least = f64::from(self.at_most) - STRAY;
        Target {
            what: format!("{}: KVM_RUNs", self.of),
            at_most: f64::from(self.at_most) + STRAY,
            measured: exits.map(|[_, runs, _]| runs).filter(|runs| *runs >= least),
        }
    }
}

/// Returns the target for ioctls other than `KVM_RUN`, with the largest value of all rows.
pub(crate) fn ioctls(rows: &[Row]) -> Target {
    let ioctls = rows.iter().filter_map(|row| row.exits);
    Target {
        what: "any row: other ioctls".to_owned(),
        at_most: STRAY,
        measured: ioctls.map(|[_, _, other]| other).reduce(f64::max),
    }
}

pub(crate) fn render(targets: &[Target]) -> String {
    let mut table = format!(
        "{:<76}{:>10}{:>10}  {}\n",
        "", "at most", "measured", "verdict"
    );
    for target in targets {
        let verdict = match target.measured {
            Some(measured) if measured <= target.at_most => "met",
            Some(_) => "missed",
            None => "not measured",
        };
        let _ = writeln!(
            table,
            "{:<76}{:>10}{:>10}  {verdict}",
            target.what,
            number(Some(target.at_most), 2),
            number(target.measured, 2),
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    use expect_test::expect;

    fn row(name: &str, fastest: f64, exits: Option<[f64; 3]>) -> Row {
        Row {
            name: name.to_owned(),
            median: None,
            fastest,
            exits,
            instructions: None,
        }
    }

    #[test]
    fn a_target_is_met_missed_or_not_measured() {
        let rows = [
            row("exit", 100.0, Some([1.0, 1.0, 0.0])),
            row("kprobe", 130.0, Some([2.0, 1.04, 0.3])),
            row("gdb", 5000.0, None),
            row("disturbed", -5.0, None),
        ];
        let ratio = |of, to, at_most| Ratio { of, to, at_most }.target(&rows);
        let runs = |of, at_most| Runs { of, at_most }.target(&rows);
        let targets = [
            ratio("kprobe", "exit", 1.25),
            ratio("kprobe", "gdb", 0.1),
            ratio("kprobe", "none", 0.1),
            ratio("disturbed", "kprobe", 0.1),
            runs("kprobe", 1),
            runs("kprobe", 0),
            runs("kprobe", 2),
            runs("gdb", 1),
            ioctls(&rows),
        ];
        expect![[r#"
                                                                                           at most  measured  verdict
            kprobe / exit                                                                     1.25      1.30  missed
            kprobe / gdb                                                                      0.10      0.03  met
            kprobe / none                                                                     0.10         -  not measured
            disturbed / kprobe                                                                0.10         -  not measured
            kprobe: KVM_RUNs                                                                  1.10      1.04  met
            kprobe: KVM_RUNs                                                                  0.10      1.04  missed
            kprobe: KVM_RUNs                                                                  2.10         -  not measured
            gdb: KVM_RUNs                                                                     1.10         -  not measured
            any row: other ioctls                                                             0.10      0.30  missed
        "#]].assert_eq(&render(&targets));
    }
}
