//! Hits as lines of text, with the columns of `perf script` and of ftrace's `trace` file.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::time::Duration;

use hvprobe_proto::v1::{self, EventKind};
use hvprobe_proto::wire;
use hvprobe_spec::RegisterSet;
use hvprobe_spec::errno;
use hvprobe_spec::language::text::hex;

use super::arguments::{Arguments, HitValues};
use super::captured::{Captured, Captures, Data};
use super::registers;
use crate::output::printable::harmless;
use crate::output::values::names::Names;
use crate::output::values::{Value, quoted, value_text};

/// Labels of the probes of a stream, by id.
#[derive(Debug, Default)]
pub(crate) struct Labels(HashMap<u32, Label>);

/// Data about a probe for the display of its events.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Label {
    /// Name of the event.
    pub(crate) name: String,
    /// Symbol and offset of the probepoint.
    pub(crate) symbol: Option<(String, u64)>,
    /// Items that the probe captures.
    pub(crate) captures: Captures,
    /// Values of the probe's hits.
    pub(crate) arguments: Arguments,
    /// Registers that the user chose, if any.
    pub(crate) chosen: Option<RegisterSet>,
}

impl Labels {
    /// Adds or replaces the labels of `probes`.
    pub(crate) fn learn(&mut self, probes: &[v1::Probe]) {
        for probe in probes {
            let symbol = probe.symbol.as_ref();
            let label = Label {
                name: harmless(probe.name.as_bytes()),
                symbol: symbol.map(|at| (harmless(at.name.as_bytes()), at.offset)),
                captures: Captures::of(probe),
                arguments: Arguments::of(probe),
                chosen: chosen(probe),
            };
            self.0.insert(probe.id, label);
        }
    }

    /// Returns the label of `probe`, if the probe is known.
    pub(crate) fn get(&self, probe: u32) -> Option<&Label> {
        self.0.get(&probe)
    }

    /// Returns the label of `probe`; for an unknown probe, one with its number.
    pub(crate) fn of(&self, probe: u32) -> Label {
        self.get(probe).cloned().unwrap_or_else(|| Label {
            name: format!("probe_{probe}"),
            ..Label::default()
        })
    }
}

/// Returns the registers that the user chose for `probe`, if any.
fn chosen(probe: &v1::Probe) -> Option<RegisterSet> {
    let chosen = probe.actions.as_ref()?.registers.as_ref()?;
    let chosen = chosen.registers.iter();
    Some(chosen.filter_map(|it| wire::register(*it).ok()).collect())
}

/// Returns an event as one line, with `time` as its timestamp and `names` for its addresses. If the event has a
/// stack, its addresses follow, one per line.
pub(crate) fn line(event: &v1::Event, time: &str, label: &Label, names: &Names) -> String {
    let (comm, pid) = match &event.task {
        Some(task) => (harmless(&task.comm), task.pid.to_string()),
        None => ("<...>".to_owned(), "?".to_owned()),
    };
    let mut line = format!(
        "{comm:>16}-{pid:<7} [{:03}] {time}: {}: ",
        event.vcpu, label.name,
    );
    what(&mut line, event, label, names).expect("writing to a string cannot fail");
    if let Some(stack) = label.captures.split(event).stack_trace() {
        line.push_str(&stack.text(names));
    }
    line
}

/// Writes the part of the line after the event's name: what happened, and the values.
fn what(line: &mut String, event: &v1::Event, label: &Label, names: &Names) -> fmt::Result {
    let captured = label.captures.split(event);
    let regs = match &event.call {
        Some(call) => call.entry,
        None => event.registers,
    };
    let regs = regs.unwrap_or_default();
    match label.arguments.values_of(event, &captured.items) {
        Some(HitValues::Call { arguments, result }) => {
            call(line, event, label);
            line.push('(');
            values(line, ", ", &arguments, names)?;
            line.push(')');
            if let Some((_, result)) = &result {
                write!(line, " = {}", value_text::result(result, names))?;
            }
            took(line, event)?;
            asked_for(line, &regs, label)?;
        }
        Some(HitValues::Values(arguments)) => {
            place(line, event, label)?;
            line.push(' ');
            values(line, " ", &arguments, names)?;
            asked_for(line, &regs, label)?;
        }
        None => {
            place(line, event, label)?;
            for (_, name, value) in registers::shown(&regs) {
                write!(line, " {name}={value:#x}")?;
            }
        }
    }
    others(line, &captured)
}

