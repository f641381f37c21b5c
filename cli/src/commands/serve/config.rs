//! `hvprobe serve --config FILE`: a server's total limits, as TOML.

use std::fs;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::Path;

use anyhow::Context as _;
use hvprobe_server::{Bounds, Limits};
use serde::{Deserialize, Deserializer, de};

use crate::failure::WrongUsage;
use crate::options::size::Size;

/// A configuration file. An unknown key is an error.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    limits: Table,
}

/// Defines the limits in the file. Each has a key, a type, a function that reads it unless it is a plain number, a
/// field of [`Limits`], a function that writes it, and a meaning.
macro_rules! limits {
    ($(
        $key:ident: $ty:ty $([$read:literal])? = $($field:ident).+, $write:ident, $meaning:literal;
    )+) => {
        /// Limits in the file. A missing one keeps its default.
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        struct Table {
            $($(#[serde(deserialize_with = $read)])? $key: Option<$ty>,)+
        }

        impl Table {
            /// Sets the fields of `limits` that the file has a value for.
            fn set(self, limits: &mut Limits) {
                $(if let Some(value) = self.$key {
                    limits.$($field).+ = value.into();
                })+
            }
        }

        /// Returns each limit's key, value as written in the file, and meaning.
        fn rows(limits: &Limits) -> Vec<(&'static str, String, &'static str)> {
            vec![$((stringify!($key), $write(limits.$($field).+), $meaning)),+]
        }
    };
}

limits! {
    machines: usize = machines, number, "machines that boot or live";
    memory: u64 ["size"] = memory, bytes, "guest memory of all machines together";
    cpus: u32 = cpus, number, "virtual CPUs of all machines together";
    ended_machines: NonZeroUsize = ended_machines, number, "ended machines that are remembered";
    ended_bytes: usize ["length"] = ended_bytes, bytes_of, "what they keep: probes, consoles, reports, events";
    connections: NonZeroUsize = connections, number, "connections on the unix socket";
    tcp_connections: NonZeroUsize = tcp_connections, number, "connections on the TCP port";
    calls_per_connection: NonZeroU32 = calls_per_connection, number, "calls under way in one connection";
    streams: usize = streams, number, "calls under way that are answered with a stream";
    subscribers: usize = subscribers, number, "subscriptions to events";
    event_bytes: usize ["length"] = event_bytes, bytes_of, "events that wait for all subscribers together";
    large_requests: NonZeroUsize = large_requests, number, "requests of more than 128 KiB at a time";
    large_answers: usize = large_answers, number, "long answers at a time, beside one of each connection";
    sessions: usize = sessions, number, "sessions of clients, kept ones counted";
    probes_per_machine: usize ["probes"] = each.probes, number, "probes registered in one machine";
    console_bytes_per_machine: usize ["console"] = each.console, bytes_of,
        "what one machine printed last, for whoever looks later";
}

fn probes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    let probes = usize::deserialize(from)?;
    // The default is also the maximum.
    let most = Bounds::default().probes;
    if probes > most {
        let why = format!("a machine has {most} probes at most");
        return Err(de::Error::custom(why));
    }
    Ok(Some(probes))
}

fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(from)?;
    let size: Size = text.parse().map_err(de::Error::custom)?;
    Ok(Some(size.0))
}

fn length<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    let size = size(from)?;
    let length = size.map(|size| usize::try_from(size).map_err(de::Error::custom));
    length.transpose()
}

/// Minimum number of bytes of console output that are kept. A client that follows a console reads from the kept
/// bytes; with fewer it would lose output between two reads.
const CONSOLE_LEAST: usize = 4 << 10;

fn console<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    let kept = length(from)?;
    if kept.is_some_and(|kept| kept < CONSOLE_LEAST) {
        return Err(de::Error::custom("a console keeps 4K at least"));
    }
    Ok(kept)
}

/// Reads the limits from the file at `path`. A limit that is missing in the file keeps its default.
pub(crate) fn read(path: &Path) -> anyhow::Result<Limits> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let limits = limits(&text).map_err(|error| {
        let why = error.to_string();
        WrongUsage(format!("{}: {}", path.display(), why.trim_end()))
    })?;
    Ok(limits)
}

