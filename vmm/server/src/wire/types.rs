//! Describes types and functions of a kernel, by their names, for clients.
//!
//! Invariant: for any types, the length of an answer is bounded by the limits of the request, and by those of a
//! [declaration](Types::declaration).

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_linux::types::{Place, Prototype, PrototypeError, Types};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::{self, ErrorKind};
use hvprobe_proto::wire::WireEnum;
use hvprobe_spec::chain;
use tonic::Code;

/// The words before the name of a type that is not a typedef.
const TAGS: [&str; 3] = ["struct", "union", "enum"];

/// The types that can be described.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    /// Types of the kernel.
    pub(crate) kernel: &'a Types,
    /// Types of modules, by the module's name as the request writes it.
    pub(crate) modules: &'a BTreeMap<String, Arc<Types>>,
}

/// Splits `name` into the module to search and the name there: `MODULE:NAME`, or `NAME` for the kernel's own.
pub(crate) fn split(name: &str) -> (Option<&str>, &str) {
    match name.split_once(':') {
        Some((module, name)) => (Some(module.trim()), name),
        None => (None, name),
    }
}

impl<'a> Known<'a> {
    fn of<'n>(&self, name: &'n str) -> (&'a Types, &'n str) {
        let (module, name) = split(name);
        let types = module.and_then(|module| self.modules.get(module));
        (types.map_or(self.kernel, |types| types), name)
    }
}

/// Describes what `names` stand for. `near` returns symbols with similar names.
pub(crate) fn describe(
    known: Known<'_>,
    near: impl Fn(&str) -> Vec<String>,
    names: &[String],
) -> Result<Vec<v1::TypeDescription>, Failure> {
    let mut described = Vec::with_capacity(names.len());
    for (position, name) in names.iter().enumerate() {
        let index = u32::try_from(position).unwrap_or(u32::MAX);
        let (types, name) = known.of(name);
        let found = types.find(name);
        if found.is_empty() {
            let function = function(types, &near, name);
            described.push(v1::TypeDescription {
                index,
                ..function.map_err(|failure| failure.at_index(position))?
            });
        }
        described.extend(found.into_iter().map(|id| v1::TypeDescription {
            index,
            declaration: types.declaration(id),
            size: types.size(id),
            parameters: Vec::new(),
        }));
    }
    Ok(described)
}

fn function(
    types: &Types,
    near: impl Fn(&str) -> Vec<String>,
    name: &str,
) -> Result<v1::TypeDescription, Failure> {
    let prototype = types.function(name).map_err(|error| match &error {
        PrototypeError::Unknown(_) => {
            let message = format!("the kernel's types do not contain `{name}`");
            Failure::new(Code::NotFound, ErrorKind::UnknownType, message)
                .offering(candidates(types, near, name))
        }
        PrototypeError::Ambiguous(_) => Failure::invalid(ErrorKind::AmbiguousType, chain(&error)),
        PrototypeError::Malformed(_) => {
            Failure::new(Code::FailedPrecondition, ErrorKind::NoTypes, chain(&error))
        }
    })?;
    let found = types.functions(name);
    Ok(v1::TypeDescription {
        declaration: found
            .first()
            .map_or_else(String::new, |id| types.declaration(*id)),
        parameters: parameters(types, &prototype),
        ..Default::default()
    })
}

fn parameters(types: &Types, prototype: &Prototype) -> Vec<v1::Parameter> {
    let places = types.places(prototype);
    let parameters = prototype.parameters.iter().zip(places);
    parameters
        .map(|(parameter, place)| {
            let (registers, stack) = match place {
                Place::Register(register) => (vec![register], None),
                Place::Registers(first, second) => (vec![first, second], None),
                Place::Stack(word) => (Vec::new(), Some(word.into())),
                Place::Unknown => (Vec::new(), None),
            };
            v1::Parameter {
                name: parameter.name.clone(),
                r#type: types.name(parameter.ty),
                registers: registers.into_iter().map(WireEnum::number).collect(),
                stack,
            }
        })
        .collect()
}

