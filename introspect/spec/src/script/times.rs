//! Start times of calls, which scripts for bpftrace store in maps: `@start[tid] = nsecs` at the entry, and
//! `nsecs - @start[tid]` at the return.
//!
//! A return probe knows the duration of its call, so no map of times is needed. In the resolved script,
//! `duration` replaces the difference, the condition of the entry replaces the question whether a time is
//! stored, and the statements that store and delete times are gone. Invariant: a script is only resolved if it
//! stores the time of all calls that return in the clause; otherwise it is refused.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use super::syntax::{
    Builtin, Clause, Condition, Gather, Operand, OperandKind, PointKind, Script, Statement,
    StatementKind,
};
use crate::parse_error::{ParseError, bounded, error};

/// Calls whose start times are in a map.
#[derive(Debug)]
struct Kept<'s> {
    /// Column of the first statement that stores a time.
    column: usize,
    targets: BTreeSet<&'s str>,
    /// Condition on the calls; all calls when absent.
    condition: Option<&'s Condition>,
}

type Times<'s> = BTreeMap<&'s str, Kept<'s>>;

/// Returns `script` without maps of times.
pub(super) fn resolve(script: &Script) -> Result<Script, ParseError> {
    let times = times(script)?;
    let used = RefCell::default();
    let mut clauses = Vec::new();
    for clause in &script.clauses {
        let resolving = Resolving {
            times: &times,
            used: &used,
            clause,
        };
        clauses.extend(resolving.clause()?);
    }
    let used = used.into_inner();
    match times.iter().find(|(map, _)| !used.contains(**map)) {
        Some((map, kept)) => error(
            kept.column,
            format!(
                "nothing uses the times in @{map}: write kretprobe:FUNC {{ @ = hist(nsecs - @{map}[tid]); }}"
            ),
        ),
        None => Ok(Script { clauses }),
    }
}

/// Returns the targets of a clause if all its probes are at returns, or if all are at entries, as `at_returns`
/// says.
fn targets(clause: &Clause, at_returns: bool) -> Option<BTreeSet<&str>> {
    let points = clause.points.iter();
    let target = points.map(|point| match &point.kind {
        PointKind::Function {
            returns, target, ..
        } if *returns == at_returns => Some(target.as_str()),
        _ => None,
    });
    target.collect()
}

fn times(script: &Script) -> Result<Times<'_>, ParseError> {
    let mut times = Times::new();
    for clause in &script.clauses {
        for statement in &clause.statements {
            let StatementKind::Keep { map } = &statement.kind else {
                continue;
            };
            let column = statement.column.0;
            let Some(targets) = targets(clause, false) else {
                return error(column, "when a call began is kept at its entry: in kprobe");
            };
            let condition = clause.condition.as_ref();
            let kept = times.entry(map.as_str()).or_insert_with(|| Kept {
                column,
                targets: BTreeSet::new(),
                condition,
            });
            if kept.condition != condition {
                let message = format!("@{map} is kept on another condition before");
                return error(column, message);
            }
            kept.targets.extend(targets);
        }
    }
    Ok(times)
}

struct Resolving<'s> {
    times: &'s Times<'s>,
    /// Maps whose times are used.
    used: &'s RefCell<BTreeSet<String>>,
    clause: &'s Clause,
}

