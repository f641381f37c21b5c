//! Options for the actions of probes at their hits, and their conversion to requests.

use clap::Args;
use hvprobe_proto::v1;
use hvprobe_proto::wire::{Wire as _, WireEnum as _};
use hvprobe_spec::definition::{self, Definition, Kind};
use hvprobe_spec::fetch::{Filter, read_filter};
use hvprobe_spec::language::{self, Capture};
use hvprobe_spec::{
    Actions, FRAMES_MAX, Hold, Item, Mechanism, ParseError, RegisterSet, Then, bounded,
};

use super::budget::BudgetArgs;
use crate::failure::WrongUsage;
use crate::failure::typed::{all, bad_option, one};
use crate::options::one_of::one_of;

/// What happens at a hit; for all probes defined in the same command.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "At each hit")]
pub(crate) struct HitArgs {
    #[command(flatten)]
    pub(crate) acts: ActArgs,

    /// Only hits whose arguments and task match, such as 'count > 4096 && comm == "dd"'; return probes are
    /// filtered at the return, so use --when to choose calls at entry
    #[arg(long, value_name = "FILTER")]
    filter: Option<String>,
}

/// The same, without a filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "At each hit")]
pub(crate) struct ActArgs {
    /// Record a register (%di), memory (+16(%di):32 for 32 bytes) or a stack word ($stack0); for return
    /// probes, at entry; repeatable
    #[arg(long, value_name = "WHAT", allow_hyphen_values = true)]
    capture: Vec<String>,

    /// Record memory or a stack word at the return, for return probes; repeatable
    #[arg(long, value_name = "WHAT", allow_hyphen_values = true)]
    capture_return: Vec<String>,

    /// Record the kernel's stack; for return probes, at the return
    #[arg(long)]
    stack: bool,

    /// Show registers, not the function's arguments by name and type
    #[arg(long)]
    raw: bool,

    /// Set a register (%ax=0x10) or memory (+8(%di)=u32:5, @0xADDR=hex:0011aabb); for return probes, at the
    /// return; repeatable
    #[arg(long, value_name = "CHANGE", allow_hyphen_values = true)]
    set: Vec<String>,

    /// Skip the function: return VALUE to its caller at once, such as 0 or -ENOMEM
    #[arg(long = "return", value_name = "VALUE", allow_hyphen_values = true)]
    returned: Option<String>,

    /// Continue at this address instead of the probed instruction
    #[arg(long, value_name = "ADDRESS", conflicts_with = "returned")]
    jump: Option<String>,

    /// When there is no room for a hit, let the virtual CPU wait up to five seconds before the hit is dropped; also
    /// set for probes that this command plants for --hist, `hist` triggers or maps. A client that reads slowly
    /// loses events even so
    #[arg(long)]
    wait_for_room: bool,

    /// Also report the state after the instruction
    #[arg(long)]
    post: bool,

    /// Report faults of the instruction
    #[arg(long)]
    faults: bool,

    /// Only hits where this holds, such as %di==0x10; for return probes, at entry; repeatable, all must hold
    #[arg(long, value_name = "CONDITION")]
    when: Vec<String>,

    /// How many calls a return probe follows at once: a number, or `auto` for all
    #[arg(long, value_name = "N|auto")]
    maxactive: Option<String>,

    /// Use at least this mechanism for the probed instruction; a costlier one is used where the instruction or
    /// another probe there needs it [default: the cheapest that works]
    #[arg(long, value_name = "HOW", value_parser = one_of(&MECHANISMS, Mechanism::name))]
    mechanism: Option<Mechanism>,

    #[command(flatten)]
    budget: BudgetArgs,
}

/// Arguments that the hits show if the definition has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unnamed {
    /// The function's parameters, or else its registers.
    Defaults,
    Nothing,
}

/// For whom the guest waits at a hit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "At each hit")]
pub(crate) struct HoldArgs {
    /// Pause the machine at the hit, until `hvprobe vm resume`
    #[arg(long)]
    stop: bool,

    /// Wait up to TIME at the hit for `hvprobe decide`, if one is attached, such as 5s; DEFAULT is the decision
    /// when nobody answers, such as 5s,return=-EIO [default: proceed]
    #[arg(long, value_name = "TIME[,DEFAULT]", conflicts_with = "stop")]
    ask: Option<String>,
}

