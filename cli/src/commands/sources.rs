//! `hvprobe lines` and `hvprobe vars`: source lines and variables from the debug information of a kernel or of
//! a module, in a local file or at a server.

use std::process::ExitCode;

use hvprobe_proto::v1::{ListLinesRequest, ListVariablesRequest};
use hvprobe_sources::Sources;
use hvprobe_spec::line_range::LineRange;
use hvprobe_spec::point::Point;
use serde::Serialize;

use crate::client::{Client, upload};
use crate::definitions::cache;
use crate::definitions::debug_info::{self, open_kernel};
use crate::failure::typed::bad;
use crate::failure::{DONE, WrongUsage, answered};
use crate::options::server::OnMachine;
use crate::options::sources::{Files, Lines, Vars};
use crate::output::{self, json};

/// Holder of the debug information.
enum Asked {
    /// Local file.
    File(Box<Sources>),
    /// Server, and one of its machines.
    Server(Box<Client>, String),
}

/// Chooses the holder of the debug information: the file that was given, or else a server. If a file and a server
/// were given, uploads the file to the server, unless it is a module's.
async fn asked(files: Files, on: &OnMachine) -> anyhow::Result<Asked> {
    // The file of a module needs neither a kernel nor a server.
    if let Some(file) = &files.debug_info
        && let Some(module) = debug_info::open_module(file)?
    {
        return Ok(Asked::File(Box::new(module)));
    }
    let file = match files.debug_info {
        Some(file) if !on.is_said() => {
            let kernel = open_kernel(&cache::kernel(files.kernel.as_deref())?)?;
            return Ok(Asked::File(Box::new(debug_info::open(&kernel, &file)?)));
        }
        file => file,
    };
    let (mut client, machine) = Client::on_machine(on).await?;
    if let Some(file) = file {
        upload::debug_info(&mut client, &machine, &file).await?;
    }
    Ok(Asked::Server(Box::new(client), machine))
}

/// Source line as JSON.
#[derive(Serialize)]
struct LineJson<'a> {
    function: &'a str,
    file: &'a str,
    line: u64,
    relative: u64,
    places: &'a [String],
}

pub(crate) async fn lines(args: Lines) -> anyhow::Result<ExitCode> {
    let range = LineRange::parse(&args.function)
        .map_err(|error| bad("range of lines", &args.function, &error))?;
    let is_json = args.files.json;
    let answer = match asked(args.files, &args.on).await? {
        Asked::File(sources) => sources.lines(&range)?,
        Asked::Server(mut client, machine) => {
            let function = args.function;
            let request = ListLinesRequest { machine, function };
            answered(client.sources.list_lines(request).await)?
        }
    };
    for function in answer.functions {
        let (name, file) = (shown(&function.name), shown(&function.file));
        if !is_json {
            output::print(&format!("{name} {file}:{}", function.first))?;
        }
        for line in &function.lines {
            if is_json {
                json::print(&LineJson {
                    function: &function.name,
                    file: &function.file,
                    line: function.first.saturating_add(line.number),
                    relative: line.number,
                    places: &line.places,
                })?;
            } else {
                let places = shown(&line.places.join(" "));
                output::print(&format!("{:>7}  {places}", line.number))?;
            }
        }
    }
    Ok(DONE)
}

/// Variable as JSON.
#[derive(Serialize)]
struct VariableJson<'a> {
    place: &'a str,
    inlined: Option<&'a str>,
    name: &'a str,
    declaration: &'a str,
    parameter: bool,
    fetch: Option<&'a str>,
    unreadable: Option<&'a str>,
}

pub(crate) async fn vars(args: Vars) -> anyhow::Result<ExitCode> {
    let point = read(&args.point)?;
    let is_json = args.files.json;
    let answer = match asked(args.files, &args.on).await? {
        Asked::File(sources) => sources.variables(&point)?,
        Asked::Server(mut client, machine) => {
            let point = args.point;
            let request = ListVariablesRequest { machine, point };
            answered(client.sources.list_variables(request).await)?
        }
    };
    for found in answer.places {
        let (at, inlined) = (&found.place, some(&found.inlined));
        if !is_json {
            let inlined = inlined.map(|name| format!(" ({name} inlined)"));
            output::print(&shown(&format!("{at}{}", inlined.unwrap_or_default())))?;
        }
        for variable in &found.variables {
            let (fetch, unreadable) = (some(&variable.fetch), some(&variable.unreadable));
            if is_json {
                json::print(&VariableJson {
                    place: at,
                    inlined,
                    name: &variable.name,
                    declaration: &variable.declaration,
                    parameter: variable.parameter,
                    fetch,
                    unreadable,
                })?;
            } else {
                let place = match fetch {
                    Some(fetch) => fetch.to_owned(),
                    None => format!("({})", variable.unreadable),
                };
                output::print(&shown(&format!("  {}  {place}", variable.declaration)))?;
            }
        }
    }
    Ok(DONE)
}

/// Returns `text`, or `None` if it is empty.
fn some(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

fn read(text: &str) -> Result<Point, WrongUsage> {
    Point::parse(text).map_err(|error| bad("probe point", text, &error))
}

/// Returns foreign text without control characters for a terminal.
fn shown(text: &str) -> String {
    output::harmless(text.as_bytes())
}