/// Writes the name of the called function.
fn call(line: &mut String, event: &v1::Event, label: &Label) {
    let rip = event.registers.unwrap_or_default().rip;
    match (&label.symbol, &event.call) {
        (Some((symbol, 0)), _) => line.push_str(symbol),
        (Some((symbol, offset)), _) => line.push_str(&format!("{symbol}+{offset:#x}")),
        (None, None) => line.push_str(&format!("{rip:#x}")),
        (None, Some(_)) => line.push('?'),
    }
}

/// Writes the duration of a call that has returned.
fn took(line: &mut String, event: &v1::Event) -> fmt::Result {
    match event.call.as_ref().map(|call| call.duration_ns) {
        None => Ok(()),
        Some(0) => write!(line, " took=?"),
        Some(ns) => write!(line, " took={}", duration(ns)),
    }
}

/// Writes the place and the kind of the event, in the format of ftrace.
fn place(line: &mut String, event: &v1::Event, label: &Label) -> fmt::Result {
    let rip = event.registers.unwrap_or_default().rip;
    if let Some(call) = &event.call {
        match rip {
            // The text of the kernel (kernel/trace/trace_output.c, `seq_print_ip_sym`).
            0 => line.push_str("([unknown/kretprobe'd] <- "),
            _ => write!(line, "({rip:#x} <- ")?,
        }
        match &label.symbol {
            Some((symbol, _)) => write!(line, "{symbol})")?,
            None => line.push_str("?)"),
        }
        write!(line, " ret={:#x}", call.value)?;
        if let Some(error) = errno::returned(call.value) {
            write!(line, " (-{error})")?;
        }
        took(line, event)?;
    } else {
        match &label.symbol {
            Some((symbol, offset)) => write!(line, "({symbol}+{offset:#x})")?,
            None => write!(line, "({rip:#x})")?,
        }
    }
    match event.kind() {
        EventKind::Post => write!(line, " post rip={rip:#x}"),
        EventKind::Fault => {
            let fault = event.fault.unwrap_or_default();
            write!(line, " fault {}", exception(fault.vector))?;
            match fault.error_code {
                Some(code) => write!(line, "({code:#x})"),
                None => Ok(()),
            }
        }
        EventKind::Unspecified | EventKind::Hit | EventKind::Return => Ok(()),
    }
}