impl Resolving<'_> {
    /// Returns the resolved clause, or `None` if no statement is left.
    fn clause(&self) -> Result<Option<Clause>, ParseError> {
        let clause = self.clause;
        let condition = match &clause.condition {
            Some(condition) => self.condition(condition)?,
            None => None,
        };
        let mut statements = Vec::new();
        for statement in &clause.statements {
            statements.extend(self.statement(statement)?);
        }
        let is_done = statements.is_empty() && !clause.statements.is_empty();
        Ok((!is_done).then(|| Clause {
            points: clause.points.clone(),
            condition,
            statements,
        }))
    }

    /// Returns the times in `map`, after a check that it covers all calls that return in this clause.
    fn kept(&self, column: usize, map: &str) -> Result<&Kept<'_>, ParseError> {
        let Some(kept) = self.times.get(map) else {
            let message = format!(
                "nothing keeps a time in @{map}: write kprobe:FUNC {{ @{map}[tid] = nsecs; }}"
            );
            return error(column, message);
        };
        let Some(targets) = targets(self.clause, true) else {
            return error(column, "only calls that return have it: write kretprobe");
        };
        match targets.difference(&kept.targets).next() {
            None => {
                self.used.borrow_mut().insert(map.to_owned());
                Ok(kept)
            }
            Some(other) => error(
                column,
                format!(
                    "@{map} is not kept at the entry of {}, which returns here",
                    bounded(other)
                ),
            ),
        }
    }

    /// Returns the condition without tests for times, or `None` if nothing else is left.
    fn condition(&self, condition: &Condition) -> Result<Option<Condition>, ParseError> {
        match condition {
            Condition::Kept { column, map } => Ok(self.kept(column.0, map)?.condition.cloned()),
            Condition::And(left, right) => {
                let sides = (self.condition(left)?, self.condition(right)?);
                Ok(match sides {
                    (Some(left), Some(right)) => {
                        Some(Condition::And(Box::new(left), Box::new(right)))
                    }
                    (left, right) => left.or(right),
                })
            }
            other => match first_kept(other) {
                Some((column, map)) => error(
                    column,
                    format!("not supported: `@{map}[tid]` but alone, or with `&&` beside it"),
                ),
                None => Ok(Some(other.clone())),
            },
        }
    }

    fn statement(&self, statement: &Statement) -> Result<Option<Statement>, ParseError> {
        let column = statement.column.0;
        let kind = match &statement.kind {
            StatementKind::Keep { .. } => return Ok(None),
            StatementKind::Forget { map } => {
                // Allowed at any place: the call has returned by then, or its time is not used.
                return match self.times.contains_key(map.as_str()) {
                    true => Ok(None),
                    false => error(column, format!("nothing keeps a time in @{map}")),
                };
            }
            StatementKind::Clear { map } if self.times.contains_key(map.as_str()) => {
                return Ok(None);
            }
            StatementKind::Gather { map, .. } if self.times.contains_key(map.as_str()) => {
                return error(column, format!("@{map} has times: count in another map"));
            }
            StatementKind::Gather { map, keys, what } => StatementKind::Gather {
                map: map.clone(),
                keys: self.operands(keys)?,
                what: self.gather(what)?,
            },
            StatementKind::Printf { format, values } => StatementKind::Printf {
                format: format.clone(),
                values: self.operands(values)?,
            },
            other => other.clone(),
        };
        Ok(Some(Statement {
            column: statement.column,
            kind,
        }))
    }

    fn operands(&self, operands: &[Operand]) -> Result<Vec<Operand>, ParseError> {
        operands
            .iter()
            .map(|operand| self.operand(operand))
            .collect()
    }

    fn operand(&self, operand: &Operand) -> Result<Operand, ParseError> {
        Ok(Operand {
            column: operand.column,
            kind: self.value(operand.column.0, &operand.kind)?,
        })
    }

    fn value(&self, column: usize, kind: &OperandKind) -> Result<OperandKind, ParseError> {
        let map = match kind {
            OperandKind::Since(map) => map,
            OperandKind::Divided { of, by } => {
                return Ok(OperandKind::Divided {
                    of: Box::new(self.value(column, of)?),
                    by: *by,
                });
            }
            other => return Ok(other.clone()),
        };
        let kept = self.kept(column, map)?;
        let condition = self.clause.condition.as_ref();
        if kept.condition.is_some() && !condition.is_some_and(|it| asks_for(it, map)) {
            let message = format!("not all calls have a time in @{map}: ask for it, /@{map}[tid]/");
            return error(column, message);
        }
        Ok(OperandKind::Builtin(Builtin::Duration))
    }

    fn gather(&self, what: &Gather) -> Result<Gather, ParseError> {
        let of = what.of.as_ref().map(|of| self.operand(of));
        Ok(Gather {
            aggregate: what.aggregate,
            of: of.transpose()?,
        })
    }
}

/// Returns whether `condition` implies that a time is in `map`.
fn asks_for(condition: &Condition, map: &str) -> bool {
    match condition {
        Condition::Kept { map: asked, .. } => asked == map,
        Condition::And(left, right) => asks_for(left, map) || asks_for(right, map),
        Condition::Test { .. } | Condition::Not(_) | Condition::Or(..) => false,
    }
}

/// Returns the first test for a time.
fn first_kept(condition: &Condition) -> Option<(usize, &str)> {
    match condition {
        Condition::Kept { column, map } => Some((column.0, map)),
        Condition::Test { .. } => None,
        Condition::Not(inner) => first_kept(inner),
        Condition::And(left, right) | Condition::Or(left, right) => {
            first_kept(left).or_else(|| first_kept(right))
        }
    }
}
