//! Checks features of the host that probes need, and that every KVM seen so far has on any processor.

use hvprobe_vm::host;

#[test]
fn faults_of_displaced_instructions_can_be_handed_on_wherever_int3_is_caught() {
    let report = match host::check() {
        Ok(report) if report.catch_mode.is_some() => report,
        Ok(_) => {
            eprintln!("skipped: needs a KVM that lets int3 be caught");
            return;
        }
        Err(error) => {
            eprintln!("skipped: needs KVM: {error}");
            return;
        }
    };
    assert!(report.exception_window, "{:#?}", report.items);
}
