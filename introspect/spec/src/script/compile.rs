//! Compiler from scripts to definitions and histograms.
//!
//! Invariant: the output consists of valid definitions and histograms. A construct that these languages cannot
//! express is refused, with its position in the script.

use std::collections::BTreeMap;

use super::program::{Action, Counted, KeyPart, Map, Planted, Program, Said, Written};
use super::read::in_line;
use super::syntax::{
    Builtin, Clause, Compared, Condition, Fetched, Gather, MapFunction, Operand, OperandKind,
    Point, PointKind, Script, Statement, StatementKind, With,
};
use super::times;
use crate::definition::{self, FileError};
use crate::fetch::OPERAND_MAX;
use crate::histogram::{SIZE_MAX, read_histogram};
use crate::parse_error::{ParseError, error};

/// Maximum length of a definition or histogram that a server accepts.
const WRITTEN_MAX: usize = 1024;
/// Maximum number of histograms of a machine.
const HISTOGRAMS_MAX: usize = 64;
/// Maximum length of the readable part of an argument's name.
const READABLE: usize = 20;

/// Compiles `script`, which was parsed from `text`.
///
/// # Errors
/// Returns the line and the reason if no definition and no histogram can express the script.
pub fn compile(text: &str, script: &Script) -> Result<Program, FileError> {
    let mut compiling = Compiling::default();
    let compiled = times::resolve(script).and_then(|script| compiling.script(&script));
    match compiled {
        Ok(()) => Ok(compiling.program),
        Err(error) => Err(in_line(text, error)),
    }
}

/// Partly compiled program.
#[derive(Default)]
struct Compiling {
    program: Program,
    /// Fetched values and the names of their arguments.
    names: Vec<(OperandKind, String)>,
    /// Maps, sorted by name.
    maps: BTreeMap<String, Gathered>,
    histograms: usize,
}

/// Map before all clauses have been compiled.
struct Gathered {
    aggregate: MapFunction,
    keys: usize,
    counted: Vec<Counted>,
}

impl Compiling {
    fn script(&mut self, script: &Script) -> Result<(), ParseError> {
        for clause in &script.clauses {
            self.probes(clause)?;
        }
        let maps = std::mem::take(&mut self.maps);
        self.program.maps = maps
            .into_iter()
            .map(|(name, gathered)| Map {
                name,
                aggregate: gathered.aggregate,
                counted: gathered.counted,
            })
            .collect();
        // These actions refer to maps, so they are compiled after all maps are known.
        for clause in &script.clauses {
            for point in &clause.points {
                if !matches!(point.kind, PointKind::Function { .. }) {
                    let actions = self.aside(&clause.statements)?;
                    self.program.others += 1;
                    match point.kind {
                        PointKind::Begin => self.program.begin.extend(actions),
                        PointKind::Interval(length) => {
                            self.program.intervals.push((length, actions));
                        }
                        _ => self.program.end.extend(actions),
                    }
                }
            }
        }
        Ok(())
    }

    /// Compiles the actions of a clause that does not run at hits.
    fn aside(&self, statements: &[Statement]) -> Result<Vec<Action>, ParseError> {
        let actions = statements.iter().map(|statement| {
            let map = |name: &str| {
                let found = self.program.maps.iter().position(|map| map.name == name);
                let none = || format!("nothing is counted in @{name}");
                found.map_or_else(|| error(statement.column.0, none()), Ok)
            };
            Ok(match &statement.kind {
                StatementKind::Gather { .. }
                | StatementKind::Keep { .. }
                | StatementKind::Forget { .. } => {
                    return error(
                        statement.column.0,
                        "hits are counted in clauses of kprobe and kretprobe",
                    );
                }
                StatementKind::Printf { format, values } => Action::Printf {
                    format: format.clone(),
                    values: values
                        .iter()
                        .map(|it| said_aside(it.column.0, &it.kind))
                        .collect::<Result<_, _>>()?,
                },
                StatementKind::Print { map: name, top } => Action::Print {
                    map: map(name)?,
                    top: *top,
                },
                StatementKind::Clear { map: name } => Action::Clear { map: map(name)? },
                StatementKind::Time(format) => Action::Time(format.clone()),
                StatementKind::Exit => Action::Exit,
            })
        });
        actions.collect()
    }

