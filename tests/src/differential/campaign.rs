//! Chooses the instructions and states to try, and counts the results.
//!
//! Invariant: every form of instruction in the text is tried at least once, and instructions that could not be
//! run are counted with the reason. Refused instructions are never run; the coverage report counts them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use hvprobe_arch::Gva;
use hvprobe_arch::insn::classify;

use super::bench::{Bench, End};
use super::random::Random;
use super::start::Host;
use super::state::case;
use super::text::{Form, Site, Text};
use super::trial::{self, Difference, Mechanism, Verdict};

/// Maximum number of differences kept; further ones are only counted.
const KEPT: usize = 50;

/// Extent of a campaign.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// One function in this many is chosen, at random; only its instructions are tried.
    pub one_in: u64,
    /// Number of instructions of each form, if there are as many.
    pub per_form: usize,
    /// Number of further instructions, of any form. Because of them, common forms are tried more often.
    pub more: usize,
    /// Number of states for each instruction.
    pub states: u64,
}

/// The instructions to try.
#[derive(Debug)]
pub struct Sample {
    /// Instructions, sorted by address.
    pub sites: Vec<Site>,
    /// Number of instructions to choose from, including refused ones.
    pub among: u64,
    /// Number of forms with an instruction that the policy does not refuse.
    pub forms: usize,
}

impl Sample {
    /// Chooses among the instructions that the policy does not refuse.
    #[must_use]
    pub fn choose(text: &Text, seed: u64, extent: Extent) -> Self {
        let mut random = Random::new(&[seed]);
        let mut forms: BTreeMap<Form, (u64, Vec<Site>)> = BTreeMap::new();
        let mut more: Vec<Site> = Vec::new();
        let mut among = 0;
        // Classifies only instructions that would be kept, which are few.
        let is_refused = |site: &Site| classify(text.code(site.at), site.at).is_err();
        let mut keep = |kept: &mut Vec<Site>, size: usize, seen: u64, site: &Site| {
            if let Some(place) = place(kept.len(), size, seen, &mut random)
                && !is_refused(site)
            {
                if place == kept.len() {
                    kept.push(*site);
                } else {
                    kept[place] = *site;
                }
            }
        };
        let is_chosen = |function: Gva| {
            let mut random = Random::new(&[seed, function.0]);
            random.below(extent.one_in.max(1)) == 0
        };
        text.for_each_in(is_chosen, |site| {
            among += 1;
            let (seen, kept) = forms.entry(Form::of(&site.instruction)).or_default();
            *seen += 1;
            keep(kept, extent.per_form, *seen, site);
            keep(&mut more, extent.more, among, site);
        });
        // Leaves out forms of which every instruction was refused.
        forms.retain(|_, (_, kept)| extent.per_form == 0 || !kept.is_empty());
        let count = forms.len();
        let mut sites: Vec<Site> = forms.into_values().flat_map(|(_, kept)| kept).collect();
        sites.extend(more);
        sites.sort_by_key(|site| site.at);
        sites.dedup_by_key(|site| site.at);
        Self {
            sites,
            among,
            forms: count,
        }
    }
}

/// Returns the index at which to keep item number `seen`, or `None` to drop it. `kept` is the number of items kept
/// so far. At the end, `size` of all items are kept, each with the same probability.
fn place(kept: usize, size: usize, seen: u64, random: &mut Random) -> Option<usize> {
    if kept < size {
        return Some(kept);
    }
    let place = usize::try_from(random.below(seen)).ok()?;
    (place < kept).then_some(place)
}

/// Results of a campaign.
#[derive(Debug, Default)]
pub struct Tally {
    /// Number of instructions tried.
    pub sites: u64,
    /// Number of states tried, including those that could not be run.
    pub trials: u64,
    /// Numbers of runs that had the same effect as the instruction in place, by mechanism.
    pub same: BTreeMap<Mechanism, u64>,
    /// Numbers of runs in place, by their end.
    pub ends: BTreeMap<String, u64>,
    /// Numbers of trials that could not be run, by reason and mnemonic.
    pub not_run: BTreeMap<String, BTreeMap<String, u64>>,
    /// Forms of the instructions that were run.
    pub forms: BTreeSet<Form>,
    /// The first differences.
    pub differences: Vec<Difference>,
    /// Number of differences.
    pub different: u64,
}

impl Tally {
    /// Tries each of `sites` with `states` states.
    #[must_use]
    pub fn run(bench: &mut Bench, text: &Text, sites: &[Site], seed: u64, states: u64) -> Self {
        let host = bench.host(text);
        let mut tally = Self::default();
        for site in sites {
            tally.sites += 1;
            for state in 0..states {
                tally.trials += 1;
                tally.one(bench, text, site, &host, seed, state);
            }
        }
        tally
    }

    fn one(
        &mut self,
        bench: &mut Bench,
        text: &Text,
        site: &Site,
        host: &Host,
        seed: u64,
        state: u64,
    ) {
        let displaced = match classify(text.code(site.at), site.at) {
            Ok(displaced) => displaced,
            Err(refusal) => return self.skip(site, format!("refused: {refusal}")),
        };
        let case = match case(site, host, seed, state) {
            Ok(case) => case,
            Err(reason) => return self.skip(site, reason.to_owned()),
        };
        match trial::run(bench, &displaced, &case) {
            Verdict::Same { end, mechanisms } => {
                for mechanism in mechanisms {
                    *self.same.entry(mechanism).or_default() += 1;
                }
                let end = match end {
                    End::At(at) if at == displaced.next() => "went on".to_owned(),
                    End::At(_) => "branched".to_owned(),
                    End::Exception { vector, .. } => format!("exception {vector}"),
                    other => format!("{other:?}"),
                };
                *self.ends.entry(end).or_default() += 1;
                self.forms.insert(Form::of(&site.instruction));
            }
            Verdict::NotRun(reason) => self.skip(site, reason.to_owned()),
            Verdict::Different(difference) => {
                self.different += 1;
                if self.differences.len() < KEPT {
                    self.differences.push(*difference);
                }
            }
        }
    }

    fn skip(&mut self, site: &Site, reason: String) {
        let mnemonic = format!("{:?}", site.instruction.mnemonic()).to_lowercase();
        let reason = self.not_run.entry(reason).or_default();
        *reason.entry(mnemonic).or_default() += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |counts: &BTreeMap<String, u64>| {
            let words: Vec<String> = counts
                .iter()
                .map(|(what, count)| format!("{what} {count}"))
                .collect();
            words.join(", ")
        };
        writeln!(
            f,
            "{} instructions in {} states; {} forms run",
            self.sites,
            self.trials,
            self.forms.len()
        )?;
        for (mechanism, count) in &self.same {
            writeln!(f, "  {count:>8} as in place: {mechanism:?}")?;
        }
        writeln!(f, "  in place: {}", list(&self.ends))?;
        for (reason, mnemonics) in &self.not_run {
            let count: u64 = mnemonics.values().sum();
            writeln!(f, "  {count:>8} not run: {reason}: {}", list(mnemonics))?;
        }
        writeln!(f, "  {:>8} different", self.different)
    }
}
