//! Hits as lines of text, in the columns of `perf script` and of ftrace's `trace` file.

use std::collections::HashMap;
use std::fmt::Write as _;

use hvprobe_proto::v1;

use super::harmless;

/// Names the columns of [`line`].
pub(crate) const HEADER: &str = "\
#           TASK-PID     CPU#     TIMESTAMP  EVENT
#              | |         |          |      |";

/// The probes of a stream: what their events are called and where they come from.
#[derive(Debug, Default)]
pub(crate) struct Labels(HashMap<u32, Label>);

/// How a probe's events are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Label {
    /// Name of the event.
    pub(crate) name: String,
    /// Symbol and offset of the probepoint.
    pub(crate) symbol: Option<(String, u64)>,
}

impl Labels {
    /// Learns `probes`.
    pub(crate) fn learn(&mut self, probes: &[v1::Probe]) {
        for probe in probes {
            let symbol = probe.symbol.as_ref();
            let label = Label {
                name: harmless(probe.name.as_bytes()),
                symbol: symbol.map(|at| (harmless(at.name.as_bytes()), at.offset)),
            };
            self.0.insert(probe.id, label);
        }
    }

    /// How `probe`'s events are shown; by its number, if nothing else is known.
    pub(crate) fn of(&self, probe: u32) -> Label {
        self.0.get(&probe).cloned().unwrap_or_else(|| Label {
            name: format!("probe_{probe}"),
            symbol: None,
        })
    }
}

/// One hit as one line.
pub(crate) fn line(event: &v1::Event, label: &Label) -> String {
    let regs = event.registers.unwrap_or_default();
    let (comm, pid) = match &event.task {
        Some(task) => (harmless(&task.comm), task.pid.to_string()),
        None => ("<...>".to_owned(), "?".to_owned()),
    };
    let mut line = format!(
        "{comm:>16}-{pid:<7} [{:03}] {:>5}.{:06}: {}: (",
        event.vcpu,
        event.host_ns / 1_000_000_000,
        event.host_ns % 1_000_000_000 / 1000,
        label.name,
    );
    // Writing to a string cannot fail.
    let _ok = match &label.symbol {
        Some((symbol, offset)) => write!(line, "{symbol}+{offset:#x}"),
        None => write!(line, "{:#x}", regs.rip),
    };
    let _ok = write!(
        line,
        ") rdi={:#x} rsi={:#x} rdx={:#x}",
        regs.rdi, regs.rsi, regs.rdx
    );
    line
}

/// The line that says that `count` events are missing from here on.
pub(crate) fn dropped(count: u64) -> String {
    format!("# {count} events dropped")
}

#[cfg(test)]
pub(crate) mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    /// A hit of `vfs_read` by `dd`.
    pub(crate) fn hit() -> v1::Event {
        v1::Event {
            seq: 41,
            probe: 1,
            vcpu: 0,
            host_ns: 1_234_567_890_123,
            guest_tsc: 0x1_2345_6789,
            registers: Some(v1::Registers {
                rdi: 0xffff_8880_0312_3400,
                rsi: 0x7fff_1234_5000,
                rdx: 1,
                rip: 0xffff_ffff_8123_4560,
                rflags: 0x246,
                ..Default::default()
            }),
            task: Some(v1::Task {
                pid: 123,
                tgid: 123,
                comm: b"dd".to_vec(),
            }),
            cost_ns: 2100,
        }
    }

    fn probe() -> v1::Probe {
        v1::Probe {
            id: 1,
            name: "p_vfs_read_0".into(),
            symbol: Some(v1::SymbolOffset {
                name: "vfs_read".into(),
                offset: 0,
            }),
            ..Default::default()
        }
    }

    fn check(event: &v1::Event, expected: Expect) {
        let mut labels = Labels::default();
        labels.learn(&[probe()]);
        expected.assert_eq(&format!(
            "{HEADER}\n{}\n",
            line(event, &labels.of(event.probe))
        ));
    }

    #[test]
    fn hit_stands_under_the_header() {
        check(
            &hit(),
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                          dd-123     [000]  1234.567890: p_vfs_read_0: (vfs_read+0x0) rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
    }

    #[test]
    fn long_names_and_large_numbers_only_push_to_the_right() {
        let mut event = hit();
        event.vcpu = 12;
        event.host_ns = 123_456_789_000_000_001;
        event.task = Some(v1::Task {
            pid: 1_234_567,
            tgid: 7,
            comm: b"kworker/u8:3-evd".to_vec(),
        });
        check(
            &event,
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
            kworker/u8:3-evd-1234567 [012] 123456789.000000: p_vfs_read_0: (vfs_read+0x0) rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
    }

    #[test]
    fn hit_without_task_of_an_unknown_probe_shows_what_is_known() {
        let mut event = hit();
        event.task = None;
        event.probe = 7;
        check(
            &event,
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                       <...>-?       [000]  1234.567890: probe_7: (0xffffffff81234560) rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
    }

    #[test]
    fn command_name_cannot_steer_the_terminal() {
        let mut event = hit();
        if let Some(task) = &mut event.task {
            task.comm = b"\x1b]0;x\x07\n".to_vec();
        }
        check(
            &event,
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                     ?]0;x??-123     [000]  1234.567890: p_vfs_read_0: (vfs_read+0x0) rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
    }
}
