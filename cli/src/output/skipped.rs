//! Probes of a batch that were skipped because their places cannot be probed.

use hvprobe_proto::v1::SkippedProbe;

use super::printable::harmless;
use super::remedy::can;

/// Returns the number of skipped probes, and a line with the reason for each; `None` if all were planted.
pub(crate) fn text(skipped: &[SkippedProbe]) -> Option<String> {
    let head = match skipped.len() {
        0 => return None,
        1 => "1 place cannot be probed and was skipped:".to_owned(),
        count => format!("{count} places cannot be probed and were skipped:"),
    };
    let lines = skipped.iter().map(|one| {
        let symbol = harmless(one.symbol.as_bytes());
        let (reason, can) = (
            harmless(one.reason.as_bytes()),
            can(one.remedy(), &one.when),
        );
        format!("\n  {symbol}: {reason}{can}")
    });
    Some(std::iter::once(head).chain(lines).collect())
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use hvprobe_proto::v1::Remedy;

    use super::*;

    #[test]
    fn every_skipped_place_is_printed_with_its_reason() {
        let one = |symbol: &str| SkippedProbe {
            entry: 0,
            symbol: symbol.to_owned(),
            reason: "it is noinstr code".to_owned(),
            remedy: match symbol {
                "exc_int3" => Remedy::Never.into(),
                _ => Remedy::NotNow.into(),
            },
            when: "the module is loaded".to_owned(),
        };
        assert_eq!(text(&[]), None);
        expect![[r#"
            2 places cannot be probed and were skipped:
              exc_int3: it is noinstr code (never)
              ext4:x: it is noinstr code (not now: try again when the module is loaded)"#]]
        .assert_eq(&text(&[one("exc_int3"), one("ext4:x")]).unwrap());
    }
}
