//! A running script: it handles the events and histograms of the script's probes.
//!
//! Invariant: the server counts all hits, from the first one on. What the script prints at hits appears in the
//! order of the hits. Missing hits are reported.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hvprobe_proto::v1::{
    HistogramForm, HistogramKeyValue, Probe, SubscribeResponse, histogram_key_value::What,
};
use hvprobe_spec::script::{Action, Counted, KeyPart, MapFunction};
use hvprobe_spec::shape::ShapeKind;
use time::OffsetDateTime;
use tokio::time::{Interval, MissedTickBehavior};

use super::maps::{Entries, KeyText, Summed, row_of_bits, row_of_step};
use super::printing::{Hit, aside, function, in_numbers, probe, symbol, time};
use super::source::Script;
use crate::client::Client;
use crate::client::clock::now;
use crate::follow::histograms::Counting;
use crate::follow::printer::{Batch, emit};
use crate::follow::symbolize;
use crate::output;
use crate::output::events::{Labels, is_hit};
use crate::output::histograms::Key;
use crate::output::histograms::key::shown;
use crate::output::values::names::Names;
use crate::output::values::stack_trace::StackTrace;

/// Running script.
#[derive(Debug)]
pub(crate) struct Running {
    script: Script,
    machine: String,
    /// Position of each probe in the script, by the id of the probe.
    positions: HashMap<u32, usize>,
    labels: Labels,
    names: Names,
    /// Histograms of each map, each with its index in the map.
    counting: Vec<Vec<(usize, Counting)>>,
    intervals: Vec<Interval>,
    /// Index of the interval that is checked first, so that a short interval does not starve the others.
    turn: usize,
    /// Number of events that the machine lost before the server could count them.
    lost: u64,
    began_ns: u64,
    /// Whether `exit()` was called.
    is_over: bool,
}

impl Running {
    /// Starts `script`. Its `probes` are planted on `machine`; `positions` has, by id, the position of each in the
    /// script.
    pub(crate) async fn begin(
        client: &mut Client,
        machine: &str,
        probes: &[Probe],
        script: Script,
        positions: HashMap<u32, usize>,
    ) -> anyhow::Result<Self> {
        let mut running = Self {
            machine: machine.to_owned(),
            labels: Labels::default(),
            names: Names::default(),
            counting: Vec::new(),
            intervals: Vec::new(),
            turn: 0,
            lost: 0,
            began_ns: now(),
            is_over: false,
            positions,
            script,
        };
        running.learn(probes);
        let program = running.script.program.clone();
        for map in &program.maps {
            let mut all = Vec::new();
            for (at, counted) in map.counted.iter().enumerate() {
                all.extend(running.count(client, at, counted).await?);
            }
            running.counting.push(all);
        }
        if running.needs_functions() {
            symbolize::know_functions(&mut running.names, client, machine).await;
        }
        let attached = running.positions.len() + program.others;
        let s = if attached == 1 { "" } else { "s" };
        output::eprint(format_args!("Attaching {attached} probe{s}..."));
        running.act(client, &program.begin).await?;
        let start = tokio::time::Instant::now();
        running.intervals = program
            .intervals
            .iter()
            .map(|(milliseconds, _)| {
                let period = Duration::from_millis(*milliseconds);
                let mut interval = tokio::time::interval_at(start + period, period);
                interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
                interval
            })
            .collect();
        Ok(running)
    }

    /// Starts the server's histogram for `counted`, at index `at` of its map.
    async fn count(
        &self,
        client: &mut Client,
        at: usize,
        counted: &Counted,
    ) -> anyhow::Result<Option<(usize, Counting)>> {
        let ids = self.ids(|position| counted.probes.contains(position));
        if ids.is_empty() {
            // The reason why the probes are missing has already been printed.
            return Ok(None);
        }
        let text = &counted.histogram.text;
        let counting = Counting::begin(client, &self.machine, ids, text).await;
        let located = |error| self.script.wrong_in(&counted.histogram, error);
        let counting = counting.map_err(|wrong| wrong.into_error(located))?;
        Ok(Some((at, counting)))
    }