    /// Compiles the probes of `clause` and their histograms.
    fn probes(&mut self, clause: &Clause) -> Result<(), ParseError> {
        let functions = clause.points.iter().filter_map(|point| match &point.kind {
            PointKind::Function {
                returns,
                column,
                target,
            } => Some((point, *returns, column.0, target.as_str())),
            _ => None,
        });
        let functions: Vec<_> = functions.collect();
        let Some((first, ..)) = functions.first() else {
            return Ok(());
        };
        if let Some(other) = clause.points.iter().find(|point| is_aside(point)) {
            let message = "kprobe and kretprobe stand in clauses of their own";
            return error(other.column.0.max(first.column.0), message);
        }
        let used = Used::of(clause, functions.iter().any(|(_, returns, ..)| !returns))?;
        let mut actions = Vec::new();
        for statement in &clause.statements {
            actions.extend(self.at_hits(statement)?);
        }
        let from = self.program.probes.len();
        for (point, returns, column, target) in functions {
            let written = self.definition(clause, &used, returns, column, target)?;
            if written.text.len() > WRITTEN_MAX {
                let message = "too much is fetched, or too much compared, in one clause";
                return error(point.column.0, message);
            }
            let definition = definition::parse(&written.text).map_err(|e| written.in_script(e))?;
            self.program.probes.push(Planted {
                written,
                definition,
                stacks: used.stacks,
                actions: actions.clone(),
            });
        }
        let probes = from..self.program.probes.len();
        for statement in &clause.statements {
            if let StatementKind::Gather { map, keys, what } = &statement.kind {
                self.gather(statement.column.0, map, keys, what, probes.clone())?;
            }
        }
        Ok(())
    }

    /// Generates the definition of a probe at `target`, which begins at `column`.
    fn definition(
        &mut self,
        clause: &Clause,
        used: &Used<'_>,
        returns: bool,
        column: usize,
        target: &str,
    ) -> Result<Written, ParseError> {
        let mut written = Written::default();
        written.push(column, if returns { "r " } else { "p " });
        written.push_same(column, target);
        for operand in &used.fetched {
            let name = self.name(&operand.kind);
            let expression = expression(&operand.kind);
            written.push(operand.column.0, &format!(" {name}={expression}"));
        }
        if let Some(condition) = &clause.condition {
            written.push(column, " if ");
            self.filter(&mut written, condition)?;
        }
        Ok(written)
    }

    fn filter(&mut self, written: &mut Written, condition: &Condition) -> Result<(), ParseError> {
        let (left, sign, right) = match condition {
            Condition::Test {
                operand,
                operator,
                value,
            } => {
                let column = operand.column.0;
                let field = match &operand.kind {
                    OperandKind::Builtin(Builtin::Pid) => "tgid".to_owned(),
                    OperandKind::Builtin(Builtin::Tid) => "pid".to_owned(),
                    OperandKind::Builtin(Builtin::Comm) => "comm".to_owned(),
                    OperandKind::Builtin(Builtin::Cpu) => "cpu".to_owned(),
                    OperandKind::Fetched(_) | OperandKind::Str(_) => self.name(&operand.kind),
                    _ => {
                        let message = "not supported in a condition; there are pid, tid, comm, cpu, \
                                       arg0 to arg5, args.NAME, retval, curtask and str()";
                        return error(column, message);
                    }
                };
                written.push(column, &format!("{field} {} ", operator.sign()));
                written.push(value.column.0, &compared(value)?);
                return Ok(());
            }
            Condition::Kept { column, .. } => {
                return error(column.0, "only calls that return have it: write kretprobe");
            }
            Condition::Not(inner) => {
                written.push(inner.column(), "!(");
                self.filter(written, inner)?;
                written.push(inner.column(), ")");
                return Ok(());
            }
            Condition::And(left, right) => (left, " && ", right),
            Condition::Or(left, right) => (left, " || ", right),
        };
        let is_and = matches!(condition, Condition::And(..));
        // Both operators group from the left.
        let in_left = is_and && matches!(**left, Condition::Or(..));
        let in_right = match is_and {
            true => matches!(**right, Condition::Or(..) | Condition::And(..)),
            false => matches!(**right, Condition::Or(..)),
        };
        for (part, braces, behind) in [(left, in_left, sign), (right, in_right, "")] {
            let column = part.column();
            written.push(column, if braces { "(" } else { "" });
            self.filter(written, part)?;
            written.push(column, if braces { ")" } else { "" });
            written.push(column, behind);
        }
        Ok(())
    }

