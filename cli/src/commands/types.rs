//! `hvprobe types`: describes types and functions of a guest's kernel.

use std::process::ExitCode;

use hvprobe_proto::limits;
use hvprobe_proto::v1::{DescribeTypesRequest, Parameter, TypeDescription};
use hvprobe_proto::wire;
use hvprobe_spec::language::text;

use crate::client::Client;
use crate::failure::{DONE, answered};
use crate::options::command_line::Types;
use crate::output;

pub(crate) async fn types(args: Types) -> anyhow::Result<ExitCode> {
    let (mut client, machine) = Client::on_machine(&args.on).await?;
    for names in args.names.chunks(limits::TYPES) {
        let request = DescribeTypesRequest {
            machine: machine.clone(),
            names: names.to_vec(),
        };
        for described in answered(client.symbols.describe_types(request).await)?.types {
            output::print(&shown(&described))?;
        }
    }
    Ok(DONE)
}

/// Returns the declaration, followed by facts that C does not express: the size of a type, or the places of
/// arguments.
fn shown(described: &TypeDescription) -> String {
    let declaration: Vec<_> = described
        .declaration
        .split('\n')
        .map(|line| output::harmless(line.replace('\t', "    ").as_bytes()))
        .collect();
    let mut text = declaration.join("\n");
    if let Some(size) = described.size {
        text.push_str(&format!(" /* {size} bytes */"));
    } else if !described.parameters.is_empty() {
        let places: Vec<_> = described.parameters.iter().map(place).collect();
        text.push_str(&format!(" /* {} */", places.join(", ")));
    }
    text
}

/// Returns the place of a parameter at the entry, in the syntax of captures.
fn place(parameter: &Parameter) -> String {
    if let Some(word) = parameter.stack {
        return format!("$stack{word}");
    }
    let registers: Vec<_> = parameter
        .registers
        .iter()
        .filter_map(|number| wire::register(*number).ok())
        .map(text::register)
        .collect();
    match registers.as_slice() {
        [] => "?".to_owned(),
        registers => registers.join(":"),
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_proto::v1::Register;

    use super::*;

    #[test]
    fn places_of_arguments_stand_behind_a_function() {
        let parameter = |registers: &[Register], stack| Parameter {
            registers: registers.iter().map(|&it| it.into()).collect(),
            stack,
            ..Default::default()
        };
        let function = TypeDescription {
            declaration: "void f(int a, struct two b, int c, float d);".to_owned(),
            parameters: vec![
                parameter(&[Register::Rdi], None),
                parameter(&[Register::Rsi, Register::Rdx], None),
                parameter(&[], Some(1)),
                parameter(&[], None),
            ],
            ..Default::default()
        };
        assert_eq!(
            shown(&function),
            "void f(int a, struct two b, int c, float d); /* %di, %si:%dx, $stack1, ? */"
        );
    }

    #[test]
    fn a_size_stands_behind_a_type_and_nothing_steers_the_terminal() {
        let of = |declaration: &str| TypeDescription {
            declaration: declaration.to_owned(),
            size: Some(4),
            ..Default::default()
        };
        assert_eq!(
            shown(&of("struct s {\n\tint a;\n};")),
            "struct s {\n    int a;\n}; /* 4 bytes */"
        );
        assert_eq!(shown(&of("int \x1b[2J;")), "int ?[2J; /* 4 bytes */");
    }
}