/// Writes values with their names.
fn values(
    line: &mut String,
    between: &str,
    values: &[(&str, Value<'_>)],
    names: &Names,
) -> fmt::Result {
    for (at, (name, value)) in values.iter().enumerate() {
        if at > 0 {
            line.push_str(between);
        }
        write!(line, "{name}={}", value_text::text(value, names))?;
    }
    Ok(())
}

/// Writes the registers that the user chose. Used for probes whose hits have values: their events may also contain
/// registers that only the values need.
fn asked_for(line: &mut String, regs: &v1::Registers, label: &Label) -> fmt::Result {
    for (register, name, value) in registers::shown(regs) {
        if label.chosen.is_none_or(|chosen| chosen.contains(register)) {
            write!(line, " {name}={value:#x}")?;
        }
    }
    Ok(())
}

/// Writes the captured items that are not values.
fn others(line: &mut String, captured: &Captured<'_>) -> fmt::Result {
    for item in captured.others() {
        let name = match item.what {
            "" => "captured",
            what => what,
        };
        write!(line, " {name}=")?;
        match item.data {
            None => write!(line, "(fault)")?,
            Some(Data::Text { bytes, truncated }) => {
                let on = if truncated { "..." } else { "" };
                write!(line, "{}{on}", quoted::string(bytes))?;
            }
            Some(Data::StackTrace { .. }) => {}
            Some(Data::Bytes(data)) => match <[u8; 8]>::try_from(data) {
                Ok(word) if name.starts_with("$stack") => {
                    write!(line, "{:#x}", u64::from_le_bytes(word))?;
                }
                _ => write!(line, "{}", hex(data))?,
            },
        }
    }
    Ok(())
}

/// Formats a duration in a unit that fits its size.
pub(crate) fn duration(ns: u64) -> String {
    let (thousandths, unit) = match ns {
        0..1_000_000 => (ns, "us"),
        1_000_000..1_000_000_000 => (ns / 1000, "ms"),
        _ => (ns / 1_000_000, "s"),
    };
    format!("{}.{:03}{unit}", thousandths / 1000, thousandths % 1000)
}

/// Returns the name of an exception (SDM vol. 3, table 6-1).
pub(crate) fn exception(vector: u32) -> String {
    let name = match vector {
        0 => "#DE",
        1 => "#DB",
        2 => "NMI",
        3 => "#BP",
        4 => "#OF",
        5 => "#BR",
        6 => "#UD",
        7 => "#NM",
        8 => "#DF",
        10 => "#TS",
        11 => "#NP",
        12 => "#SS",
        13 => "#GP",
        14 => "#PF",
        16 => "#MF",
        17 => "#AC",
        18 => "#MC",
        19 => "#XM",
        20 => "#VE",
        21 => "#CP",
        other => return format!("exception {other}"),
    };
    name.to_owned()
}

/// Returns the line that reports `count` dropped events.
pub(crate) fn dropped(count: u64) -> String {
    format!("# {count} events dropped")
}

/// Returns the line that reports throttled hits.
pub(crate) fn throttled(notice: &v1::Throttled) -> String {
    let name = harmless(notice.name.as_bytes());
    let seconds = Duration::from_nanos(notice.window_ns).as_secs_f64();
    let hits = match notice.count {
        1 => "1 hit".to_owned(),
        count => format!("{count} hits"),
    };
    let then = if notice.disabled {
        "; the probe is disabled, `hvprobe probe enable` turns it on again"
    } else {
        ""
    };
    format!("# {name}: {hits} throttled within {seconds:.2} s{then}")
}

#[cfg(test)]
mod argument_tests;

#[cfg(test)]
pub(crate) mod tests {
    use expect_test::{Expect, expect};

    use super::*;
    use crate::output::events::captured;
    use crate::output::events::times::Times;

    /// Returns the line for an event with its default time.
    pub(crate) fn shown(event: &v1::Event, labels: &Labels) -> String {
        let time = Times::default().text(event.host_ns);
        line(event, &time, &labels.of(event.probe), &Names::default())
    }

    /// Returns a hit of `vfs_read` by `dd`.
    pub(crate) fn hit() -> v1::Event {
        v1::Event {
            seq: 41,
            probe: 1,
            vcpu: 0,
            host_ns: 1_234_567_890_123,
            guest_tsc: 0x1_2345_6789,
            registers: Some(registers()),
            task: Some(v1::Task {
                pid: 123,
                tgid: 123,
                comm: b"dd".to_vec().into(),
            }),
            cost_ns: 2100,
            kind: EventKind::Hit.into(),
            fault: None,
            call: None,
            captured: Default::default(),
            unreadable: 0,
        }
    }

    /// Returns all registers.
    fn registers() -> v1::Registers {
        v1::Registers {
            rax: Some(0),
            rbx: Some(0),
            rcx: Some(0),
            rdx: Some(1),
            rsi: Some(0x7fff_1234_5000),
            rdi: Some(0xffff_8880_0312_3400),
            rsp: Some(0),
            rbp: Some(0),
            r8: Some(0),
            r9: Some(0),
            r10: Some(0),
            r11: Some(0),
            r12: Some(0),
            r13: Some(0),
            r14: Some(0),
            r15: Some(0),
            rip: 0xffff_ffff_8123_4560,
            rflags: 0x246,
        }
    }

    /// Returns the event of a return of `vfs_read` after 12.345 µs.
    pub(crate) fn returned(value: u64) -> v1::Event {
        v1::Event {
            kind: EventKind::Return.into(),
            call: Some(Box::new(v1::Call {
                id: 7,
                entry_ns: 1_234_567_877_778,
                entry_tsc: 0x1_2345_0000,
                duration_ns: 12_345,
                value,
                entry: Some(registers()),
            })),
            ..hit()
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
            "{}\n{}\n",
            Times::default().header(),
            shown(event, &labels)
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
            comm: b"kworker/u8:3-evd".to_vec().into(),
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
    fn returns_show_value_duration_and_the_registers_at_entry() {
        check(
            &returned(1),
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                          dd-123     [000]  1234.567890: p_vfs_read_0: (0xffffffff81234560 <- vfs_read) ret=0x1 took=12.345us rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
        let mut unknown = returned(1);
        unknown.registers = unknown.registers.map(|registers| v1::Registers {
            rip: 0,
            ..registers
        });
        check(
            &unknown,
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                          dd-123     [000]  1234.567890: p_vfs_read_0: ([unknown/kretprobe'd] <- vfs_read) ret=0x1 took=12.345us rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
        check(
            &returned(9_u64.wrapping_neg()),
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                          dd-123     [000]  1234.567890: p_vfs_read_0: (0xffffffff81234560 <- vfs_read) ret=0xfffffffffffffff7 (-EBADF) took=12.345us rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
    }

    #[test]
    fn posts_and_faults_say_so() {
        let mut event = hit();
        event.kind = EventKind::Post.into();
        check(
            &event,
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                          dd-123     [000]  1234.567890: p_vfs_read_0: (vfs_read+0x0) post rip=0xffffffff81234560 rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
        event.kind = EventKind::Fault.into();
        event.fault = Some(v1::Fault {
            vector: 14,
            error_code: Some(2),
        });
        check(
            &event,
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                          dd-123     [000]  1234.567890: p_vfs_read_0: (vfs_read+0x0) fault #PF(0x2) rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
        event.fault = Some(v1::Fault {
            vector: 9,
            error_code: None,
        });
        check(
            &event,
            expect![[r#"
            #           TASK-PID     CPU#     TIMESTAMP  EVENT
            #              | |         |          |      |
                          dd-123     [000]  1234.567890: p_vfs_read_0: (vfs_read+0x0) fault exception 9 rdi=0xffff888003123400 rsi=0x7fff12345000 rdx=0x1
        "#]],
        );
    }

    #[test]
    fn chosen_registers_and_captures_are_all_shown() {
        let mut event = hit();
        event.registers = Some(v1::Registers {
            rbp: Some(5),
            r15: Some(6),
            ..Default::default()
        });
        event.captured = captured::tests::BYTES.to_vec().into();
        let mut labels = Labels::default();
        labels.learn(&[v1::Probe {
            actions: captured::tests::probe().actions,
            ..probe()
        }]);
        event.unreadable = 0b01;
        let known = shown(&event, &labels);
        event.unreadable = 0b10;
        let half_known = shown(&event, &labels);
        event.probe = 2;
        let unknown = shown(&event, &labels);
        expect![[r#"
                          dd-123     [000]  1234.567890: p_vfs_read_0: (vfs_read+0x0) rbp=0x5 r15=0x6 -4(%di)=(fault) $stack2=0x201
                          dd-123     [000]  1234.567890: p_vfs_read_0: (vfs_read+0x0) rbp=0x5 r15=0x6 -4(%di)=0011aa $stack2=(fault)
                          dd-123     [000]  1234.567890: probe_2: (0x0) rbp=0x5 r15=0x6 captured=0011aa0102000000000000"#]]
        .assert_eq(&[known, half_known, unknown].map(|line| line.trim_start().to_owned()).join("\n"));
    }

    #[test]
    fn durations_suit_their_size() {
        let printed = [0, 999, 1_000_000, 61_234_567_890].map(duration);
        assert_eq!(printed, ["0.000us", "0.999us", "1.000ms", "61.234s"]);
    }

    #[test]
    fn command_name_cannot_steer_the_terminal() {
        let mut event = hit();
        if let Some(task) = &mut event.task {
            task.comm = b"\x1b]0;x\x07\n".to_vec().into();
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

    #[test]
    fn notices_say_how_many_and_whether_the_probe_is_off() {
        let mut lost = v1::Throttled {
            probe: 1,
            name: "p_vfs_read_0".to_owned(),
            count: 1234,
            window_ns: 1_004_000_000,
            disabled: false,
        };
        assert_eq!(
            throttled(&lost),
            "# p_vfs_read_0: 1234 hits throttled within 1.00 s"
        );
        lost.disabled = true;
        lost.count = 1;
        assert!(throttled(&lost).contains("1 hit throttled within 1.00 s; the probe is disabled"));
    }
}