    /// Returns the name of the argument that fetches `kind`.
    fn name(&mut self, kind: &OperandKind) -> String {
        let kind = match kind.undivided() {
            // A symbol is looked up by its address, so only the address is fetched.
            OperandKind::Ksym(of) => OperandKind::Fetched(of.clone()),
            other => other.clone(),
        };
        if let Some((_, name)) = self.names.iter().find(|(known, _)| *known == kind) {
            return name.clone();
        }
        let of = match kind.fetched() {
            Some(Fetched::Argument(number)) => format!("arg{number}"),
            Some(Fetched::Named(path)) => {
                let readable = path.chars().filter(|c| *c != '>');
                let readable = readable.map(|c| if c.is_ascii_alphanumeric() { c } else { '_' });
                format!("args_{}", readable.take(READABLE).collect::<String>())
            }
            Some(Fetched::CurrentTask) => "curtask".to_owned(),
            Some(Fetched::Return) | None => "retval".to_owned(),
        };
        let mut name = match kind {
            OperandKind::Str(_) => format!("s_{of}"),
            _ => of,
        };
        if self.names.iter().any(|(_, taken)| *taken == name) {
            name = format!("{name}_{}", self.names.len());
        }
        self.names.push((kind, name.clone()));
        name
    }

    /// Compiles `statement` to an action at hits. Returns `None` if it only counts hits.
    fn at_hits(&mut self, statement: &Statement) -> Result<Option<Action>, ParseError> {
        let column = statement.column.0;
        Ok(Some(match &statement.kind {
            // `times::resolve` has already removed `Keep` and `Forget`.
            StatementKind::Gather { .. }
            | StatementKind::Keep { .. }
            | StatementKind::Forget { .. } => return Ok(None),
            StatementKind::Printf { format, values } => Action::Printf {
                format: format.clone(),
                values: values.iter().map(|it| self.said(&it.kind)).collect(),
            },
            StatementKind::Time(format) => Action::Time(format.clone()),
            StatementKind::Exit => Action::Exit,
            StatementKind::Print { .. } | StatementKind::Clear { .. } => {
                let message = "not supported at hits; write it in interval:s:N or END";
                return error(column, message);
            }
        }))
    }

    fn said(&mut self, value: &OperandKind) -> Said {
        match value {
            OperandKind::Number(number) => Said::Number(*number),
            OperandKind::Text(text) => Said::Text(text.clone()),
            OperandKind::Builtin(builtin) => Said::Builtin(*builtin),
            OperandKind::Since(_) => Said::Builtin(Builtin::Duration),
            OperandKind::Ksym(_) => Said::Symbol(self.name(value)),
            OperandKind::Fetched(_) | OperandKind::Str(_) => Said::Argument(self.name(value)),
            OperandKind::Divided { of, by } => Said::Divided {
                of: Box::new(self.said(of)),
                by: *by,
            },
        }
    }

    /// Makes `map` count the hits of `probes`: by `keys`, with the aggregation `what`.
    fn gather(
        &mut self,
        column: usize,
        map: &str,
        keys: &[Operand],
        what: &Gather,
        probes: std::ops::Range<usize>,
    ) -> Result<(), ParseError> {
        let aggregate = what.aggregate;
        let (histogram, parts) = self.histogram(column, keys, what)?;
        let gathered = self.maps.entry(map.to_owned()).or_insert_with(|| Gathered {
            aggregate,
            keys: keys.len(),
            counted: Vec::new(),
        });
        if gathered.aggregate != aggregate {
            return error(column, format!("@{map} is assigned something else before"));
        }
        if gathered.keys != keys.len() {
            let message = format!("@{map} has {} keys before", gathered.keys);
            return error(column, message);
        }
        for probe in probes {
            let fits = |counted: &&mut Counted| {
                counted.histogram.text == histogram.text
                    && counted.keys == parts
                    // A probe that counts twice in the same way needs two histograms.
                    && counted.probes.last() != Some(&probe)
            };
            if let Some(counted) = gathered.counted.iter_mut().find(fits) {
                counted.probes.push(probe);
                continue;
            }
            self.histograms += 1;
            if self.histograms > HISTOGRAMS_MAX {
                let message = format!("more than {HISTOGRAMS_MAX} maps, or ways to count in them");
                return error(column, message);
            }
            gathered.counted.push(Counted {
                histogram: histogram.clone(),
                probes: vec![probe],
                keys: parts.clone(),
            });
        }
        Ok(())
    }