fn limits(text: &str) -> Result<Limits, toml::de::Error> {
    let File { limits: said } = toml::from_str(text)?;
    let mut limits = Limits::of_host();
    said.set(&mut limits);
    Ok(limits)
}

/// Formats `limits` as a configuration file, with the meaning of each.
pub(crate) fn text(limits: &Limits) -> String {
    let mut text = "[limits]\n".to_owned();
    for (key, value, meaning) in rows(limits) {
        text.push_str(&format!("{key} = {value}  # {meaning}\n"));
    }
    text
}

fn number(number: impl ToString) -> String {
    number.to_string()
}

fn bytes(bytes: u64) -> String {
    let units = [("G", 30), ("M", 20), ("K", 10)];
    let mut units = units.iter();
    let whole = units.find(|(_, shift)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    // A size that is not a whole number of KiB is rounded down to one.
    let (unit, shift) = whole.unwrap_or(&("K", 10));
    format!("\"{}{unit}\"", bytes >> shift)
}

fn bytes_of(length: usize) -> String {
    // On the supported platforms every length fits.
    bytes(u64::try_from(length).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use hvprobe_lab::documented;

    use super::*;

    #[test]
    fn what_is_printed_says_what_it_was_printed_of() {
        let odd = Limits {
            machines: 3,
            memory: 5 << 30,
            cpus: 7,
            ended_bytes: 3 << 10,
            ..Limits::of_host()
        };
        for said in [Limits::of_host(), odd] {
            assert_eq!(limits(&text(&said)).unwrap(), said);
        }
        assert_eq!(limits("").unwrap(), Limits::of_host());
        assert_eq!(limits("[limits]\n").unwrap(), Limits::of_host());
    }

    #[test]
    fn mistakes_are_reported_with_their_lines() {
        for (text, line, why) in [
            ("[limits]\nmachine = 3\n", 2, "unknown field `machine`"),
            ("[limit]\n", 1, "unknown field `limit`"),
            ("[limits]\n\nmemory = \"8Q\"\n", 3, "write a whole number"),
            ("[limits]\nmemory = 8\n", 2, "invalid type"),
            ("[limits]\nconnections = 0\n", 2, "nonzero"),
            ("[limits]\ncpus = -1\n", 2, "invalid value"),
            (
                "[limits]\nprobes_per_machine = 65537\n",
                2,
                "65536 probes at most",
            ),
            (
                "[limits]\nconsole_bytes_per_machine = \"3K\"\n",
                2,
                "a console keeps 4K at least",
            ),
            ("[limits]\nstreams = 1\nstreams = 2\n", 3, "duplicate key"),
        ] {
            let message = limits(text).unwrap_err().to_string();
            assert!(
                message.contains(&format!("line {line}")),
                "{text}: {message}"
            );
            assert!(message.contains(why), "{text}: {message}");
        }
    }

    /// Compares the table in `docs/reference.md`, whose columns are key, default and meaning, with the limits.
    #[test]
    fn defaults_are_as_documented() {
        let page = documented::page("docs/reference.md").unwrap();
        let documented: Vec<Vec<_>> = page
            .lines()
            .skip_while(|line| !line.starts_with("| key in `[limits]` |"))
            .skip(2)
            .take_while(|line| line.starts_with('|'))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
            .collect();
        let host = Limits::of_host();
        let rows = rows(&host);
        assert_eq!(documented.len(), rows.len(), "{documented:?}");
        for (row, (key, value, _)) in documented.iter().zip(&rows) {
            assert_eq!(row[0], format!("`{key}`"));
            match *key {
                // The defaults of these two depend on the host, and the page says how.
                "memory" => assert_eq!(row[1], "the host's (`MemTotal`)"),
                "cpus" => {
                    let each: u32 = row[1].split(' ').next().unwrap().parse().unwrap();
                    let processors = std::thread::available_parallelism().unwrap().get();
                    assert_eq!(usize::try_from(host.cpus / each).unwrap(), processors);
                }
                _ => assert_eq!(row[1], format!("`{value}`"), "{key}"),
            }
        }
    }
}
