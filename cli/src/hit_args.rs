//! The options that say what probes do at their hits, and what they amount to.

use clap::Args;
use hvprobe_proto::v1::{self, Mechanism, actions};
use hvprobe_spec::ParseError;
use hvprobe_spec::definition::{self, Definition, Kind};

use crate::budget::BudgetArgs;
use crate::failure::WrongUsage;
use crate::syntax::{self, Capture};

/// What happens at a hit; for all probes defined in the same command.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "At each hit")]
pub(crate) struct HitArgs {
    /// Show a register (%di), memory (+16(%di):32 for 32 bytes) or a stack word ($stack0) there, for
    /// return probes at entry; repeatable
    #[arg(long, value_name = "WHAT", allow_hyphen_values = true)]
    capture: Vec<String>,

    /// Show memory or a stack word at the return of a return probe; repeatable
    #[arg(long, value_name = "WHAT", allow_hyphen_values = true)]
    capture_return: Vec<String>,

    /// Set a register (%ax=0x10) or memory (+8(%di)=u32:5, @0xADDR=hex:0011aabb), for return probes
    /// at the return; repeatable
    #[arg(long, value_name = "CHANGE", allow_hyphen_values = true)]
    set: Vec<String>,

    /// Skip the function: return VALUE to its caller at once, such as 0 or -ENOMEM
    #[arg(long = "return", value_name = "VALUE", allow_hyphen_values = true)]
    returned: Option<String>,

    /// Go on at this address instead
    #[arg(long, value_name = "ADDRESS", conflicts_with = "returned")]
    jump: Option<String>,

    /// Report the state after the instruction, too
    #[arg(long)]
    post: bool,

    /// Report faults of the instruction
    #[arg(long)]
    faults: bool,

    /// Only hits that have this, such as %di==0x10; for return probes, calls that have it at entry;
    /// repeatable, all must hold
    #[arg(long, value_name = "CONDITION")]
    when: Vec<String>,

    /// How many calls of a return probe to follow at a time: a number, or `auto` for all
    #[arg(long, value_name = "N|auto")]
    maxactive: Option<String>,

    /// How the instruction takes effect, at least [default: the cheapest that will do]
    #[arg(long, value_name = "HOW")]
    mechanism: Option<How>,

    #[command(flatten)]
    budget: BudgetArgs,
}

/// For whom the guest waits at a hit.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "At each hit")]
pub(crate) struct HoldArgs {
    /// Pause the machine there, until `hvprobe vm resume`
    #[arg(long)]
    stop: bool,

    /// Wait so long there for what `hvprobe decide` says, such as 5s; after it comes what is done
    /// when nobody says anything, such as 5s,return=-EIO
    #[arg(long, value_name = "TIME[,DEFAULT]", conflicts_with = "stop")]
    ask: Option<String>,
}

/// A mechanism by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum How {
    /// A jump to code that records the hit without an exit; refused where that cannot be
    Optimized,
    /// Carried out by the host
    Emulated,
    /// A copy that jumps back
    Boosted,
    /// A copy with a second exit at its end
    Stepped,
}

impl HitArgs {
    /// Adds what is asked for to the probe `text` defines.
    pub(crate) fn spec(
        &self,
        hold: &HoldArgs,
        text: &str,
        definition: Definition,
    ) -> Result<v1::ProbeSpec, WrongUsage> {
        let mechanism = match self.mechanism {
            None => Mechanism::Unspecified,
            Some(How::Optimized) => Mechanism::Optimized,
            Some(How::Emulated) => Mechanism::Emulated,
            Some(How::Boosted) => Mechanism::Boosted,
            Some(How::Stepped) => Mechanism::Stepped,
        };
        let mut spec = v1::ProbeSpec {
            definition: text.to_owned(),
            mechanism: mechanism.into(),
            actions: self.actions(hold)?,
            budget: self.budget.budget(),
            ..Default::default()
        };
        match self.maxactive.as_deref() {
            None => {}
            Some("auto") => spec.maxactive_auto = true,
            Some(number) => spec.definition = with_maxactive(number, text, definition)?,
        }
        Ok(spec)
    }

