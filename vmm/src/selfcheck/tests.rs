//! The self-check on the host the tests run on, if it has KVM.

use super::*;

#[test]
fn the_report_of_this_host_agrees_with_itself() {
    let report = match run() {
        Ok(report) => report,
        Err(error @ (SelfCheckError::Missing | SelfCheckError::Forbidden)) => {
            println!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    println!("{report:#?}");
    let bad = report
        .items
        .iter()
        .filter(|item| item.verdict == Verdict::Bad)
        .count();
    assert_eq!(
        bad == 0,
        report.can_run_linux && report.catch_mode.is_some()
    );
    assert_eq!(catch_mode().unwrap(), report.catch_mode);
    assert!(report.items.iter().all(|item| !item.result.is_empty()));
}

#[test]
fn catch_modes_have_the_names_users_see() {
    let names = [
        CatchMode::DebugExit,
        CatchMode::EmulationExit,
        CatchMode::IdtGate,
    ]
    .map(|mode| mode.to_string());
    assert_eq!(names, ["debug-exit", "emulation-exit", "idt-gate"]);
    assert_eq!(format!("{:>9}", CatchMode::IdtGate), " idt-gate");
}