/// Returns what could have been meant by `name`: the same name with a tag, or a function with a similar name.
fn candidates(types: &Types, near: impl Fn(&str) -> Vec<String>, name: &str) -> Vec<String> {
    let tagged = TAGS.iter().map(|tag| format!("{tag} {name}"));
    let mut candidates: Vec<_> = tagged
        .filter(|tagged| !types.find(tagged).is_empty())
        .collect();
    let mut functions = near(name);
    functions.retain(|function| types.function(function).is_ok());
    candidates.append(&mut functions);
    candidates
}

#[cfg(test)]
mod tests {
    use hvprobe_fixtures::btf;

    use super::*;

    fn describe(names: &[&str]) -> Result<Vec<v1::TypeDescription>, Failure> {
        let types = Types::parse(&btf::sample().bytes()).unwrap();
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let near = |_: &str| vec!["do_sys_openat2".to_owned(), "no_function".to_owned()];
        let mut own = btf::Btf::behind(&btf::sample());
        let device = own.structure("device", 64, &[]);
        let device = own.pointer(device);
        own.function("do_sys_openat2", 0, &[("device", device)]);
        let kernel = Arc::new(types);
        let own = Types::split(Arc::clone(&kernel), &own.bytes()).unwrap();
        let modules = BTreeMap::from([("m".to_owned(), Arc::new(own))]);
        let known = Known {
            kernel: &kernel,
            modules: &modules,
        };
        super::describe(known, near, &names)
    }

    #[test]
    fn modules_have_types_of_their_own_and_those_of_the_kernel() {
        let names = ["m:struct device", "m:do_sys_openat2", "m:struct open_how"];
        let described = describe(&names).unwrap();
        let [device, function, how] = described.as_slice() else {
            panic!("{described:?}");
        };
        assert_eq!((device.index, device.size), (0, Some(64)));
        assert_eq!(
            function.declaration,
            "void do_sys_openat2(struct device *device);"
        );
        assert_eq!((how.index, how.size), (2, Some(24)));
        let failure = describe(&["struct device"]).unwrap_err();
        assert_eq!(tonic::Status::from(failure).code(), Code::NotFound);
        let failure = describe(&["m:nobody"]).unwrap_err();
        let status = tonic::Status::from(failure);
        assert!(status.message().contains("`nobody`"), "{status:?}");
        for odd in ["m:", ":", "m::struct device", "m: "] {
            assert!(describe(&[odd]).is_err(), "{odd:?}");
        }
    }

    #[test]
    fn types_and_functions_are_described_in_the_order_of_the_request() {
        let described = describe(&["do_sys_openat2", "struct open_how", "enum color"]).unwrap();
        let [function, how, color] = described.as_slice() else {
            panic!("{described:?}");
        };
        assert_eq!(
            function.declaration,
            "int do_sys_openat2(int dfd, const char *filename, struct open_how *how);"
        );
        assert_eq!((function.index, function.size), (0, None));
        let registers = |n: usize| function.parameters[n].registers().collect::<Vec<_>>();
        assert_eq!(registers(0), [v1::Register::Rdi]);
        assert_eq!(registers(2), [v1::Register::Rdx]);
        assert_eq!(function.parameters[1].name, "filename");
        assert_eq!(function.parameters[1].r#type, "const char *");
        assert_eq!((how.index, how.size), (1, Some(24)));
        assert!(
            how.declaration.starts_with("struct open_how {\n"),
            "{how:?}"
        );
        assert_eq!((color.index, color.size), (2, Some(4)));
    }

    #[test]
    fn unknown_names_are_reported_with_what_could_have_been_meant() {
        let failure = describe(&["struct file", "open_how"]).unwrap_err();
        let status = tonic::Status::from(failure);
        assert_eq!(status.code(), Code::NotFound);
        let detail = crate::status::tests::detail(&status);
        assert_eq!(detail.kind(), ErrorKind::UnknownType);
        assert_eq!(detail.index, Some(1));
        assert_eq!(detail.candidates, ["struct open_how", "do_sys_openat2"]);
        for odd in ["", " ", "struct", "struct ", "int (*)(void)", "*", "\0"] {
            assert!(describe(&[odd]).is_err(), "{odd:?}");
        }
    }
}