    /// Returns whether addresses may have to be printed after the machine has ended.
    fn needs_functions(&self) -> bool {
        let mut counting = self.counting.iter().flatten();
        let mut probes = self.script.program.probes.iter();
        probes.any(|planted| planted.stacks)
            || counting.any(|(_, counting)| {
                let mut keys = counting.schema.keys.iter();
                keys.any(|key| key.form == HistogramForm::Symbol)
            })
    }

    fn learn(&mut self, probes: &[Probe]) {
        let probes: Vec<_> = probes.iter().cloned().map(in_numbers).collect();
        self.labels.learn(&probes);
    }

    /// Returns the ids of the probes whose events are needed; empty if the hits are only counted.
    pub(crate) fn wanted(&self) -> Vec<u32> {
        self.ids(|position| {
            let planted = self.script.program.probes.get(*position);
            planted.is_some_and(|planted| !planted.actions.is_empty())
        })
    }

    /// Returns the sorted ids of the probes whose positions are `wanted`.
    fn ids(&self, wanted: impl Fn(&usize) -> bool) -> Vec<u32> {
        let found = self.positions.iter().filter(|(_, it)| wanted(it));
        let mut ids: Vec<_> = found.map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// Returns whether the script has called `exit()`.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Waits until an interval elapses, and returns its index.
    pub(crate) async fn tick(&mut self) -> usize {
        poll_fn(|context| {
            let count = self.intervals.len();
            let mut all = (0..count).map(|step| (self.turn + step) % count);
            let over = all.find(|index| {
                let interval = self.intervals.get_mut(*index);
                interval.is_some_and(|interval| interval.poll_tick(context).is_ready())
            });
            match over {
                Some(index) => {
                    self.turn = index + 1;
                    Poll::Ready(index)
                }
                None => Poll::Pending,
            }
        })
        .await
    }

    /// Runs the actions of the interval at `index`.
    pub(crate) async fn ticked(&mut self, client: &mut Client, index: usize) -> anyhow::Result<()> {
        let interval = self.script.program.intervals.get(index).cloned();
        match interval {
            Some((_, actions)) => self.act(client, &actions).await,
            None => Ok(()),
        }
    }

    /// Runs the actions of the hits in `batch`.
    pub(crate) async fn show(
        &mut self,
        client: &mut Client,
        batch: SubscribeResponse,
    ) -> anyhow::Result<Batch> {
        self.learn(&batch.probes);
        if batch.dropped > 0 {
            output::eprint(format_args!("Lost {} events", batch.dropped));
        }
        let mut text = String::new();
        for event in &batch.events {
            if self.is_over {
                break;
            }
            if !is_hit(event) {
                continue;
            }
            let position = self.positions.get(&event.probe).copied();
            let planted = position.and_then(|at| self.script.program.probes.get(at));
            let (Some(planted), label) = (planted, self.labels.of(event.probe)) else {
                continue;
            };
            let hit = Hit {
                event,
                label: &label,
                planted,
                began_ns: self.began_ns,
            };
            for action in &planted.actions {
                match action {
                    Action::Printf { format, values } => {
                        let addresses = hit.addresses(values);
                        let names = &mut self.names;
                        if !addresses.is_empty() {
                            symbolize::look_up(names, client, &self.machine, addresses).await;
                        }
                        text.push_str(&hit.printf(format, values, names));
                    }
                    Action::Time(format) => {
                        text.push_str(&time(format, OffsetDateTime::now_utc()));
                    }
                    Action::Exit => {
                        self.is_over = true;
                        break;
                    }
                    // Hits have no other actions.
                    Action::Print { .. } | Action::Clear { .. } => {}
                }
            }
        }
        if !text.is_empty() {
            emit(&mut io::stdout().lock(), &text)?;
        }
        Ok(match (self.is_over, batch.ended) {
            (true, _) => Batch::Enough,
            (false, Some(ending)) => Batch::Ended(ending),
            (false, None) => Batch::More,
        })
    }

    /// Runs the actions at the end, and prints the remaining maps.
    pub(crate) async fn end(&mut self, client: &mut Client) -> anyhow::Result<()> {
        let actions = self.script.program.end.clone();
        self.act(client, &actions).await?;
        let mut text = String::new();
        for map in 0..self.counting.len() {
            text.push_str(&self.map(client, map, None, true).await?);
        }
        if self.lost > 0 {
            output::eprint(format_args!("Lost {} events", self.lost));
        }
        if !text.is_empty() {
            emit(&mut io::stdout().lock(), &format!("\n{text}"))?;
        }
        Ok(())
    }

    async fn act(&mut self, client: &mut Client, actions: &[Action]) -> anyhow::Result<()> {
        for action in actions {
            let text = match action {
                Action::Printf { format, values } => aside(format, values, now(), self.began_ns),
                Action::Time(format) => time(format, OffsetDateTime::now_utc()),
                Action::Print { map, top } => self.map(client, *map, *top, false).await?,
                Action::Clear { map } => {
                    for (_, counting) in self.counting.get_mut(*map).into_iter().flatten() {
                        counting.clear().await?;
                    }
                    continue;
                }
                Action::Exit => {
                    self.is_over = true;
                    return Ok(());
                }
            };
            emit(&mut io::stdout().lock(), &text)?;
        }
        Ok(())
    }

    /// Formats the map at index `map`. An empty map gives an empty text. If `last` is set, also prints how many
    /// hits are missing in the map.
    async fn map(
        &mut self,
        client: &mut Client,
        map: usize,
        top: Option<u64>,
        last: bool,
    ) -> anyhow::Result<String> {
        let found = (
            self.script.program.maps.get(map).cloned(),
            self.counting.get_mut(map),
        );
        let (Some(map), Some(all)) = found else {
            return Ok(String::new());
        };
        let mut entries = Entries::default();
        let (mut dropped, mut unread) = (0_u64, 0_u64);
        let mut read = Vec::new();
        for (at, counting) in all {
            let (rows, totals) = counting.read().await?;
            self.lost = self.lost.max(totals.lost);
            dropped = dropped.saturating_add(totals.dropped);
            if let Some(counted) = map.counted.get(*at) {
                read.push((counted, Arc::clone(&counting.schema), rows));
            }
        }
        // Probes that had no address at first may have one by now.
        let probes = client.list_probes(&self.machine).await.unwrap_or_default();
        self.learn(&probes);
        for (counted, schema, rows) in read {
            let keys = &schema.keys;
            let addresses = rows.iter().flat_map(|row| {
                let keys = keys.iter().zip(&row.keys);
                keys.filter_map(|(key, value)| match (key.form, &value.what) {
                    (HistogramForm::Symbol, Some(What::Number(at))) => Some(*at),
                    _ => None,
                })
            });
            let addresses = addresses.collect();
            symbolize::look_up(&mut self.names, client, &self.machine, addresses).await;
            for row in rows {
                let parts = counted.keys.iter();
                let key = parts.map(|part| self.key(part, keys, &row.keys, &row.comm));
                let key: Vec<_> = key.collect();
                let last_key = keys.last().zip(row.keys.last());
                let number = last_key.and_then(|(key, value)| number(key, value));
                match (map.aggregate, row.values.first()) {
                    (MapFunction::Hits, _) => entries.add_hits(key, row.hits),
                    (MapFunction::Powers, _) => match last_key.map(|(_, value)| &value.what) {
                        Some(Some(What::Number(bits))) => {
                            entries.add_row(key, row_of_bits(*bits), row.hits);
                        }
                        _ => unread += row.hits,
                    },
                    (MapFunction::Steps { min, max, step }, _) => match number {
                        Some(number) => {
                            let index = row_of_step(number, (min, max, step));
                            entries.add_row(key, index, row.hits);
                        }
                        None => unread += row.hits,
                    },
                    (_, Some(sum)) => {
                        unread += row.hits.saturating_sub(sum.count);
                        let signed = schema.values.first().is_some_and(|value| value.signed);
                        let wide = |number: u64| match signed {
                            true => i128::from(number.cast_signed()),
                            false => i128::from(number),
                        };
                        if sum.count > 0 {
                            entries.add_sum(
                                key,
                                Summed {
                                    count: sum.count,
                                    sum: match sum.sum_high {
                                        Some(high) => i128::from(high) << 64 | i128::from(sum.sum),
                                        None => wide(sum.sum),
                                    },
                                    least: wide(sum.least),
                                    greatest: wide(sum.greatest),
                                },
                            );
                        }
                    }
                    (_, None) => {}
                }
            }
        }
        if last {
            let name = &map.name;
            if dropped > 0 {
                output::notice(format_args!(
                    "@{name} is full: {dropped} hits are not in it"
                ));
            }
            if unread > 0 {
                output::notice(format_args!(
                    "of {unread} hits the value for @{name} could not be read"
                ));
            }
        }
        Ok(match entries.is_empty() {
            true => String::new(),
            false => entries.text(&map.name, map.aggregate, top),
        })
    }

    /// Returns a part of a map's key. `keys`, `values` and `comm` are those of an entry of the histogram.
    fn key(
        &self,
        part: &KeyPart,
        keys: &[Key],
        values: &[HistogramKeyValue],
        comm: &[u8],
    ) -> KeyText {
        let of = |at: &usize| keys.get(*at).zip(values.get(*at));
        let unknown = || KeyText::Text("?".to_owned());
        let what = |at: &usize| of(at).and_then(|(_, value)| value.what.as_ref());
        match part {
            KeyPart::Number(number) => KeyText::Number((*number).into()),
            KeyPart::Text(text) => KeyText::Text(text.clone()),
            KeyPart::Key(at) => match (of(at), what(at)) {
                (_, Some(What::StackTrace(stack))) => {
                    let frames = StackTrace::from(stack).indented("\n    ", &self.names);
                    KeyText::Text(format!("{frames}\n"))
                }
                (Some((key, value)), _) => match number(key, value) {
                    Some(number) => KeyText::Number(number),
                    None => KeyText::Text(shown(key, value, comm, &self.names)),
                },
                (None, _) => unknown(),
            },
            KeyPart::Symbol(at) => match what(at) {
                Some(What::Number(address)) => KeyText::Text(symbol(*address, &self.names)),
                _ => KeyText::Text("(fault)".to_owned()),
            },
            KeyPart::Function(at) | KeyPart::Probe(at) => {
                let id = what(at).and_then(|what| match what {
                    What::Number(id) => u32::try_from(*id).ok(),
                    _ => None,
                });
                let position = id.and_then(|id| self.positions.get(&id));
                let planted = position.and_then(|at| self.script.program.probes.get(*at));
                let (Some(planted), Some(id)) = (planted, id) else {
                    return unknown();
                };
                let label = self.labels.of(id);
                KeyText::Text(match part {
                    KeyPart::Function(_) => function(label.symbol.as_ref(), planted),
                    _ => probe(label.symbol.as_ref(), planted),
                })
            }
        }
    }
}

/// Returns a key as a number, unless values of its type are displayed in another way.
fn number(key: &Key, value: &HistogramKeyValue) -> Option<i128> {
    let Some(What::Number(number)) = value.what else {
        return None;
    };
    match key.shape.as_ref()?.kind {
        ShapeKind::Signed | ShapeKind::Enum { signed: true, .. } => {
            Some(number.cast_signed().into())
        }
        ShapeKind::Unsigned
        | ShapeKind::Hex
        | ShapeKind::Pointer
        | ShapeKind::Enum { .. }
        | ShapeKind::Char
        | ShapeKind::Bool => Some(number.into()),
        _ => None,
    }
}
