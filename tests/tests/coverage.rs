//! Share of the stock kernel's text that can be probed.

use hvprobe_tests::differential::coverage::Coverage;
use hvprobe_tests::differential::text::{Text, stock_kernel};

#[test]
fn nearly_all_of_the_kernel_takes_probes() {
    let Some(path) = stock_kernel() else {
        eprintln!("skipped: there is no stock kernel here (cargo lab setup)");
        return;
    };
    let text = match Text::open(&path) {
        Ok(text) => text,
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let coverage = Coverage::of(&text);
    println!("{coverage}");
    assert!(
        coverage.refuses_at_most(5),
        "more than 0.5 % are refused:\n{coverage}"
    );
    assert!(
        coverage.out_of_reach.is_empty(),
        "no slot takes some copies:\n{coverage}"
    );
    assert!(
        coverage.total() > 1_000_000,
        "the text was not found:\n{coverage}"
    );
}
