//! Results as tables: a line of headings, then one line per row, with aligned columns and nothing else, so that
//! people and `awk` can read them.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use hvprobe_proto::v1;

use super::events::asked;
use super::printable::harmless;
use super::size;
use super::waiting::{Awaited, awaited};
use super::words::Word as _;

/// Column: its heading, and whether it contains numbers.
pub(crate) type Column = (&'static str, bool);

/// Minimum width of a terminal, in columns, on which sentences are wrapped.
const WIDE_ENOUGH: u16 = 80;

/// Formats `rows` under `columns`, each on one line.
pub(crate) fn table(columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    arranged(ContentArrangement::Disabled, columns, rows)
}

fn arranged(
    arrangement: ContentArrangement,
    columns: &[Column],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let mut table = Table::new();
    // A terminal of unknown size reports no width.
    if table.width().is_some_and(|width| width >= WIDE_ENOUGH) {
        table.set_content_arrangement(arrangement);
    } else {
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    table
        .load_preset(presets::NOTHING)
        .set_header(columns.iter().map(|(heading, _)| *heading))
        .add_rows(rows);
    for (column, (_, numbers)) in table.column_iter_mut().zip(columns) {
        column.set_padding((0, 2));
        if *numbers {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Column of a list: its heading, whether it contains numbers, and the cell of an item.
type Of<T> = (&'static str, bool, fn(&T) -> String);

/// Formats `items`, each on one line.
fn list<T>(arrangement: ContentArrangement, columns: &[Of<T>], items: &[T]) -> String {
    let headings = columns
        .iter()
        .map(|(heading, numbers, _)| (*heading, *numbers));
    let headings: Vec<_> = headings.collect();
    let row = |item| columns.iter().map(|(.., cell)| cell(item)).collect();
    arranged(arrangement, &headings, items.iter().map(row))
}

/// Columns of a list of machines.
const MACHINES: [Of<v1::Machine>; 6] = [
    ("NAME", false, |machine| machine.name.clone()),
    ("STATE", false, standing),
    ("CPUS", true, |machine| machine.cpus.to_string()),
    ("MEMORY", true, |machine| size::text(machine.memory)),
    ("CATCH", false, |machine| {
        machine.catch_mode().word().unwrap_or("-").to_owned()
    }),
    ("KERNEL", false, |machine| {
        harmless(machine.kernel.as_bytes())
    }),
];

/// Formats a list of machines.
pub(crate) fn machines(machines: &[v1::Machine]) -> String {
    list(ContentArrangement::Disabled, &MACHINES, machines)
}

/// Formats one machine as a line.
pub(crate) fn machine(machine: &v1::Machine) -> String {
    format!("{}  {}", machine.name, standing(machine))
}

/// Formats a machine that has left the list.
pub(crate) fn gone(machine: &v1::MachineGone) -> String {
    format!("{}  gone", harmless(machine.name.as_bytes()))
}

/// Returns the state of a machine, with the reason for it.
fn standing(machine: &v1::Machine) -> String {
    let state = machine.state().or_unknown();
    match (&machine.ending, &machine.stopped_at) {
        (Some(ending), _) => format!("{state}: {}", ending_text(ending)),
        (None, Some(at)) => format!("{state} at a hit of probe {} on CPU {}", at.probe, at.vcpu),
        (None, None) if machine.kernel_replaced => format!("{state} another kernel"),
        (None, None) if machine.disarmed => format!("{state}, disarmed"),
        (None, None) => state.to_owned(),
    }
}

/// Columns of a list of probes.
const PROBES: [Of<v1::Probe>; 10] = [
    ("ID", true, |probe| probe.id.to_string()),
    ("NAME", false, |probe| probe.name.clone()),
    ("ADDRESS", false, |probe| {
        probe
            .address
            .map_or("-".to_owned(), |at| format!("{at:#x}"))
    }),
    ("KIND", false, |probe| {
        let kind = match probe.kind() {
            v1::ProbeKind::Probe => "p",
            v1::ProbeKind::Return => "r",
            v1::ProbeKind::Unspecified => "-",
        };
        kind.to_owned()
    }),
    ("SYMBOL", false, |probe| {
        place(probe).unwrap_or_else(|| probe.definition.clone())
    }),
    ("FLAGS", false, flags),
    ("HITS", true, |probe| probe.hits.to_string()),
    ("MISSED", true, |probe| probe.missed.to_string()),
    ("FAULTS", true, |probe| probe.faults.to_string()),
    ("ORPHANS", true, |probe| match probe.kind() {
        v1::ProbeKind::Return => probe.orphans.to_string(),
        _ => "-".to_owned(),
    }),
];

/// Columns that are left out if all their cells are empty.
const OPTIONAL: [Of<v1::Probe>; 4] = [
    ("OWNER", false, |probe| {
        or_none(harmless(probe.owner.as_bytes()))
    }),
    ("THROTTLED", true, |probe| {
        probe
            .budget
            .map_or("-".to_owned(), |_| probe.throttled.to_string())
    }),
    ("ARGUMENTS", false, |probe| {
        let names = probe.arguments.iter().map(|each| each.name.as_bytes());
        or_none(names.map(harmless).collect::<Vec<_>>().join(","))
    }),
    ("ACTIONS", false, |probe| {
        [asked::of(probe), asked::budget(probe.budget.as_ref())]
            .concat()
            .join(" ")
    }),
];

/// Returns `cell`, or a dash if it is empty.
fn or_none(cell: String) -> String {
    match cell.as_str() {
        "" => "-".to_owned(),
        _ => cell,
    }
}

/// Formats a list of probes, with the flags of /sys/kernel/debug/kprobes/list.
pub(crate) fn probes(probes: &[v1::Probe]) -> String {
    let mut columns = PROBES.to_vec();
    columns.extend(OPTIONAL.iter().filter(|(.., cell)| {
        let mut cells = probes.iter().map(cell);
        cells.any(|cell| !matches!(cell.as_str(), "" | "-"))
    }));
    list(ContentArrangement::Disabled, &columns, probes)
}

/// Returns the flags of a probe, such as `[DISABLED] [BOOSTED]`: deviations from its normal state, and its
/// mechanism.
fn flags(probe: &v1::Probe) -> String {
    let mut flags = Vec::new();
    match probe.state() {
        v1::ProbeState::Pending => flags.push(match awaited(probe) {
            Some(Awaited::Module(name)) => format!("[PENDING: module {name}]"),
            Some(Awaited::Kernel) | None => "[PENDING]".to_owned(),
        }),
        v1::ProbeState::Gone => flags.push("[GONE]".to_owned()),
        v1::ProbeState::Refused => {
            flags.push(format!("[REFUSED: {}]", harmless(probe.refusal.as_bytes())));
        }
        v1::ProbeState::Placed | v1::ProbeState::Unspecified => {}
    }
    let placed = probe.state() == v1::ProbeState::Placed;
    if probe.disabled {
        flags.push("[DISABLED]".to_owned());
    } else if placed && !probe.armed {
        flags.push("[DISARMED]".to_owned());
    }
    if probe.turned_off {
        flags.push("[THROTTLED]".to_owned());
    }
    if let Some(mechanism) = probe.mechanism().word().filter(|_| placed) {
        flags.push(format!("[{}]", mechanism.to_uppercase()));
    }
    flags.join(" ")
}

/// Formats a symbol like a line of /proc/kallsyms, with its size.
pub(crate) fn symbol(symbol: &v1::Symbol) -> String {
    let letter = match symbol.kind() {
        v1::SymbolKind::Text => 't',
        v1::SymbolKind::Data => 'd',
        v1::SymbolKind::Absolute => 'a',
        v1::SymbolKind::Unspecified => '?',
    };
    let mut line = format!(
        "{:016x} {letter} {:#8x} {}",
        symbol.address,
        symbol.size,
        harmless(symbol.name.as_bytes())
    );
    if !symbol.forbidden.is_empty() {
        line.push_str("  # ");
        line.push_str(&harmless(symbol.forbidden.as_bytes()));
    }
    line
}

/// Columns of the host report.
const FINDINGS: [Of<v1::Finding>; 4] = [
    ("CHECK", false, |finding| finding.what.clone()),
    ("RESULT", false, |finding| {
        finding.verdict().word().unwrap_or("?").to_owned()
    }),
    ("SEEN", false, |finding| finding.seen.clone()),
    ("WHAT IT MEANS", false, |finding| finding.meaning.clone()),
];

/// Formats the host report. Its sentences are wrapped to the width of the terminal.
pub(crate) fn findings(findings: &[v1::Finding]) -> String {
    list(ContentArrangement::Dynamic, &FINDINGS, findings)
}

/// Formats the host report without wrapping.
pub(crate) fn findings_in_full(findings: &[v1::Finding]) -> String {
    list(ContentArrangement::Disabled, &FINDINGS, findings)
}

/// Returns the symbol and the offset of a probepoint.
pub(crate) fn place(probe: &v1::Probe) -> Option<String> {
    let symbol = probe.symbol.as_ref()?;
    Some(at(&harmless(symbol.name.as_bytes()), symbol.offset))
}

/// Returns `symbol+offset`, or only the symbol for the offset 0.
pub(crate) fn at(symbol: &str, offset: u64) -> String {
    match offset {
        0 => symbol.to_owned(),
        _ => format!("{symbol}+{offset:#x}"),
    }
}

/// Returns the state of a probe in words.
pub(crate) fn state(probe: &v1::Probe) -> String {
    let mut text = probe.state().or_unknown().to_owned();
    if probe.disabled {
        text.push_str(", disabled");
    }
    if !probe.refusal.is_empty() {
        text.push_str(": ");
        text.push_str(&harmless(probe.refusal.as_bytes()));
    }
    text
}

/// Returns in words how a guest ended.
pub(crate) fn ending_text(ending: &v1::Ending) -> String {
    let reason = ending.reason().or_unknown();
    match ending.guest_status {
        Some(status) => format!("{reason}, status {status}"),
        None => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn check(text: &str, expected: Expect) {
        expected.assert_eq(text);
    }

    #[test]
    fn probes_are_listed_with_where_they_stand() {
        let placed = v1::Probe {
            id: 1,
            name: "p_vfs_read_0".into(),
            definition: "p vfs_read".into(),
            address: Some(0xffff_ffff_8123_4560),
            symbol: Some(v1::SymbolOffset {
                name: "vfs_read".into(),
                offset: 0x1b,
            }),
            state: v1::ProbeState::Placed.into(),
            disabled: true,
            mechanism: v1::Mechanism::Emulated.into(),
            hits: 12_345,
            kind: v1::ProbeKind::Probe.into(),
            ..Default::default()
        };
        let pending = v1::Probe {
            id: 10,
            name: "w".into(),
            definition: "p:w vfs_write".into(),
            state: v1::ProbeState::Pending.into(),
            kind: v1::ProbeKind::Probe.into(),
            ..Default::default()
        };
        let returns = v1::Probe {
            name: "r_vfs_read_0".into(),
            disabled: false,
            armed: true,
            mechanism: v1::Mechanism::Boosted.into(),
            kind: v1::ProbeKind::Return.into(),
            orphans: 2,
            actions: Some(v1::Actions {
                post: true,
                ..Default::default()
            }),
            ..placed.clone()
        };
        let disarmed = v1::Probe {
            armed: false,
            ..returns.clone()
        };
        let throttled = v1::Probe {
            armed: false,
            disabled: true,
            turned_off: true,
            throttled: 77,
            budget: Some(v1::Budget {
                max_rate: 100,
                max_cpu_percent: 0,
                excess: v1::Excess::Disable.into(),
            }),
            ..disarmed.clone()
        };
        check(
            &probes(&[placed.clone(), throttled]),
            expect![[r#"
            ID  NAME          ADDRESS             KIND  SYMBOL         FLAGS                              HITS  MISSED  FAULTS  ORPHANS  THROTTLED  ACTIONS
             1  p_vfs_read_0  0xffffffff81234560  p     vfs_read+0x1b  [DISABLED] [EMULATED]             12345       0       0        -          -
             1  r_vfs_read_0  0xffffffff81234560  r     vfs_read+0x1b  [DISABLED] [THROTTLED] [BOOSTED]  12345       0       0        2         77  post max-rate=100/s throttle=disable"#]],
        );
        let owned = v1::Probe {
            owner: "trace-7".into(),
            ..placed.clone()
        };
        check(
            &probes(&[owned, pending.clone()]),
            expect![[r#"
            ID  NAME          ADDRESS             KIND  SYMBOL         FLAGS                   HITS  MISSED  FAULTS  ORPHANS  OWNER
             1  p_vfs_read_0  0xffffffff81234560  p     vfs_read+0x1b  [DISABLED] [EMULATED]  12345       0       0        -  trace-7
            10  w             -                   p     p:w vfs_write  [PENDING]                  0       0       0        -  -"#]],
        );
        let gone = v1::Probe {
            state: v1::ProbeState::Gone.into(),
            ..placed.clone()
        };
        let refused = v1::Probe {
            state: v1::ProbeState::Refused.into(),
            refusal: "mid-instruction".into(),
            ..pending.clone()
        };
        let of_module = v1::Probe {
            definition: "p:w dummy:dummy_setup".into(),
            ..pending.clone()
        };
        assert_eq!(flags(&of_module), "[PENDING: module dummy]");
        check(
            &probes(&[placed.clone(), pending.clone()]),
            expect![[r#"
            ID  NAME          ADDRESS             KIND  SYMBOL         FLAGS                   HITS  MISSED  FAULTS  ORPHANS
             1  p_vfs_read_0  0xffffffff81234560  p     vfs_read+0x1b  [DISABLED] [EMULATED]  12345       0       0        -
            10  w             -                   p     p:w vfs_write  [PENDING]                  0       0       0        -"#]],
        );
        check(
            &probes(&[placed, pending, returns, disarmed, gone, refused]),
            expect![[r#"
                ID  NAME          ADDRESS             KIND  SYMBOL         FLAGS                        HITS  MISSED  FAULTS  ORPHANS  ACTIONS
                 1  p_vfs_read_0  0xffffffff81234560  p     vfs_read+0x1b  [DISABLED] [EMULATED]       12345       0       0        -
                10  w             -                   p     p:w vfs_write  [PENDING]                       0       0       0        -
                 1  r_vfs_read_0  0xffffffff81234560  r     vfs_read+0x1b  [BOOSTED]                   12345       0       0        2  post
                 1  r_vfs_read_0  0xffffffff81234560  r     vfs_read+0x1b  [DISARMED] [BOOSTED]        12345       0       0        2  post
                 1  p_vfs_read_0  0xffffffff81234560  p     vfs_read+0x1b  [GONE] [DISABLED]           12345       0       0        -
                10  w             -                   p     p:w vfs_write  [REFUSED: mid-instruction]      0       0       0        -"#]],
        );
    }

    #[test]
    fn arguments_are_listed_by_name() {
        let argument = |name: &str| v1::Argument {
            name: name.into(),
            ..Default::default()
        };
        let with = v1::Probe {
            arguments: vec![argument("dfd"), argument("\x1b")],
            ..Default::default()
        };
        let list = probes(&[with, v1::Probe::default()]);
        let last = |line: &'_ str| line.split_whitespace().last().map(str::to_owned);
        let column: Vec<_> = list.lines().filter_map(last).collect();
        assert_eq!(column, ["ARGUMENTS", "dfd,?", "-"]);
    }

    #[test]
    fn machines_are_listed_with_how_they_ended() {
        let running = v1::Machine {
            name: "vm0".into(),
            state: v1::MachineState::Running.into(),
            catch_mode: v1::CatchMode::DebugExit.into(),
            kernel: "/boot/vmlinuz".into(),
            cpus: 2,
            memory: 256 << 20,
            ending: None,
            first_entry_ns: None,
            stopped_at: None,
            disarmed: false,
            kernel_replaced: false,
            runs: 0,
            anchor: None,
            skipped: Vec::new(),
            ..Default::default()
        };
        let stopped = v1::Machine {
            state: v1::MachineState::Paused.into(),
            stopped_at: Some(v1::StoppedAt { probe: 3, vcpu: 1 }),
            ..running.clone()
        };
        let disarmed = v1::Machine {
            disarmed: true,
            ..running.clone()
        };
        let replaced = v1::Machine {
            kernel_replaced: true,
            ..running.clone()
        };
        let ended = v1::Machine {
            name: "web".into(),
            state: v1::MachineState::Stopped.into(),
            ending: Some(v1::Ending {
                reason: v1::EndReason::Shutdown.into(),
                guest_status: Some(3),
                report: String::new(),
            }),
            ..running.clone()
        };
        check(
            &machines(&[running, ended, stopped, disarmed, replaced]),
            expect![[r#"
                NAME  STATE                                CPUS   MEMORY  CATCH       KERNEL
                vm0   running                                 2  256 MiB  debug-exit  /boot/vmlinuz
                web   ended: shutdown, status 3               2  256 MiB  debug-exit  /boot/vmlinuz
                vm0   paused at a hit of probe 3 on CPU 1     2  256 MiB  debug-exit  /boot/vmlinuz
                vm0   running, disarmed                       2  256 MiB  debug-exit  /boot/vmlinuz
                vm0   running another kernel                  2  256 MiB  debug-exit  /boot/vmlinuz"#]],
        );
    }

    #[test]
    fn symbols_look_like_kallsyms() {
        let mut text = v1::Symbol {
            name: "vfs_read".into(),
            address: 0xffff_ffff_8123_4560,
            size: 0x2a0,
            kind: v1::SymbolKind::Text.into(),
            forbidden: String::new(),
            ..Default::default()
        };
        let allowed = symbol(&text);
        text.forbidden = "in .noinstr.text".into();
        check(
            &format!("{allowed}\n{}\n", symbol(&text)),
            expect![[r#"
            ffffffff81234560 t    0x2a0 vfs_read
            ffffffff81234560 t    0x2a0 vfs_read  # in .noinstr.text
        "#]],
        );
    }
}
