//! `hvprobe lines` and `hvprobe vars`: what a kernel's debug information says of its sources.

use std::process::ExitCode;

use anyhow::Context as _;
use hvprobe_server::{Kernel, Location, Sources};
use hvprobe_spec::point::{At, Point};
use serde::Serialize;

use crate::failure::{DONE, WrongUsage};
use crate::guest;
use crate::output::{self, json};
use crate::sources_args::{Files, Lines, Vars};
use crate::typed::bad;

fn open(files: Files) -> anyhow::Result<Sources> {
    let path = guest::kernel(files.kernel)?;
    let kernel = Kernel::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = &files.debug_info;
    Sources::open(&kernel, file).with_context(|| format!("cannot use {}", file.display()))
}

/// A line as JSON.
#[derive(Serialize)]
struct LineJson<'a> {
    function: &'a str,
    file: &'a str,
    line: u64,
    relative: u64,
    places: Vec<String>,
}

pub(crate) fn lines(args: Lines) -> anyhow::Result<ExitCode> {
    let (name, file) = match read(&args.function)? {
        Point::Function {
            name,
            file,
            at: At::Entry,
        } => (name, file),
        _ => {
            return Err(WrongUsage(
                "lines are told of a whole function: FUNC or FUNC@SRC".to_owned(),
            )
            .into());
        }
    };
    let is_json = args.files.json;
    let sources = open(args.files)?;
    for function in sources.lines(&name, file.as_deref())? {
        let (name, file) = (shown(&function.name), shown(&function.file));
        if !is_json {
            output::print(&format!("{name} {file}:{}", function.first))?;
        }
        for line in &function.lines {
            let places: Vec<_> = line.places.iter().map(|at| sources.named(*at)).collect();
            if is_json {
                json::print(&LineJson {
                    function: &function.name,
                    file: &function.file,
                    line: function.first.saturating_add(line.number),
                    relative: line.number,
                    places,
                })?;
            } else {
                let places = shown(&places.join(" "));
                output::print(&format!("{:>7}  {places}", line.number))?;
            }
        }
    }
    Ok(DONE)
}

/// A variable as JSON.
#[derive(Serialize)]
struct VariableJson<'a> {
    place: &'a str,
    inlined: Option<&'a str>,
    name: &'a str,
    declaration: &'a str,
    parameter: bool,
    fetch: Option<String>,
    unreadable: Option<&'a str>,
}

pub(crate) fn vars(args: Vars) -> anyhow::Result<ExitCode> {
    let point = read(&args.point)?;
    let is_json = args.files.json;
    let sources = open(args.files)?;
    for place in sources.variables(&point)? {
        let at = sources.named(place.at);
        if !is_json {
            let inlined = place.inlined.as_ref();
            let inlined = inlined.map(|name| format!(" ({name} inlined)"));
            output::print(&shown(&format!("{at}{}", inlined.unwrap_or_default())))?;
        }
        for variable in &place.variables {
            let found = fetch(&sources, &variable.location);
            if is_json {
                json::print(&VariableJson {
                    place: &at,
                    inlined: place.inlined.as_deref(),
                    name: &variable.name,
                    declaration: &variable.declaration,
                    parameter: variable.is_parameter,
                    unreadable: found.as_ref().err().copied(),
                    fetch: found.ok(),
                })?;
            } else {
                let found = match found {
                    Ok(fetch) => fetch,
                    Err(why) => format!("({why})"),
                };
                output::print(&shown(&format!("  {}  {found}", variable.declaration)))?;
            }
        }
    }
    Ok(DONE)
}

/// How a definition fetches what is there, or why none can.
fn fetch(sources: &Sources, location: &Location) -> Result<String, &'static str> {
    match location {
        Location::Fetch(fetch) => Ok(fetch.to_string()),
        Location::Static(at) => Ok(format!("@{}", sources.named(*at))),
        Location::Constant(value) => Ok(format!("\\{value}")),
        Location::Nowhere(why) => Err(why),
    }
}

fn read(text: &str) -> Result<Point, WrongUsage> {
    Point::parse(text).map_err(|error| bad("probe point", text, &error))
}

/// Text of the file's that does nothing to a terminal.
fn shown(text: &str) -> String {
    output::harmless(text.as_bytes())
}
