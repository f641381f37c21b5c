//! Printer for a stream of events.

use std::fmt::Write as _;
use std::io;

use hvprobe_proto::v1::{Ending, Probe, SubscribeResponse};

use super::symbolize;
use crate::client::Client;
use crate::options::events::OutputArgs;
use crate::output::events::captured::records_stacks;
use crate::output::events::times::Times;
use crate::output::events::{self, Labels, is_hit};
use crate::output::file::{OutputFile, Unwritten};
use crate::output::json::{self, Hit, Shown};
use crate::output::summary::Tally;
use crate::output::values::names::Names;

/// Format and destination of printed events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Columns on standard output.
    Text,
    /// JSON on standard output.
    Json,
    /// Columns on standard error, because standard output shows the console.
    Aside,
}

/// State of the stream after a batch.
#[derive(Debug, PartialEq)]
pub(crate) enum Batch {
    /// More batches follow.
    More,
    /// The requested number of hits has been printed.
    Enough,
    /// The machine ended.
    Ended(Ending),
}

/// Prints events and counts them.
#[derive(Debug)]
pub(crate) struct Printer {
    pub(crate) format: Format,
    /// Output file; `None` for standard output or error.
    file: Option<OutputFile>,
    /// Number of hits that are still to be printed; `None` for all.
    left: Option<u64>,
    headed: bool,
    labels: Labels,
    times: Times,
    /// Names of the printed addresses.
    names: Names,
    pub(crate) tally: Tally,
}

impl Printer {
    /// Makes a printer and opens the output file, if one was asked for.
    pub(crate) fn new(
        format: Format,
        hits: Option<u64>,
        output: &OutputArgs,
    ) -> Result<Self, Unwritten> {
        Ok(Self {
            format,
            file: output.open()?,
            left: hits,
            headed: false,
            labels: Labels::default(),
            times: Times::new(output.time),
            names: Names::default(),
            tally: Tally::default(),
        })
    }

    /// Loads the names of functions if any of `probes` records stacks.
    pub(crate) async fn prepare(&mut self, client: &mut Client, machine: &str, probes: &[Probe]) {
        if probes.iter().any(records_stacks) {
            symbolize::know_functions(&mut self.names, client, machine).await;
        }
    }

    /// Prints `batch`, with names of addresses from the server of `client`. After an error no further output is
    /// possible.
    pub(crate) async fn show(
        &mut self,
        client: &mut Client,
        batch: SubscribeResponse,
    ) -> anyhow::Result<Batch> {
        self.labels.learn(&batch.probes);
        self.look_up(client, &batch).await;
        let text = self.render(&batch)?;
        if !text.is_empty() {
            self.write(&text)?;
        }
        Ok(match (self.left, batch.ended) {
            (Some(0), _) => Batch::Enough,
            (_, Some(ending)) => Batch::Ended(ending),
            (_, None) => Batch::More,
        })
    }

    /// Prints lines of the trace without buffering.
    pub(crate) fn write(&mut self, text: &str) -> anyhow::Result<()> {
        match (&mut self.file, self.format) {
            (Some(file), _) => file.write(text)?,
            (None, Format::Text | Format::Json) => emit(&mut io::stdout().lock(), text)?,
            (None, Format::Aside) => emit(&mut io::stderr().lock(), text)?,
        }
        Ok(())
    }

    /// Resolves the addresses in `batch` that may have names.
    async fn look_up(&mut self, client: &mut Client, batch: &SubscribeResponse) {
        let mut addresses = Vec::new();
        for event in &batch.events {
            if let Some(label) = self.labels.get(event.probe) {
                let found = &mut |address| addresses.push(address);
                label.arguments.symbols(event, &label.captures, found);
                let stack = label.captures.split(event).stack_trace();
                addresses.extend(stack.into_iter().flat_map(|stack| stack.addresses));
            }
        }
        symbolize::look_up(&mut self.names, client, &batch.machine, addresses).await;
    }

