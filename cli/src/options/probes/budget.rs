//! Options that limit what the hits of a probe may cost.

use clap::Args;
use hvprobe_proto::v1;
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::{Budget, Excess, language};

use crate::failure::WrongUsage;
use crate::failure::typed::one;
use crate::options::one_of::one_of;

/// Limits on hits; for all probes defined in the same command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Throttling")]
pub(crate) struct BudgetArgs {
    /// Report at most this many hits per second of each probe, such as 1000/s
    #[arg(long, value_name = "N/s")]
    max_rate: Option<String>,

    /// Spend at most this share of all virtual CPUs' time on the hits of each probe, such as 5%
    #[arg(long, value_name = "PERCENT")]
    max_cpu: Option<String>,

    /// What happens to hits beyond these limits [default: sample]
    #[arg(long, value_name = "HOW", value_parser = one_of(&EXCESSES, Excess::name))]
    throttle: Option<Excess>,
}

/// Policies for hits beyond a limit, each with its help text.
const EXCESSES: [(Excess, &str); 2] = [
    (
        Excess::Sample,
        "They make no events until the second is over, and are counted as THROTTLED",
    ),
    (
        Excess::Disable,
        "The probe is disabled, until `hvprobe probe enable`",
    ),
];

impl BudgetArgs {
    /// Returns the budget that the options ask for, or `None` if none of the options is given.
    pub(crate) fn budget(&self) -> Result<Option<v1::Budget>, WrongUsage> {
        if self.max_rate.is_none() && self.max_cpu.is_none() && self.throttle.is_none() {
            return Ok(None);
        }
        let budget = Budget {
            max_rate: one("max-rate", self.max_rate.as_deref(), language::rate)?,
            max_share: one("max-cpu", self.max_cpu.as_deref(), language::share)?,
            excess: self.throttle.unwrap_or_default(),
        };
        Ok(Some(budget.to_wire()))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::output;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        budget: BudgetArgs,
    }

    fn rendered(words: &[&str]) -> Result<Option<String>, String> {
        let line = Line::try_parse_from(std::iter::once(&"x").chain(words))
            .map_err(|error| error.to_string())?;
        let budget = line.budget.budget().map_err(|error| error.0)?;
        Ok(budget.map(|budget| output::events::asked::budget(Some(&budget)).join(" ")))
    }

    #[test]
    fn options_become_a_budget_and_are_shown_as_such() {
        assert_eq!(rendered(&[]), Ok(None));
        for (words, said) in [
            (
                &["--max-rate", "100/s"][..],
                "max-rate=100/s throttle=sample",
            ),
            (&["--max-rate", "7"], "max-rate=7/s throttle=sample"),
            (
                &["--max-cpu", "5%", "--throttle", "disable"],
                "max-cpu=5% throttle=disable",
            ),
        ] {
            assert_eq!(rendered(words), Ok(Some(said.to_owned())));
        }
    }

    #[test]
    fn limits_that_mean_nothing_are_refused() {
        for (words, said) in [
            (["--max-rate", "0"], "from 1 to"),
            (["--max-rate", "5/min"], "from 1 to"),
            (["--max-cpu", "101%"], "from 1 to 100"),
            (["--max-cpu", "0.5%"], "from 1 to 100"),
            (["--throttle", "drop"], "possible values: sample, disable"),
        ] {
            let error = rendered(&words).unwrap_err();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }

    #[test]
    fn caret_stands_under_what_is_wrong_with_a_limit() {
        let error = rendered(&["--max-rate", "5/min"]).unwrap_err();
        let lines: Vec<_> = error.lines().collect();
        assert!(lines[0].starts_with("bad --max-rate: "), "{error}");
        assert_eq!(lines[1..], ["  5/min", "   ^"]);
    }
}