    /// What happens at a hit; `None` when nothing is asked for.
    fn actions(&self, hold: &HoldArgs) -> Result<Option<v1::Actions>, WrongUsage> {
        let mut actions = v1::Actions {
            when: all("when", &self.when, syntax::condition)?,
            changes: all("set", &self.set, syntax::change)?,
            post: self.post,
            faults: self.faults,
            ..Default::default()
        };
        for what in all("capture", &self.capture, syntax::capture)? {
            match what {
                Capture::Item(item) => actions.capture.push(item),
                Capture::Register(register) => {
                    let shown = actions.registers.get_or_insert_default();
                    shown.registers.push(register.into());
                }
            }
        }
        for (what, text) in all("capture-return", &self.capture_return, syntax::capture)?
            .into_iter()
            .zip(&self.capture_return)
        {
            match what {
                Capture::Item(item) => actions.capture_at_return.push(item),
                Capture::Register(_) => {
                    let message =
                        "registers are shown both at entry and at the return: use --capture";
                    return Err(bad("capture-return", text, &pointing_at(0, message)));
                }
            }
        }
        if let Some(value) = one("return", self.returned.as_deref(), syntax::value)? {
            actions.then = Some(actions::Then::ReturnValue(value));
        }
        if let Some(at) = one("jump", self.jump.as_deref(), syntax::address)? {
            actions.then = Some(actions::Then::Jump(at));
        }
        if let Some(ask) = one("ask", hold.ask.as_deref(), syntax::ask)? {
            actions.hold = Some(actions::Hold::Ask(ask));
        }
        if hold.stop {
            actions.hold = Some(actions::Hold::Stop(v1::StopMachine {}));
        }
        Ok((actions != v1::Actions::default()).then_some(actions))
    }
}

/// `definition`, which is that of a return probe, with so many calls in flight.
fn with_maxactive(
    number: &str,
    text: &str,
    mut definition: Definition,
) -> Result<String, WrongUsage> {
    match definition.kind {
        Kind::Probe => Err(WrongUsage(format!(
            "--maxactive belongs to return probes, and `{text}` is none"
        ))),
        Kind::Return { maxactive: Some(_) } => Err(WrongUsage(format!(
            "both --maxactive and a number in `{text}`: give one of them"
        ))),
        Kind::Return { maxactive: None } => {
            let wrong = |message: &str| bad("maxactive", number, &pointing_at(0, message));
            let wanted = syntax::address(number).map_err(|error| wrong(&error.message))?;
            let Ok(wanted) = u32::try_from(wanted) else {
                return Err(wrong("that many calls cannot be followed"));
            };
            definition.kind = Kind::Return {
                maxactive: Some(wanted),
            };
            // The limits are those of the definition.
            let text = definition.to_string();
            definition::parse(&text).map_err(|error| wrong(&error.message))?;
            Ok(text)
        }
    }
}

/// What each of `texts` says, if there is nothing wrong with one of them.
fn all<T>(
    option: &str,
    texts: &[String],
    read: impl Fn(&str) -> Result<T, ParseError>,
) -> Result<Vec<T>, WrongUsage> {
    let read = |text: &String| read(text).map_err(|error| bad(option, text, &error));
    texts.iter().map(read).collect()
}

fn one<T>(
    option: &str,
    text: Option<&str>,
    read: impl Fn(&str) -> Result<T, ParseError>,
) -> Result<Option<T>, WrongUsage> {
    let read = |text: &str| read(text).map_err(|error| bad(option, text, &error));
    text.map(read).transpose()
}

