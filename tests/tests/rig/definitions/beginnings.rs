//! Tests probepoints that are offsets from the beginning of the kernel's text (`_stext+OFFSET`), as `perf probe`
//! writes them.

use std::fmt::Write as _;

use hvprobe_machine::{ProbeSpec, Refusals};
use hvprobe_tests::names;
use hvprobe_tests::rig::{Running, assert_clean, guest, infos, probe, rig};

const FUNCTION: &str = "do_getpgid";
const CALLS: u64 = 50;

#[test]
fn places_behind_the_texts_beginning_are_those_of_the_guests_kernel() {
    if rig("places behind the text's beginning").is_none() {
        return;
    }
    let entry = names::behind_stext(FUNCTION);
    let inner = entry + names::behind_entry(FUNCTION);
    let beyond = entry + 1;
    let definitions = [
        format!("p _stext+{entry}"),
        format!("p _stext+{entry} $arg1"),
        format!("p _stext+{inner}"),
        format!("p _stext+{inner} $arg1"),
        format!("p _stext+{beyond}"),
        format!("r _stext+{entry}"),
        format!("r _stext+{entry} $retval"),
        format!("r _stext+{inner}"),
        "p _stext+0x7fffffffffff".to_owned(),
    ];
    let script = format!(
        "sed 's/^/kprobe_events /' > /tmp/definitions <<'END'\n{}\nEND\n\
         workload tracefs /tmp/definitions; read line; workload calls getpgid {CALLS}",
        definitions.join("\n")
    );
    let mut running = Running::boot(guest(1, &["sh", "-c", &script]));
    let printed = running.wait_for("lines: ");
    let machine = running.machine.clone();
    let (mut taken, mut differ) = (Vec::new(), String::new());
    for (number, text) in definitions.iter().enumerate() {
        let answer = format!("{number} ok");
        let kernel = printed.lines().any(|line| line.trim_end() == answer);
        let spec = ProbeSpec {
            default_arguments: false,
            ..probe(text)
        };
        let ours = machine.register_batch(&[spec], Refusals::Fail);
        if ours.is_ok() != kernel {
            writeln!(
                differ,
                "{text}: the kernel takes it: {kernel}; ours: {ours:?}"
            )
            .unwrap();
        }
        taken.extend(ours.into_iter().flat_map(|registered| registered.ids()));
    }
    assert!(differ.is_empty(), "{differ}{printed}");
    assert_eq!(taken.len(), 5, "{printed}");
    machine.console_input(b"\n");
    let (ending, _, printed) = running.finish();
    assert_clean(&ending, &printed, 0);
    for probe in infos(&machine, &taken) {
        assert_eq!(probe.counts.hits, CALLS, "{}", probe.name);
        let (symbol, offset) = probe.symbol.expect("a place");
        assert_eq!(symbol, FUNCTION, "{}+{offset}", probe.name);
    }
}