    fn render(&mut self, batch: &SubscribeResponse) -> anyhow::Result<String> {
        let mut text = String::new();
        let machine = &batch.machine;
        self.times.anchor = batch.anchor.or(self.times.anchor);
        if batch.dropped > 0 {
            self.tally.dropped = self.tally.dropped.saturating_add(batch.dropped);
            let line = match self.format {
                Format::Json => serde_json::to_string(&json::Line::Dropped {
                    machine,
                    count: batch.dropped,
                })?,
                Format::Text | Format::Aside => events::dropped(batch.dropped),
            };
            writeln!(text, "{line}")?;
        }
        for notice in &batch.throttled {
            let line = match self.format {
                Format::Json => serde_json::to_string(&json::Line::Throttled {
                    machine,
                    notice: Shown(notice),
                })?,
                Format::Text | Format::Aside => events::throttled(notice),
            };
            writeln!(text, "{line}")?;
        }
        for event in &batch.events {
            match &mut self.left {
                Some(0) => return Ok(text),
                Some(left) if is_hit(event) => *left -= 1,
                _ => {}
            }
            let label = self.labels.of(event.probe);
            self.tally.count(event, &label);
            if self.format == Format::Json {
                let line = json::Line::Event(Hit {
                    machine,
                    event,
                    label: &label,
                    anchor: self.times.anchor.as_ref(),
                    names: &self.names,
                });
                writeln!(text, "{}", serde_json::to_string(&line)?)?;
            } else {
                if !std::mem::replace(&mut self.headed, true) {
                    writeln!(text, "{}", self.times.header())?;
                }
                let time = self.times.text(event.host_ns);
                writeln!(text, "{}", events::line(event, &time, &label, &self.names))?;
            }
        }
        if let (Some(ending), Format::Json) = (&batch.ended, self.format) {
            let line = json::Line::Ended {
                machine,
                ending: Shown(ending),
            };
            writeln!(text, "{}", serde_json::to_string(&line)?)?;
        }
        Ok(text)
    }
}

/// Prints `text` and flushes it.
pub(crate) fn emit(out: &mut impl io::Write, text: &str) -> io::Result<()> {
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;
    use crate::output::events::lines::tests::hit;

    fn printer(format: Format, hits: Option<u64>) -> Printer {
        Printer::new(format, hits, &OutputArgs::default()).unwrap()
    }

    fn batch(events: usize, dropped: u64) -> SubscribeResponse {
        SubscribeResponse {
            machine: "vm0".into(),
            events: vec![hit(); events],
            dropped,
            ..Default::default()
        }
    }

    fn check(printer: &mut Printer, batch: &SubscribeResponse, expected: Expect) {
        expected.assert_eq(&printer.render(batch).unwrap());
    }

    #[test]
    fn header_comes_once_and_drops_come_before_what_follows_them() {
        let mut printer = printer(Format::Text, None);
        check(&mut printer, &batch(0, 0), expect![[""]]);
        check(
            &mut printer,
            &batch(1, 0),
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                          dd-123     [000]  1234.567890: probe_1: (0xffffffff81234560) rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
        check(
            &mut printer,
            &batch(1, 5),
            expect![[r#"
            # 5 events dropped
                          dd-123     [000]  1234.567890: probe_1: (0xffffffff81234560) rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
        assert_eq!((printer.tally.events, printer.tally.dropped), (2, 5));
    }

    #[test]
    fn throttled_hits_are_reported() {
        let throttled = SubscribeResponse {
            throttled: vec![hvprobe_proto::v1::Throttled {
                probe: 3,
                name: "p_vfs_read_0".into(),
                count: 17,
                window_ns: 500_000_000,
                disabled: true,
            }],
            ..batch(0, 0)
        };
        check(
            &mut printer(Format::Text, None),
            &throttled,
            expect![[r#"
                # p_vfs_read_0: 17 hits throttled within 0.50 s; the probe is disabled, `hvprobe probe enable` turns it on again
            "#]],
        );
        check(
            &mut printer(Format::Json, None),
            &throttled,
            expect![[r#"
                {"type":"throttled","machine":"vm0","probe":3,"event":"p_vfs_read_0","count":17,"window_ns":500000000,"disabled":true}
            "#]],
        );
    }

    #[test]
    fn no_more_hits_are_printed_than_asked_for() {
        let mut printer = printer(Format::Json, Some(3));
        let lines = |text: String| text.lines().count();
        assert_eq!(lines(printer.render(&batch(2, 0)).unwrap()), 2);
        assert_eq!(lines(printer.render(&batch(2, 0)).unwrap()), 1);
        assert_eq!(printer.left, Some(0));
        assert_eq!(printer.tally.events, 3);
    }

    #[test]
    fn end_is_a_line_in_json_only() {
        let ended = SubscribeResponse {
            ended: Some(Ending::default()),
            ..batch(0, 0)
        };
        check(&mut printer(Format::Text, None), &ended, expect![[""]]);
        check(
            &mut printer(Format::Json, None),
            &ended,
            expect![[r#"
            {"type":"ended","machine":"vm0","reason":"unknown","guest_status":null,"report":null}
        "#]],
        );
    }
}