/// What is wrong with `text`, given with `option`.
pub(crate) fn bad(option: &str, text: &str, error: &ParseError) -> WrongUsage {
    if text.trim().is_empty() {
        return WrongUsage(format!("bad --{option}: {error}"));
    }
    let picture = error.render(text).replace('\n', "\n  ");
    WrongUsage(format!("bad --{option}: {error}\n  {picture}"))
}

fn pointing_at(column: usize, message: &str) -> ParseError {
    ParseError {
        column,
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        hit: HitArgs,
        #[command(flatten)]
        hold: HoldArgs,
        definition: String,
    }

    fn spec(words: &[&str]) -> Result<v1::ProbeSpec, String> {
        let line = Line::try_parse_from(std::iter::once(&"x").chain(words))
            .map_err(|error| error.to_string())?;
        let definition = definition::parse(&line.definition).map_err(|error| error.to_string())?;
        line.hit
            .spec(&line.hold, &line.definition, definition)
            .map_err(|error| error.0)
    }

    fn told(words: &[&str]) -> String {
        let actions = spec(words).unwrap().actions.unwrap_or_default();
        syntax::actions_text(&actions).join(" ")
    }

    #[test]
    fn options_become_actions() {
        assert_eq!(spec(&["p vfs_read"]).unwrap().actions, None);
        assert_eq!(
            told(&[
                "--capture",
                "%di",
                "--capture",
                "-16(%bp):4",
                "--set",
                "%ax=1",
                "--return",
                "-ENOMEM",
                "--post",
                "--faults",
                "--ask",
                "5s,proceed",
                "p vfs_read",
            ]),
            "capture=%di capture=-16(%bp):4 set=%ax=0x1 return=-ENOMEM ask=5s,proceed post faults"
        );
        assert_eq!(
            told(&[
                "--when",
                "%di==0x10",
                "--capture-return",
                "-8(%ax)",
                "r vfs_read"
            ]),
            "when=%di==0x10 capture-return=-8(%ax):8"
        );
        assert_eq!(
            told(&["--stop", "--jump", "0x1000", "p a"]),
            "jump=0x1000 stop"
        );
        assert_eq!(told(&["--return", "-5", "p a"]), "return=-EIO");
        let boosted = spec(&["--mechanism", "boosted", "p a"]).unwrap();
        assert_eq!(boosted.mechanism(), Mechanism::Boosted);
    }

    #[test]
    fn number_of_calls_goes_into_the_definition() {
        let definition = |words: &[&str]| spec(words).map(|spec| spec.definition);
        assert_eq!(
            definition(&["--maxactive", "20", "p:x vfs_read%return"]),
            Ok("r20:x vfs_read".to_owned())
        );
        assert!(
            spec(&["--maxactive", "auto", "r a"])
                .unwrap()
                .maxactive_auto
        );
        for (words, said) in [
            (["--maxactive", "20", "p a"], "`p a` is none"),
            (["--maxactive", "20", "r5 a"], "a number in `r5 a`"),
            (["--maxactive", "0", "r a"], "0 calls in flight"),
            (["--maxactive", "4097", "r a"], "4097 calls in flight"),
            (["--maxactive", "4294967296", "r a"], "cannot be followed"),
            (["--maxactive", "many", "r a"], "is no digit"),
        ] {
            let error = definition(&words).unwrap_err();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(spec(&["--return", "0", "--jump", "0x1", "p a"]).is_err());
        assert!(spec(&["--stop", "--ask", "1s", "p a"]).is_err());
        let error = spec(&["--capture-return", "%ax", "r a"]).unwrap_err();
        assert!(error.contains("use --capture"), "{error}");
    }

    #[test]
    fn caret_stands_under_what_is_wrong_with_an_option() {
        let error = spec(&["--capture", "+16(%dj)", "p a"]).unwrap_err();
        let lines: Vec<_> = error.lines().collect();
        assert!(lines[0].starts_with("bad --capture: "), "{error}");
        assert_eq!(lines[1..], ["  +16(%dj)", "      ^"]);
    }
}
