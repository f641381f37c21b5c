//! The list of registered probes.

use hvprobe_hit::Counters;
use hvprobe_spec::definition::Kind;

use super::*;

#[test]
fn list_is_in_the_order_of_registration_and_shows_where_each_probe_is() {
    let mut rig = Rig::live();
    let last = rig.register(&[spec("p filler_003"), disabled("p 0xffffffff81000109")])[1];
    let list = rig.list();
    assert!(list.is_sorted_by_key(|info| info.id));
    let info = ProbeInfo {
        id: last,
        name: "p_0xffffffff81000109".to_owned(),
        definition: "p 0xffffffff81000109".to_owned(),
        kind: Kind::Probe,
        actions: std::sync::Arc::default(),
        shown: std::sync::Arc::default(),
        maxactive: None,
        addr: Some(rig.at("vfs_read", 9)),
        symbol: Some(("vfs_read".to_owned(), 9)),
        state: ProbeState::Placed,
        turned_off: false,
        budget: None,
        disabled: true,
        mechanism: Some(Mechanism::Emulated),
        unoptimized: None,
        counts: Counts::default(),
        awaited: None,
    };
    assert_eq!(list[1], info);
}

#[test]
fn counts_of_all_virtual_cpus_are_summed_and_none_is_lost() {
    let counters = Counters::new(4);
    std::thread::scope(|scope| {
        // Two threads for each virtual CPU, and two for one that does not exist.
        for vcpu in (0..5).chain(0..5) {
            let counters = &counters;
            scope.spawn(move || {
                for _ in 0..1000 {
                    counters.hit(vcpu);
                    counters.hit(vcpu);
                    counters.miss(vcpu);
                }
                counters.fault(vcpu);
            });
        }
    });
    let sum = Counts {
        hits: 16_000,
        missed: 8000,
        faults: 8,
        ..Counts::default()
    };
    assert_eq!(counters.sum(), sum);
}
