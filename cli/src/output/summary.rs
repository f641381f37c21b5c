//! Summary of a trace: one row per probe, with the cost of its hits.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use hvprobe_proto::v1;
use serde::Serialize;

use super::events::{self, Label, is_hit};
use super::table::{self, table};
use super::words::Word as _;

/// Maximum cost that is recorded, in nanoseconds. Higher costs are recorded as this one.
const LONGEST: u64 = 60_000_000_000;
/// Maximum duration of a call that is recorded, in nanoseconds: a day.
const LONGEST_CALL: u64 = 86_400_000_000_000;

/// Received events of each probe, and their costs.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    probes: BTreeMap<u32, Seen>,
    /// Number of events that were lost on the way to the client.
    pub(crate) dropped: u64,
    /// Number of received events.
    pub(crate) events: u64,
}

#[derive(Debug)]
struct Seen {
    label: Label,
    events: u64,
    /// Costs of the hits that took an exit.
    costs: Histogram<u32>,
    /// Durations of calls, for return probes.
    durations: Option<Histogram<u32>>,
}

impl Tally {
    /// Counts `event` if it is a hit or a return. Other events are not counted: each belongs to a hit or a return.
    pub(crate) fn count(&mut self, event: &v1::Event, label: &Label) {
        if !is_hit(event) {
            return;
        }
        self.events += 1;
        let seen = self.probes.entry(event.probe).or_insert_with(|| Seen {
            label: label.clone(),
            events: 0,
            costs: up_to(LONGEST),
            durations: None,
        });
        seen.events += 1;
        if event.cost_ns > 0 {
            seen.costs.saturating_record(event.cost_ns);
        }
        // A duration of zero means that it is unknown.
        if let Some(call) = event.call.as_ref().filter(|call| call.duration_ns > 0) {
            let durations = &mut seen.durations;
            durations
                .get_or_insert_with(|| up_to(LONGEST_CALL))
                .saturating_record(call.duration_ns);
        }
    }

    /// Returns a row for each of `probes`, and one for each other probe that had events, such as a removed one.
    pub(crate) fn rows(&self, probes: &[v1::Probe]) -> Vec<Row> {
        let listed = probes.iter().map(|probe| {
            let seen = self.probes.get(&probe.id).map(Seen::row);
            Row {
                probe: probe.id,
                event: probe.name.clone(),
                at: table::place(probe).or_else(|| probe.address.map(|at| format!("{at:#x}"))),
                state: Some(table::state(probe)),
                mechanism: probe.mechanism().word(),
                hits: Some(probe.hits),
                missed: Some(probe.missed),
                throttled: probe.throttled,
                ..seen.unwrap_or_default()
            }
        });
        let removed = self
            .probes
            .iter()
            .filter(|(id, _)| probes.iter().all(|probe| probe.id != **id))
            .map(|(id, seen)| Row {
                probe: *id,
                ..seen.row()
            });
        listed.chain(removed).collect()
    }
}

impl Seen {
    /// Returns the row of a probe, filled only from its events.
    fn row(&self) -> Row {
        let symbol = self.label.symbol.as_ref();
        let costs = Some(&self.costs).filter(|costs| !costs.is_empty());
        let durations = self.durations.as_ref();
        let (cost_median_ns, cost_p99_ns) = costs.map(quantiles).unzip();
        let (duration_median_ns, duration_p99_ns) = durations.map(quantiles).unzip();
        Row {
            event: self.label.name.clone(),
            at: symbol.map(|(name, offset)| table::at(name, *offset)),
            events: self.events,
            cost_median_ns,
            cost_p99_ns,
            duration_median_ns,
            duration_p99_ns,
            duration_max_ns: durations.map(Histogram::max),
            ..Row::default()
        }
    }
}

fn up_to(longest: u64) -> Histogram<u32> {
    // With two significant digits a histogram takes less than 16 KiB. There may be thousands of probes.
    Histogram::new_with_bounds(1, longest, 2).expect("1 ns to a day at 2 digits is valid")
}

/// Returns the median and the 99th percentile.
fn quantiles(costs: &Histogram<u32>) -> (u64, u64) {
    (costs.value_at_quantile(0.5), costs.value_at_quantile(0.99))
}