    /// Returns the name that a value has in histograms; for a division, the name of its dividend.
    fn counted(&mut self, column: usize, kind: &OperandKind) -> Result<String, ParseError> {
        match kind.undivided() {
            OperandKind::Builtin(builtin) => Ok(of_histograms(column, *builtin)?.to_owned()),
            other => Ok(self.name(other)),
        }
    }

    /// Generates the histogram for a map with `keys`, and the rules that make these keys from the histogram's
    /// keys.
    fn histogram(
        &mut self,
        column: usize,
        keys: &[Operand],
        what: &Gather,
    ) -> Result<(Written, Vec<KeyPart>), ParseError> {
        let mut fields = Vec::new();
        let mut parts = Vec::new();
        for operand in keys {
            let at = operand.column.0;
            let mut field = |text: String| {
                fields.push((at, text));
                fields.len() - 1
            };
            parts.push(match &operand.kind {
                OperandKind::Number(number) => KeyPart::Number(*number),
                OperandKind::Text(text) => KeyPart::Text(text.clone()),
                OperandKind::Builtin(builtin) => {
                    let at = field(of_histograms(at, *builtin)?.to_owned());
                    match builtin {
                        Builtin::Func => KeyPart::Function(at),
                        Builtin::Probe => KeyPart::Probe(at),
                        _ => KeyPart::Key(at),
                    }
                }
                OperandKind::Since(_) => KeyPart::Key(field("duration".to_owned())),
                OperandKind::Ksym(_) => {
                    KeyPart::Symbol(field(format!("{}.sym", self.name(&operand.kind))))
                }
                OperandKind::Fetched(_) | OperandKind::Str(_) => {
                    KeyPart::Key(field(self.name(&operand.kind)))
                }
                kind @ OperandKind::Divided { by, .. } => {
                    let of = self.counted(at, kind)?;
                    KeyPart::Key(field(format!("{of}/{by}")))
                }
            });
        }
        let value = match &what.of {
            None => None,
            Some(of) => {
                let name = self.counted(of.column.0, &of.kind)?;
                let per = match &of.kind {
                    OperandKind::Divided { by, .. } => format!("/{by}"),
                    _ => String::new(),
                };
                Some((of.column.0, format!("{name}{per}")))
            }
        };
        match (what.aggregate, &value) {
            (MapFunction::Powers, Some((at, name))) => fields.push((*at, format!("{name}.bits"))),
            (MapFunction::Steps { step, .. }, Some((at, name))) => {
                fields.push((*at, format!("{name}.buckets={step}")));
            }
            // A histogram needs a key. `probe` is chosen because it has few values.
            _ if fields.is_empty() => fields.push((column, "probe".to_owned())),
            _ => {}
        }
        let mut written = Written::default();
        for (index, (at, field)) in fields.iter().enumerate() {
            written.push(*at, if index == 0 { "keys=" } else { "," });
            written.push(*at, field);
        }
        if let (
            MapFunction::Sum | MapFunction::Average | MapFunction::Least | MapFunction::Greatest,
            Some((at, name)),
        ) = (what.aggregate, &value)
        {
            written.push(*at, &format!(":vals={name}"));
        }
        written.push(column, &format!(":size={SIZE_MAX}"));
        if written.text.len() > WRITTEN_MAX {
            return error(column, "too many keys, with too long names");
        }
        read_histogram(&written.text).map_err(|error| written.in_script(error))?;
        Ok((written, parts))
    }
}

/// Values that a clause needs from its hits.
struct Used<'a> {
    /// Fetched values, each once.
    fetched: Vec<&'a Operand>,
    stacks: bool,
}

