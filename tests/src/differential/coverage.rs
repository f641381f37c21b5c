//! How much of a kernel's text the instruction policy covers, and by which mechanism.

use std::collections::BTreeMap;
use std::fmt;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::{Action, Displaced, Refusal, RelocateError, classify, text};
use hvprobe_hit::region::KERNEL_WINDOW;

use super::text::{Apart, Text};

/// Number of refused instructions that are listed as examples of each reason.
const EXAMPLES: usize = 3;

/// Numbers of a kernel's probeable instructions by mechanism.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    /// Emulated by the host.
    pub emulated: u64,
    /// Executed as a copy that jumps back.
    pub boosted: u64,
    /// In the exception table: executed as a copy that traps, instead of being boosted or emulated, so that a fault
    /// is delivered to the kernel as if it had been raised at the instruction's own address.
    pub stepped: u64,
    /// Number of instructions of these three kinds whose copies work only in high slots, because their RIP-relative
    /// operands are at addresses just above zero.
    pub high: u64,
    /// Instructions whose copy does not work even in the last slot, if the region of slots is at one end of its
    /// window.
    pub out_of_reach: Vec<(Gva, String)>,
    /// Refused instructions, by reason.
    pub refused: BTreeMap<Refusal, Refused>,
    /// Text that is not among the probeable instructions.
    pub apart: Apart,
}

/// Instructions refused for one reason.
#[derive(Clone, Debug, Default)]
pub struct Refused {
    /// Number of instructions.
    pub count: u64,
    /// Counts by mnemonic.
    pub by_mnemonic: BTreeMap<String, u64>,
    /// The first of the instructions.
    pub examples: Vec<(Gva, String)>,
}

impl Coverage {
    /// Classifies all instructions of `kernel`.
    #[must_use]
    pub fn of(kernel: &Text) -> Self {
        let mut coverage = Self::default();
        let apart = kernel.for_each(|site| match classify(kernel.code(site.at), site.at) {
            Ok(displaced) => {
                let counter = match displaced.action() {
                    // A fixup needs a copy; an instruction without a copy stays emulated.
                    _ if kernel.image().has_fixup(site.at)
                        && displaced.trapped(site.at).is_ok() =>
                    {
                        &mut coverage.stepped
                    }
                    Action::Emulate(_) => &mut coverage.emulated,
                    Action::Boost => &mut coverage.boosted,
                };
                *counter += 1;
                match Reach::of(&displaced) {
                    Reach::All => {}
                    Reach::High => coverage.high += 1,
                    Reach::Nowhere => {
                        let text = text(kernel.code(site.at), site.at);
                        coverage.out_of_reach.push((site.at, text));
                    }
                }
            }
            Err(refusal) => {
                let refused = coverage.refused.entry(refusal).or_default();
                refused.count += 1;
                let mnemonic = format!("{:?}", site.instruction.mnemonic()).to_lowercase();
                *refused.by_mnemonic.entry(mnemonic).or_default() += 1;
                if refused.examples.len() < EXAMPLES {
                    let text = text(kernel.code(site.at), site.at);
                    refused.examples.push((site.at, text));
                }
            }
        });
        coverage.apart = apart;
        coverage
    }

    /// Returns the number of refused instructions.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.values().map(|refused| refused.count).sum()
    }

    /// Returns the number of instructions that the kernel's own rules allow to be probed.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.emulated + self.boosted + self.stepped + self.refused()
    }

    /// Returns the share of `part` in all instructions, in thousandths of a percent.
    fn share(&self, part: u64) -> Share {
        Share(part.saturating_mul(100_000) / self.total().max(1))
    }

    /// Returns whether at most `per_mille` instructions in a thousand are refused.
    #[must_use]
    pub fn refuses_at_most(&self, per_mille: u64) -> bool {
        self.refused() * 1000 <= self.total() * per_mille
    }
}

/// Slots in which the copies of an instruction work.
enum Reach {
    All,
    High,
    Nowhere,
}

impl Reach {
    /// Returns in which slots the copies of `displaced` work. To find out, builds copies in the outermost slots.
    fn of(displaced: &Displaced) -> Self {
        let works = |slot| {
            let in_reach = |code| !matches!(code, Err(RelocateError::OutOfReach { .. }));
            in_reach(displaced.boosted(slot)) && in_reach(displaced.trapped(slot))
        };
        let regions = hvprobe_engine::outermost_slots(&KERNEL_WINDOW);
        if regions.iter().flatten().all(|slot| works(*slot)) {
            Self::All
        } else if regions.iter().all(|[_, last]| works(*last)) {
            Self::High
        } else {
            Self::Nowhere
        }
    }
}

/// Thousandths of a percent.
struct Share(u64);

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>3}.{:03} %", self.0 / 1000, self.0 % 1000)
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line =
            |name: &str, count: u64| writeln!(f, "{name:<34}{count:>10}  {}", self.share(count));
        line("probeable instructions", self.total())?;
        line("  emulated", self.emulated)?;
        line("  boosted", self.boosted)?;
        line("  stepped (exception table)", self.stepped)?;
        line("  only from high slots", self.high)?;
        line("  refused", self.refused())?;
        let mut reasons: Vec<_> = self.refused.iter().collect();
        reasons.sort_by_key(|(_, refused)| std::cmp::Reverse(refused.count));
        for (reason, refused) in reasons {
            let share = self.share(refused.count);
            writeln!(f, "    {:>10}  {share}  {reason}", refused.count)?;
            let mut mnemonics: Vec<_> = refused.by_mnemonic.iter().collect();
            mnemonics.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            let mnemonics: Vec<String> = mnemonics
                .iter()
                .map(|(mnemonic, count)| format!("{mnemonic} {count}"))
                .collect();
            writeln!(f, "                {}", mnemonics.join(", "))?;
            for (at, text) in &refused.examples {
                writeln!(f, "                {at} {text}")?;
            }
        }
        for (at, text) in &self.out_of_reach {
            writeln!(f, "no slot reaches what it refers to: {at} {text}")?;
        }
        let Apart {
            forbidden,
            undecodable,
        } = &self.apart;
        writeln!(
            f,
            "not counted: {forbidden} instructions the kernel rules out"
        )?;
        for at in undecodable {
            writeln!(
                f,
                "not counted: the function around {at} from there on, where bytes are no instruction"
            )?;
        }
        Ok(())
    }
}
