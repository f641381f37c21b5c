//! Remedies for refusals, in words.

use hvprobe_proto::v1::Remedy;

use super::printable::harmless;

/// Returns the remedy for a refusal as a suffix for its reason; empty for a wrong request, whose reason already
/// contains the remedy.
pub(crate) fn can(remedy: Remedy, when: &str) -> String {
    match remedy {
        Remedy::Never => " (never)".to_owned(),
        Remedy::NotNow => {
            let when = harmless(when.as_bytes());
            format!(" (not now: try again when {when})")
        }
        Remedy::WrongRequest | Remedy::Unspecified => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_whether_to_wait_and_for_what() {
        assert_eq!(can(Remedy::Never, ""), " (never)");
        let wait = can(Remedy::NotNow, "the module is\x1b loaded");
        assert_eq!(wait, " (not now: try again when the module is? loaded)");
        assert_eq!(can(Remedy::WrongRequest, ""), "");
    }
}