/// Summary of a probe in its JSON form. Unknown fields of a removed probe are `None`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    probe: u32,
    event: String,
    at: Option<String>,
    state: Option<String>,
    mechanism: Option<&'static str>,
    hits: Option<u64>,
    missed: Option<u64>,
    throttled: u64,
    events: u64,
    /// Costs of the hits, if any took an exit.
    cost_median_ns: Option<u64>,
    cost_p99_ns: Option<u64>,
    /// Durations of the calls of a return probe.
    duration_median_ns: Option<u64>,
    duration_p99_ns: Option<u64>,
    duration_max_ns: Option<u64>,
}

/// Returns `rows` as a table, with lines about throttled hits and dropped events if there are any.
pub(crate) fn text(rows: &[Row], dropped: u64) -> String {
    let mut columns = vec![
        ("PROBE", false),
        ("AT", false),
        ("HITS", true),
        ("MISSED", true),
        ("EVENTS", true),
        ("MECHANISM", false),
        ("MEDIAN", true),
        ("P99", true),
    ];
    let with_calls = rows.iter().any(|row| row.duration_max_ns.is_some());
    if with_calls {
        columns.extend([
            ("CALL MEDIAN", true),
            ("CALL P99", true),
            ("CALL MAX", true),
        ]);
    }
    let known = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let duration = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), events::duration);
    let mut text = table(
        &columns,
        rows.iter().map(|row| {
            let mut cells = vec![
                row.event.clone(),
                row.at.clone().unwrap_or_else(|| "-".to_owned()),
                known(row.hits),
                known(row.missed),
                row.events.to_string(),
                match (row.mechanism, &row.state) {
                    (Some(mechanism), _) => mechanism.to_owned(),
                    (None, Some(state)) => state.clone(),
                    (None, None) => "-".to_owned(),
                },
                microseconds(row.cost_median_ns),
                microseconds(row.cost_p99_ns),
            ];
            if with_calls {
                cells.push(duration(row.duration_median_ns));
                cells.push(duration(row.duration_p99_ns));
                cells.push(duration(row.duration_max_ns));
            }
            cells
        }),
    );
    let throttled = rows.iter().filter(|row| row.throttled > 0);
    for row in throttled {
        text.push_str(&format!(
            "\n{} hits of {} were throttled; HITS does not count them",
            row.throttled, row.event
        ));
    }
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
    use hvprobe_proto::v1::EventKind;

    use super::*;
    use crate::output::events::lines::tests::{hit, returned};

    #[test]
    fn summary_has_hits_and_quantiles_of_cost() {
        let label = Label {
            name: "p_vfs_read_0".into(),
            symbol: Some(("vfs_read".into(), 0)),
            ..Label::default()
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
            throttled: 55,
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
            55 hits of p_vfs_read_0 were throttled; HITS does not count them
            3 events were dropped on the way here; HITS counts them, the rest does not"#]].assert_eq(&text(&rows, 3));
    }

    #[test]
    fn return_probes_have_the_durations_of_their_calls() {
        let label = Label {
            name: "r_vfs_read_0".into(),
            symbol: Some(("vfs_read".into(), 0)),
            ..Label::default()
        };
        let mut tally = Tally::default();
        for thousands in 1..=100 {
            let mut event = returned(0);
            event.call.as_mut().unwrap().duration_ns = thousands * 1000;
            tally.count(&event, &label);
        }
        let mut post = hit();
        post.kind = EventKind::Post.into();
        tally.count(&post, &label);
        assert_eq!(tally.events, 100);
        let mut entry = hit();
        entry.probe = 2;
        tally.count(&entry, &label);
        expect![[r#"
            PROBE         AT        HITS  MISSED  EVENTS  MECHANISM   MEDIAN      P99  CALL MEDIAN  CALL P99   CALL MAX
            r_vfs_read_0  vfs_read     -       -     100  -          2.11 µs  2.11 µs     50.175us  99.327us  100.351us
            r_vfs_read_0  vfs_read     -       -       1  -          2.11 µs  2.11 µs            -         -          -"#]].assert_eq(&text(&tally.rows(&[]), 0));
    }

    #[test]
    fn microseconds_keep_two_digits() {
        assert_eq!(microseconds(Some(2109)), "2.10 µs");
        assert_eq!(microseconds(Some(9)), "0.00 µs");
        assert_eq!(microseconds(None), "-");
    }
}
