//! Slowdown of a program that does little but system calls, by one probe on its path.
//!
//! Every way to probe is measured in each of many rounds, in turn, so that a change of the machine's speed
//! affects all of them. Only the difference within a round counts.

use std::fmt::Write;

use anyhow::{Context, Result};
use hvprobe_lab::measure::median;

use crate::guest::Ticks;
use crate::ours::{EMULATED, Machine, OPTIMIZED, Work};
use crate::subjects::OWN_FTRACE;
use crate::table::{Unit, number};

/// The ways to probe. The first is the baseline for all others; the second is the same again, and shows the error
/// of the measurement.
const WAYS: [&str; 5] = [
    "no probe",
    "no probe, once more",
    OPTIMIZED.name,
    OWN_FTRACE,
    EMULATED.name,
];

/// Slowdown by one way to probe, in percent of the unprobed program.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Slower {
    pub(crate) name: &'static str,
    /// Ticks per call in the median batch of a round; the median over all rounds.
    pub(crate) ticks: f64,
    /// Slowdown of the fastest batch of a round, in which nothing but the program ran; the median over all rounds.
    pub(crate) fastest: f64,
    /// Slowdown of the median batch of a round, which includes interrupts of the host; the median over all rounds.
    pub(crate) percent: f64,
    /// Lower and upper quartile, over the rounds, of the slowdown whose median is `percent`.
    pub(crate) spread: (f64, f64),
    /// Slowdown of a round as a whole, including everything else that ran; the median over all rounds.
    pub(crate) overall: f64,
}

/// Measures all ways `rounds` times. For zero rounds the result is empty.
pub(crate) fn measure(machine: &mut Machine, work: &Work, rounds: u32) -> Result<Vec<Slower>> {
    let own = format!("p {}", work.function);
    let mut measured: Vec<[Ticks; WAYS.len()]> = Vec::new();
    for round in 0..rounds as usize {
        let mut all = [None; WAYS.len()];
        for n in 0..WAYS.len() {
            // Every round begins with another way.
            let way = (round + n) % WAYS.len();
            let took = match way {
                0 | 1 => machine.bare(work, None),
                2 => machine.probed(work, &OPTIMIZED),
                3 => machine.bare(work, Some(&own)),
                _ => machine.probed(work, &EMULATED),
            };
            all[way] = Some(took?.ticks);
        }
        let all: Option<Vec<Ticks>> = all.into_iter().collect();
        let all = all.and_then(|all| all.try_into().ok());
        measured.push(all.context("a way was left out")?);
    }
    Ok(compare(&measured))
}

fn compare(measured: &[[Ticks; WAYS.len()]]) -> Vec<Slower> {
    let of = |way: usize, what: fn(&Ticks) -> f64| -> Vec<f64> {
        let percents = measured
            .iter()
            .map(|round| (what(&round[way]) / what(&round[0]) - 1.0) * 100.0);
        percents.collect()
    };
    let slower = |(way, name)| {
        let percents = of(way, |ticks| ticks.median);
        Some(Slower {
            name,
            ticks: median(measured.iter().map(|round| round[way].median).collect())?,
            spread: quartiles(percents.clone())?,
            fastest: median(of(way, |ticks| ticks.fastest))?,
            percent: median(percents)?,
            overall: median(of(way, |ticks| ticks.mean))?,
        })
    };
    (0..).zip(WAYS).filter_map(slower).collect()
}

/// Returns the lower and the upper quartile, or `None` if there are no values.
fn quartiles(mut values: Vec<f64>) -> Option<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some((values[last / 4], values[last - last / 4]))
}

pub(crate) fn render(ways: &[Slower], unit: Unit) -> String {
    let mut table = format!(
        "{:<32}{:>8}{:>10}{:>11}{:>10}{:>18}{:>11}\n",
        "", "ticks", "us", "fastest %", "slower %", "half of rounds", "overall %"
    );
    for (way, n) in ways.iter().zip(0..) {
        let percent = |value| number((n > 0).then_some(value), 1);
        let (low, high) = way.spread;
        let spread = format!("{} to {}", percent(low), percent(high));
        let _ = writeln!(
            table,
            "{:<32}{:>8}{:>10}{:>11}{:>10}{:>18}{:>11}",
            way.name,
            number(Some(way.ticks), 0),
            number(unit.microseconds(way.ticks), 2),
            percent(way.fastest),
            percent(way.percent),
            if n > 0 { &spread } else { "-" },
            percent(way.overall),
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    use expect_test::expect;

    fn ticks(median: f64, mean: f64) -> Ticks {
        Ticks {
            calls: 100,
            fastest: 0.9 * median,
            median,
            mean,
        }
    }

    #[test]
    fn ways_are_compared_within_their_round() {
        // The machine is half as fast in the second round, and disturbed in the third.
        let rounds = [1.0, 2.0, 1.0].map(|pace| {
            let turn = |factor: f64| ticks(1000.0 * pace * factor, 1100.0 * pace * factor);
            [turn(1.0), turn(1.0), turn(1.04), turn(1.5), turn(50.0)]
        });
        let mut rounds = rounds.to_vec();
        rounds[2][2] = ticks(1200.0, 5500.0);
        let ways = compare(&rounds);
        let unit = Unit::Time {
            per_microsecond: 1000.0,
        };
        expect![[r#"
                                               ticks        us  fastest %  slower %    half of rounds  overall %
            no probe                            1000      1.00          -         -                 -          -
            no probe, once more                 1000      1.00        0.0       0.0        0.0 to 0.0        0.0
            kprobe, optimized                   1200      1.20        4.0       4.0       4.0 to 20.0        4.0
            guest's kprobe, by ftrace           1500      1.50       50.0      50.0      50.0 to 50.0       50.0
            kprobe, emulated                   50000     50.00     4900.0    4900.0  4900.0 to 4900.0     4900.0
        "#]].assert_eq(&render(&ways, unit));
        assert!(compare(&[]).is_empty());
    }

    #[test]
    fn half_of_the_values_lie_between_the_quartiles() {
        let values = (1..=9).rev().map(f64::from).collect();
        assert_eq!(quartiles(values), Some((3.0, 7.0)));
        assert_eq!(quartiles(vec![1.0]), Some((1.0, 1.0)));
    }
}
