//! The self-check on the host that runs the tests, if it has KVM.

use super::*;

#[test]
fn the_report_of_this_host_agrees_with_itself() {
    let report = match check() {
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
