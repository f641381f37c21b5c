//! Start times of calls, which scripts for bpftrace store in maps: `@start[tid] = nsecs` at the entry, and
//! `nsecs - @start[tid]` at the return.
//!
//! A return probe knows the duration of its call, so no map of times is needed. [`resolve`] replaces the difference
//! by `duration`, and a condition `@start[tid]` by the condition under which the time was stored. It removes the
//! statements that store and delete times. Invariant: a clause uses a map of times only if the script stores the
//! start times of all calls whose returns the clause probes, and deletes none of them before that use. Otherwise
//! the script is refused.

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
    /// Condition under which the time of a call is stored; if absent, it is stored for every call.
    condition: Option<&'s Condition>,
}

type Times<'s> = BTreeMap<&'s str, Kept<'s>>;

/// Returns `script` without maps of times.
pub(super) fn resolve(script: &Script) -> Result<Script, ParseError> {
    let times = times(script)?;
    let (used, deleted) = (RefCell::default(), RefCell::default());
    let mut clauses = Vec::new();
    for clause in &script.clauses {
        let resolving = Resolving {
            times: &times,
            used: &used,
            deleted: &deleted,
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

/// Returns the targets of the probes of `clause`, if all are of one kind: at returns if `at_returns` is set, else
/// at entries.
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
    /// Maps and targets for which this clause or an earlier one deletes the times.
    deleted: &'s RefCell<BTreeSet<(String, String)>>,
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

    /// Checks that `map` has the start times of all calls that return in this clause, and returns them.
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
        if let Some(other) = targets.difference(&kept.targets).next() {
            let other = bounded(other);
            let message = format!("@{map} is not kept at the entry of {other}, which returns here");
            return error(column, message);
        }
        let deleted = self.deleted.borrow();
        let is_deleted =
            |target: &&&str| deleted.contains(&(map.to_owned(), (**target).to_owned()));
        match targets.iter().find(is_deleted) {
            None => Ok(kept),
            Some(target) => {
                let target = bounded(target);
                let message = format!(
                    "the times of {target} in @{map} are deleted before: delete them after their last use"
                );
                error(column, message)
            }
        }
    }

    /// Like `kept`, for a clause that needs the times. Also records that the map is used.
    fn used(&self, column: usize, map: &str) -> Result<&Kept<'_>, ParseError> {
        let kept = self.kept(column, map)?;
        self.used.borrow_mut().insert(map.to_owned());
        Ok(kept)
    }

    /// Returns `condition` with each test for a time replaced by the condition under which that time was stored.
    /// Returns `None` if no condition is left.
    fn condition(&self, condition: &Condition) -> Result<Option<Condition>, ParseError> {
        match condition {
            Condition::Kept { column, map } => Ok(self.used(column.0, map)?.condition.cloned()),
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

    /// Returns whether the clause runs only at `BEGIN` and `END`, when no calls are followed.
    fn is_at_the_end(&self) -> bool {
        let is_end = |kind: &PointKind| matches!(kind, PointKind::Begin | PointKind::End);
        self.clause.points.iter().all(|point| is_end(&point.kind))
    }

    fn statement(&self, statement: &Statement) -> Result<Option<Statement>, ParseError> {
        let column = statement.column.0;
        let kind = match &statement.kind {
            StatementKind::Keep { .. } => return Ok(None),
            StatementKind::Forget { map } => {
                // In a clause at the return, the deletion can be left out: the time would not be used again. In any
                // other clause, a deletion would select the calls that count, so `kept` refuses it.
                self.kept(column, map)?;
                let targets = targets(self.clause, true).into_iter().flatten();
                let targets = targets.map(|target| (map.clone(), target.to_owned()));
                self.deleted.borrow_mut().extend(targets);
                return Ok(None);
            }
            StatementKind::Clear { map }
                if self.times.contains_key(map.as_str()) && !self.is_at_the_end() =>
            {
                let message =
                    format!("calls in flight would lose their times in @{map}: clear it at END");
                return error(column, message);
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
        let kept = self.used(column, map)?;
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

/// Returns the column and the map of the first test for a time in `condition`.
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
