//! What a trace amounted to: a row per probe, with the cost of its hits.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use hvprobe_proto::v1;

use super::events::Label;
use super::table::{self, table};

/// Longest cost told apart, in nanoseconds; longer ones count as this.
const LONGEST: u64 = 60_000_000_000;

/// Events seen of each probe, and what they cost.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    probes: BTreeMap<u32, Seen>,
    /// Events lost on the way to us.
    pub(crate) dropped: u64,
    /// Events seen.
    pub(crate) events: u64,
}

#[derive(Debug)]
struct Seen {
    label: Label,
    costs: Histogram<u32>,
}

impl Tally {
    /// Counts `event`.
    pub(crate) fn count(&mut self, event: &v1::Event, label: &Label) {
        self.events += 1;
        let seen = self.probes.entry(event.probe).or_insert_with(|| Seen {
            label: label.clone(),
            costs: costs(),
        });
        seen.costs.saturating_record(event.cost_ns.max(1));
    }

    /// The rows for `probes`, and for those that were seen but are no longer among them.
    pub(crate) fn rows(&self, probes: &[v1::Probe]) -> Vec<Row> {
        let listed = probes.iter().map(|probe| {
            let seen = self.probes.get(&probe.id);
            Row {
                id: probe.id,
                name: probe.name.clone(),
                place: table::place(probe).or_else(|| probe.address.map(|at| format!("{at:#x}"))),
                state: Some(table::state(probe)),
                mechanism: table::mechanism(probe.mechanism()),
                hits: Some(probe.hits),
                missed: Some(probe.missed),
                events: seen.map_or(0, |seen| seen.costs.len()),
                cost_ns: seen.map(|seen| quantiles(&seen.costs)),
            }
        });
        let removed = self
            .probes
            .iter()
            .filter(|(id, _)| probes.iter().all(|probe| probe.id != **id))
            .map(|(id, seen)| Row {
                id: *id,
                name: seen.label.name.clone(),
                place: seen
                    .label
                    .symbol
                    .as_ref()
                    .map(|(name, offset)| match offset {
                        0 => name.clone(),
                        offset => format!("{name}+{offset:#x}"),
                    }),
                state: None,
                mechanism: None,
                hits: None,
                missed: None,
                events: seen.costs.len(),
                cost_ns: Some(quantiles(&seen.costs)),
            });
        listed.chain(removed).collect()
    }
}

fn costs() -> Histogram<u32> {
    // Two digits keep a histogram below 10 KiB: there may be thousands of probes.
    Histogram::new_with_bounds(1, LONGEST, 2).expect("1 ns to a minute at 2 digits is valid")
}

/// Median and 99th percentile.
fn quantiles(costs: &Histogram<u32>) -> (u64, u64) {
    (costs.value_at_quantile(0.5), costs.value_at_quantile(0.99))
}

/// A probe at the end of a trace. What is not known of a probe that is gone is `None`.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) place: Option<String>,
    pub(crate) state: Option<String>,
    pub(crate) mechanism: Option<&'static str>,
    pub(crate) hits: Option<u64>,
    pub(crate) missed: Option<u64>,
    pub(crate) events: u64,
    /// Median and 99th percentile.
    pub(crate) cost_ns: Option<(u64, u64)>,
}

/// `rows` as a table, with a line about dropped events if there are any.
pub(crate) fn text(rows: &[Row], dropped: u64) -> String {
    let columns = [
        ("PROBE", false),
        ("AT", false),
        ("HITS", true),
        ("MISSED", true),
        ("EVENTS", true),
        ("MECHANISM", false),
        ("MEDIAN", true),
        ("P99", true),
    ];
    let known = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let mut text = table(
        &columns,
        rows.iter().map(|row| {
            let (median, p99) = row.cost_ns.unzip();
            vec![
                row.name.clone(),
                row.place.clone().unwrap_or_else(|| "-".to_owned()),
                known(row.hits),
                known(row.missed),
                row.events.to_string(),
                match (row.mechanism, &row.state) {
                    (Some(mechanism), _) => mechanism.to_owned(),
                    (None, Some(state)) => state.clone(),
                    (None, None) => "-".to_owned(),
                },
                microseconds(median),
                microseconds(p99),
            ]
        }),
    );
    if dropped > 0 {
        text.push_str(&format!(
            "\n{dropped} events were dropped on the way here; HITS counts them, the rest does not"
        ));
    }
    text
}

fn microseconds(ns: Option<u64>) -> String {
    let Some(ns) = ns else {
        return "-".to_owned();
    };
    format!("{}.{:02} µs", ns / 1000, ns % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::output::events::tests::hit;

    #[test]
    fn summary_has_hits_and_quantiles_of_cost() {
        let label = Label {
            name: "p_vfs_read_0".into(),
            symbol: Some(("vfs_read".into(), 0)),
        };
        let mut tally = Tally::default();
        for cost_ns in 1..=1000 {
            let mut event = hit();
            event.cost_ns = cost_ns * 10;
            tally.count(&event, &label);
        }
        let mut stray = hit();
        stray.probe = 9;
        stray.cost_ns = u64::MAX;
        tally.count(&stray, &label);

        let placed = v1::Probe {
            id: 1,
            name: "p_vfs_read_0".into(),
            symbol: Some(v1::SymbolOffset {
                name: "vfs_read".into(),
                offset: 0,
            }),
            state: v1::ProbeState::Placed.into(),
            mechanism: v1::Mechanism::Emulated.into(),
            hits: 1003,
            missed: 1,
            ..Default::default()
        };
        let refused = v1::Probe {
            id: 2,
            name: "w".into(),
            state: v1::ProbeState::Refused.into(),
            refusal: "mid-instruction".into(),
            ..Default::default()
        };
        let rows = tally.rows(&[placed, refused]);
        expect![[r#"
            PROBE         AT        HITS  MISSED  EVENTS  MECHANISM                         MEDIAN             P99
            p_vfs_read_0  vfs_read  1003       1    1000  emulated                         5.02 µs         9.91 µs
            w             -            0       0       0  refused: mid-instruction               -               -
            p_vfs_read_0  vfs_read     -       -       1  -                         60129542.14 µs  60129542.14 µs
            3 events were dropped on the way here; HITS counts them, the rest does not"#]].assert_eq(&text(&rows, 3));
    }

    #[test]
    fn microseconds_keep_two_digits() {
        assert_eq!(microseconds(Some(2109)), "2.10 µs");
        assert_eq!(microseconds(Some(9)), "0.00 µs");
        assert_eq!(microseconds(None), "-");
    }
}