/// Mechanisms, each with its help text.
const MECHANISMS: [(Mechanism, &str); 4] = [
    (
        Mechanism::Optimized,
        "A jump to code that records the hit without an exit; refused where that is impossible",
    ),
    (Mechanism::Emulated, "Emulated by the host"),
    (Mechanism::Boosted, "An out-of-line copy that jumps back"),
    (
        Mechanism::Stepped,
        "An out-of-line copy with a second exit at its end",
    ),
];

/// Maximum number of addresses of a stack.
#[expect(clippy::cast_possible_truncation, reason = "it is small")]
const FRAMES: u8 = FRAMES_MAX as u8;

impl From<ActArgs> for HitArgs {
    fn from(acts: ActArgs) -> Self {
        Self { acts, filter: None }
    }
}

impl HitArgs {
    /// Returns the probe that `text` defines, with the actions of these options.
    pub(crate) fn spec(
        &self,
        hold: &HoldArgs,
        text: &str,
        definition: Definition,
        unnamed: Unnamed,
    ) -> Result<v1::ProbeSpec, WrongUsage> {
        let (text, definition) = self.filtered(text, definition)?;
        self.acts.spec(hold, &text, definition, unnamed)
    }

    /// Returns the probe that `text` defines, with `--filter` and its own filter combined.
    fn filtered(
        &self,
        text: &str,
        mut definition: Definition,
    ) -> Result<(String, Definition), WrongUsage> {
        let Some(wanted) = &self.filter else {
            return Ok((text.to_owned(), definition));
        };
        let filter = read_filter(wanted).map_err(|error| bad_option("filter", wanted, &error))?;
        let (text, filter) = match definition.filter {
            None => (Some(format!("{text} if {wanted}")), filter),
            Some(own) => (None, Filter::And(Box::new(own), Box::new(filter))),
        };
        definition.filter = Some(filter);
        Ok((text.unwrap_or_else(|| definition.to_string()), definition))
    }
}

impl ActArgs {
    /// Adds the actions that counting needs. If `are_counted` is set, hits wait for room; if `by_stack` is set,
    /// they record the kernel's stack.
    pub(crate) fn count(&mut self, are_counted: bool, by_stack: bool) {
        self.wait_for_room |= are_counted;
        self.stack |= by_stack;
    }

    fn spec(
        &self,
        hold: &HoldArgs,
        text: &str,
        definition: Definition,
        unnamed: Unnamed,
    ) -> Result<v1::ProbeSpec, WrongUsage> {
        let mut actions = self.actions(hold)?;
        if self.stack {
            let captures = match definition.kind {
                Kind::Probe => &mut actions.capture,
                Kind::Return { .. } => &mut actions.capture_at_return,
            };
            captures.push(Item::StackTrace(FRAMES));
        }
        let by_name = !self.raw && actions.registers == RegisterSet::default();
        let defaults = unnamed == Unnamed::Defaults && definition.arguments.is_empty();
        if by_name && !defaults {
            actions.registers = RegisterSet::from_iter([]);
        }
        let is_asked = actions != Actions::default();
        let mut spec = v1::ProbeSpec {
            definition: text.to_owned(),
            mechanism: self.mechanism.map_or(0, Mechanism::number),
            actions: is_asked.then(|| actions.to_wire()),
            default_arguments: by_name && defaults,
            budget: self.budget.budget()?,
            ..Default::default()
        };
        match self.maxactive.as_deref() {
            None => {}
            Some("auto") => spec.maxactive_auto = true,
            Some(number) => spec.definition = with_maxactive(number, text, definition)?,
        }
        Ok(spec)
    }

    /// Returns the actions that these options and `hold` request at a hit.
    fn actions(&self, hold: &HoldArgs) -> Result<Actions, WrongUsage> {
        let mut actions = Actions {
            when: all("when", &self.when, language::condition)?,
            changes: all("set", &self.set, language::change)?,
            post: self.post,
            faults: self.faults,
            wait_for_room: self.wait_for_room,
            ..Default::default()
        };
        let mut shown = Vec::new();
        for what in all("capture", &self.capture, language::capture)? {
            match what {
                Capture::Item(item) => actions.capture.push(item),
                Capture::Register(register) => shown.push(register),
            }
        }
        if !shown.is_empty() {
            actions.registers = shown.into_iter().collect();
        }
        for (what, text) in all("capture-return", &self.capture_return, language::capture)?
            .into_iter()
            .zip(&self.capture_return)
        {
            match what {
                Capture::Item(item) => actions.capture_at_return.push(item),
                Capture::Register(_) => {
                    let message =
                        "registers are shown both at entry and at the return: use --capture";
                    return Err(bad_option(
                        "capture-return",
                        text,
                        &at_the_beginning(message),
                    ));
                }
            }
        }
        if let Some(value) = one("return", self.returned.as_deref(), language::value)? {
            actions.then = Then::Return(value);
        }
        if let Some(at) = one("jump", self.jump.as_deref(), language::address)? {
            actions.then = Then::Jump(at);
        }
        actions.hold = one("ask", hold.ask.as_deref(), language::ask)?;
        if hold.stop {
            actions.hold = Some(Hold::Stop);
        }
        Ok(actions)
    }
}

