//! Timestamps of events.

use clap::ValueEnum;
use hvprobe_proto::v1::Anchor;
use time::format_description::well_known::Iso8601;
use time::format_description::well_known::iso8601::{Config, EncodedConfig, TimePrecision};
use time::{OffsetDateTime, UtcOffset};

/// Date and time with microseconds.
const WALL: EncodedConfig = Config::DEFAULT
    .set_time_precision(TimePrecision::Second {
        decimal_digits: std::num::NonZero::new(6),
    })
    .encode();

/// How times are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum TimeFormat {
    /// Seconds of this machine's monotonic clock, as dmesg and perf print them
    #[default]
    Monotonic,
    /// Date and time, in UTC
    Wall,
    /// Seconds since the first event
    Relative,
    /// Seconds since the event before
    Delta,
}

/// Formatter for the times of successive events.
#[derive(Debug, Default)]
pub(crate) struct Times {
    format: TimeFormat,
    /// Relation of monotonic and wall-clock time.
    pub(crate) anchor: Option<Anchor>,
    /// Time of the first event, or of the previous one, depending on the format.
    since: Option<u64>,
}

impl Times {
    pub(crate) fn new(format: TimeFormat) -> Self {
        Self {
            format,
            ..Self::default()
        }
    }

    /// Returns the header above lines of [`super::line`] whose times have this format.
    pub(crate) fn header(&self) -> String {
        let more = match self.format {
            TimeFormat::Wall => " ".repeat(15),
            _ => String::new(),
        };
        format!(
            "#           TASK-PID     CPU#     {more}TIMESTAMP  EVENT\n\
             #              | |         |      {more}    |      |"
        )
    }

    /// Formats the time `ns` of an event; 0 means that it is unknown.
    pub(crate) fn text(&mut self, ns: u64) -> String {
        if ns == 0 {
            return match self.format {
                TimeFormat::Wall => format!("{:>27}", '?'),
                _ => format!("{:>12}", '?'),
            };
        }
        match self.format {
            TimeFormat::Monotonic => seconds("", ns),
            TimeFormat::Wall => {
                let text = realtime(ns, self.anchor.as_ref()).and_then(wall);
                format!("{:>27}", text.as_deref().unwrap_or("?"))
            }
            TimeFormat::Relative => apart(*self.since.get_or_insert(ns), ns),
            TimeFormat::Delta => apart(self.since.replace(ns).unwrap_or(ns), ns),
        }
    }
}

/// Formats the seconds from `since` to `ns`: a negative number if `ns` is earlier, as when events arrive out of
/// order.
fn apart(since: u64, ns: u64) -> String {
    let sign = if ns < since { "-" } else { "" };
    seconds(sign, ns.abs_diff(since))
}

fn seconds(sign: &str, ns: u64) -> String {
    let whole = format!("{sign}{}", ns / 1_000_000_000);
    format!("{whole:>5}.{:06}", ns % 1_000_000_000 / 1000)
}

/// Converts `ns` to wall-clock time, in nanoseconds since 1970, if the relation of the clocks is known.
pub(crate) fn realtime(ns: u64, anchor: Option<&Anchor>) -> Option<u64> {
    let anchor = anchor?;
    ns.checked_add(anchor.realtime_ns)?
        .checked_sub(anchor.monotonic_ns)
}

fn wall(ns: u64) -> Option<String> {
    // Truncate, so that the time is not rounded up into the next second.
    let time = OffsetDateTime::from_unix_timestamp_nanos((ns - ns % 1000).into()).ok()?;
    time.to_offset(UtcOffset::UTC).format(&Iso8601::<WALL>).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn texts(format: TimeFormat, anchor: Option<Anchor>) -> Vec<String> {
        let mut times = Times::new(format);
        times.anchor = anchor;
        let some = [
            12 * SECOND + 345_678_999,
            0,
            13 * SECOND,
            12 * SECOND + 900_000_000,
        ];
        some.map(|ns| times.text(ns)).into()
    }

    #[test]
    fn times_are_printed_from_where_they_are_asked_for() {
        let monotonic = texts(TimeFormat::Monotonic, None);
        assert_eq!(monotonic[0], "   12.345678");
        assert_eq!(monotonic[1], "           ?");
        let relative = texts(TimeFormat::Relative, None);
        assert_eq!(relative[0], "    0.000000");
        assert_eq!(relative[2], "    0.654321");
        let delta = texts(TimeFormat::Delta, None);
        assert_eq!(delta[2], "    0.654321");
        assert_eq!(delta[3], "   -0.100000");
    }

    #[test]
    fn wall_clock_is_that_of_the_anchor_with_microseconds() {
        let anchor = Anchor {
            monotonic_ns: 10 * SECOND,
            realtime_ns: 1_700_000_000 * SECOND,
        };
        let wall = texts(TimeFormat::Wall, Some(anchor));
        assert_eq!(wall[0], "2023-11-14T22:13:22.345678Z");
        assert_eq!(wall[1], format!("{:>27}", "?"));
        let unknown = texts(TimeFormat::Wall, None);
        assert_eq!(unknown[0], format!("{:>27}", "?"));
    }

    #[test]
    fn header_stands_over_the_times() {
        for format in [TimeFormat::Monotonic, TimeFormat::Wall] {
            let mut times = Times::new(format);
            let header = times.header();
            let first = header.lines().next().unwrap_or_default();
            // 16 characters for the task, a dash, 7 for the pid, the processor, and two blanks.
            let end = 16 + 1 + 7 + 1 + 5 + 1 + times.text(0).len();
            assert_eq!(first.find("  EVENT").map(|at| at + 2), Some(end + 2));
        }
    }
}