impl<'a> Used<'a> {
    /// Collects the values that `clause` needs. `entries` says whether some of its probes are at entries.
    fn of(clause: &'a Clause, entries: bool) -> Result<Self, ParseError> {
        let mut operands = Vec::new();
        if let Some(condition) = &clause.condition {
            condition.operands(&mut operands);
        }
        for statement in &clause.statements {
            match &statement.kind {
                StatementKind::Gather { keys, what, .. } => {
                    operands.extend(keys);
                    operands.extend(&what.of);
                }
                StatementKind::Printf { values, .. } => operands.extend(values),
                _ => {}
            }
        }
        let mut used = Self {
            fetched: Vec::new(),
            stacks: false,
        };
        for operand in operands {
            let at_return = match operand.kind.undivided() {
                OperandKind::Builtin(Builtin::Duration) => true,
                kind => kind.fetched() == Some(&Fetched::Return),
            };
            if at_return && entries {
                return error(
                    operand.column.0,
                    "only calls that return have it: write kretprobe",
                );
            }
            used.stacks |= operand.kind == OperandKind::Builtin(Builtin::Kstack);
            // A symbol is looked up by its address, so only the address is fetched.
            let of_text = matches!(operand.kind, OperandKind::Str(_));
            let is_same = |it: &&&Operand| {
                matches!(it.kind, OperandKind::Str(_)) == of_text
                    && it.kind.fetched() == operand.kind.fetched()
            };
            if operand.kind.fetched().is_some() && used.fetched.iter().find(is_same).is_none() {
                used.fetched.push(operand);
            }
        }
        Ok(used)
    }
}

fn is_aside(point: &Point) -> bool {
    !matches!(point.kind, PointKind::Function { .. })
}

/// Returns the fetch expression of a value, in the syntax of definitions.
fn expression(kind: &OperandKind) -> String {
    let address = match kind.fetched() {
        // `$arg` counts from 1.
        Some(Fetched::Argument(number)) => format!("$arg{}", number + 1),
        Some(Fetched::Named(path)) => path.clone(),
        Some(Fetched::CurrentTask) => "$current".to_owned(),
        Some(Fetched::Return) | None => "$retval".to_owned(),
    };
    match (kind, kind.fetched()) {
        (OperandKind::Str(_), _) => format!("+0({address}):string"),
        (_, Some(Fetched::Named(_))) => address,
        (_, Some(Fetched::CurrentTask)) => format!("{address}:u64"),
        _ => format!("{address}:d"),
    }
}

/// Returns the right-hand side of a comparison, in the syntax of filters.
fn compared(value: &Compared) -> Result<String, ParseError> {
    match &value.with {
        With::Number(number) => Ok(number.to_string()),
        With::Names(names) => Ok(names.clone()),
        With::Text(text) => {
            let plain = |c: char| matches!(c, ' '..='~') && c != '"';
            match text.len() <= OPERAND_MAX && text.chars().all(plain) {
                true => Ok(format!("\"{text}\"")),
                false => error(
                    value.column.0,
                    format!(
                        "compared are at most {OPERAND_MAX} characters of ASCII without quotes"
                    ),
                ),
            }
        }
    }
}

/// Returns the field of histograms for `builtin`, which is at `column`.
fn of_histograms(column: usize, builtin: Builtin) -> Result<&'static str, ParseError> {
    Ok(match builtin {
        Builtin::Pid => "common_tgid",
        Builtin::Tid => "common_pid",
        Builtin::Comm => "comm",
        Builtin::Cpu => "common_cpu",
        Builtin::Nsecs => "common_timestamp",
        Builtin::Func | Builtin::Probe => "probe",
        Builtin::Kstack => "stacktrace",
        Builtin::Duration => "duration",
        Builtin::Elapsed => {
            return error(column, "not supported in maps: `elapsed`; write nsecs");
        }
    })
}

/// Compiles a value that is printed outside hits.
fn said_aside(column: usize, value: &OperandKind) -> Result<Said, ParseError> {
    match value {
        OperandKind::Number(number) => Ok(Said::Number(*number)),
        OperandKind::Text(text) => Ok(Said::Text(text.clone())),
        OperandKind::Builtin(builtin @ (Builtin::Nsecs | Builtin::Elapsed)) => {
            Ok(Said::Builtin(*builtin))
        }
        OperandKind::Divided { of, by } => Ok(Said::Divided {
            of: Box::new(said_aside(column, of)?),
            by: *by,
        }),
        _ => error(
            column,
            "there is no hit that has it: only numbers, texts, nsecs and elapsed are printed here",
        ),
    }
}