/// Returns the text of `definition` with `number` as its maxactive. Refuses a definition that is not of a return
/// probe.
fn with_maxactive(
    number: &str,
    text: &str,
    mut definition: Definition,
) -> Result<String, WrongUsage> {
    match definition.kind {
        Kind::Probe => Err(WrongUsage(format!(
            "--maxactive belongs to return probes, and `{}` is none",
            bounded(text)
        ))),
        Kind::Return { maxactive: Some(_) } => Err(WrongUsage(format!(
            "both --maxactive and a number in `{}`: give one of them",
            bounded(text)
        ))),
        Kind::Return { maxactive: None } => {
            let wrong = |message: &str| bad_option("maxactive", number, &at_the_beginning(message));
            let wanted = language::address(number).map_err(|error| wrong(&error.message))?;
            let Ok(wanted) = u32::try_from(wanted.0) else {
                return Err(wrong("that many calls cannot be followed"));
            };
            definition.kind = Kind::Return {
                maxactive: Some(wanted),
            };
            // The parser of definitions checks the limits.
            let text = definition.to_string();
            definition::parse(&text).map_err(|error| wrong(&error.message))?;
            Ok(text)
        }
    }
}

fn at_the_beginning(message: &str) -> ParseError {
    ParseError {
        column: 0,
        message: message.to_owned(),
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
            .spec(&line.hold, &line.definition, definition, Unnamed::Defaults)
            .map_err(|error| error.0)
    }

    fn rendered(words: &[&str]) -> String {
        let asked = spec(words).unwrap();
        output::events::asked::actions(asked.actions.as_ref()).join(" ")
    }

    #[test]
    fn options_become_actions() {
        assert_eq!(spec(&["p vfs_read"]).unwrap().actions, None);
        assert_eq!(
            rendered(&[
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
            rendered(&[
                "--when",
                "%di==0x10",
                "--capture-return",
                "-8(%ax)",
                "r vfs_read"
            ]),
            "when=%di==0x10 capture-return=-8(%ax):8"
        );
        assert_eq!(
            rendered(&["--stop", "--jump", "0x1000", "p a"]),
            "jump=0x1000 stop"
        );
        assert_eq!(rendered(&["--return", "-5", "p a"]), "return=-EIO");
        let boosted = spec(&["--mechanism", "boosted", "p a"]).unwrap();
        assert_eq!(boosted.mechanism(), v1::Mechanism::Boosted);
    }

    #[test]
    fn a_filter_is_added_to_the_definition() {
        let definition = |words: &[&str]| spec(words).map(|spec| spec.definition);
        let found = definition(&["--filter", "pid == 7", "p a"]);
        assert_eq!(found.unwrap(), "p a if pid == 7");
        let found = definition(&["--filter", "x > 1", "p a x=%di if x < 9 || cpu == 0"]);
        assert_eq!(found.unwrap(), "p a x=%di if (x < 9 || cpu == 0) && x > 1");
        let error = definition(&["--filter", "pid ==", "p a"]).unwrap_err();
        assert!(error.to_string().contains("pid ==\n"), "{error}");
    }

    #[test]
    fn arguments_are_shown_unless_registers_are_asked_for() {
        let registers = |words: &[&str]| {
            let spec = spec(words).unwrap();
            let shown = spec.actions.and_then(|actions| actions.registers);
            let shown = shown.map(|set| set.registers.len());
            (spec.default_arguments, shown)
        };
        assert_eq!(registers(&["p a"]), (true, None));
        assert_eq!(registers(&["--capture", "+0(%si)", "p a"]), (true, None));
        assert_eq!(registers(&["--capture", "%si", "p a"]), (false, Some(1)));
        assert_eq!(registers(&["--raw", "p a"]), (false, None));
        assert_eq!(registers(&["p a x=%di"]), (false, Some(0)));
        assert_eq!(
            registers(&["--capture", "%si", "p a x=%di"]),
            (false, Some(1))
        );
        assert_eq!(registers(&["--raw", "p a x=%di"]), (false, None));
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
