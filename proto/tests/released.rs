//! Checks that the interface stays compatible with clients of every release: each released element keeps its
//! number, name, type and file. Additions are allowed.
//!
//! `released/` has a `FileDescriptorSet` of each release, without comments. `HVPROBE_RELEASE=1 cargo test
//! --package hvprobe-proto --test released` writes the file of the version in `Cargo.toml`, once, when that
//! version is released. An existing file is never overwritten.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use hvprobe_proto::FILE_DESCRIPTOR_SET;
use prost::Message as _;
use prost_types::field_descriptor_proto::Label;
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// Everything in an interface that clients depend on. The key names an element, the value describes it.
type Facts = BTreeMap<String, String>;

fn facts(set: &FileDescriptorSet) -> Facts {
    let mut facts = Facts::new();
    for file in &set.file {
        let name = file.name();
        // Programs import the generated code by these names.
        let options = file.options.clone().unwrap_or_default();
        let packages = [file.package(), options.go_package(), options.java_package()];
        facts.insert(
            format!("file {name}"),
            format!("packages {packages:?}, {}", options.java_multiple_files()),
        );
        let scope = format!("{name}: {}", file.package());
        for message in &file.message_type {
            of_message(&scope, message, &mut facts);
        }
        for values in &file.enum_type {
            of_enum(&scope, values, &mut facts);
        }
        for service in &file.service {
            let service_name = format!("{scope}.{}", service.name());
            facts.insert(service_name.clone(), "service".to_owned());
            for method in &service.method {
                let many = |streaming| if streaming { "stream of " } else { "" };
                facts.insert(
                    format!("{service_name}.{}", method.name()),
                    format!(
                        "takes {}{}, returns {}{}",
                        many(method.client_streaming()),
                        method.input_type(),
                        many(method.server_streaming()),
                        method.output_type()
                    ),
                );
            }
        }
    }
    facts
}

fn of_message(scope: &str, message: &DescriptorProto, facts: &mut Facts) {
    let name = format!("{scope}.{}", message.name());
    facts.insert(name.clone(), "message".to_owned());
    for field in &message.field {
        let place = format!("{name} field {}", field.number());
        facts.insert(place, of_field(message, field));
    }
    for nested in &message.nested_type {
        of_message(&name, nested, facts);
    }
    for values in &message.enum_type {
        of_enum(&name, values, facts);
    }
}

fn of_field(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let repeated = match field.label() {
        Label::Repeated => "repeated ",
        Label::Optional if field.proto3_optional() => "optional ",
        Label::Optional | Label::Required => "",
    };
    let one_of = match field.oneof_index {
        Some(index) if !field.proto3_optional() => {
            let index = usize::try_from(index).unwrap();
            format!(", one of {}", message.oneof_decl[index].name())
        }
        _ => String::new(),
    };
    format!(
        "{} {repeated}{}{}{one_of}",
        field.name(),
        field.r#type().as_str_name(),
        field.type_name()
    )
}

fn of_enum(scope: &str, values: &EnumDescriptorProto, facts: &mut Facts) {
    let name = format!("{scope}.{}", values.name());
    facts.insert(name.clone(), "enum".to_owned());
    for value in &values.value {
        let place = format!("{name} value {}", value.number());
        facts.insert(place, value.name().to_owned());
    }
}

/// Returns the elements of `released` that are missing or different in `now`.
fn broken(released: &FileDescriptorSet, now: &FileDescriptorSet) -> Vec<String> {
    let now = facts(now);
    let changed = |(what, was): (String, String)| match now.get(&what) {
        Some(is) if *is == was => None,
        Some(is) => Some(format!("{what} was `{was}`, and is `{is}`")),
        None => Some(format!("{what} was `{was}`, and is gone")),
    };
    facts(released).into_iter().filter_map(changed).collect()
}

/// Returns the interface of this build, without comments.
fn now() -> FileDescriptorSet {
    let mut set = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
    for file in &mut set.file {
        file.source_code_info = None;
    }
    set
}

#[test]
fn clients_of_every_release_are_understood() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("released");
    if std::env::var_os("HVPROBE_RELEASE").is_some() {
        let file = folder.join(concat!(env!("CARGO_PKG_VERSION"), ".bin"));
        let written =
            File::create_new(&file).and_then(|mut to| to.write_all(&now().encode_to_vec()));
        written.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
    let mut releases = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let released = FileDescriptorSet::decode(fs::read(&path).unwrap().as_slice()).unwrap();
        let broken = broken(&released, &now());
        let path = path.display();
        assert!(broken.is_empty(), "since {path}:\n{}", broken.join("\n"));
        releases += 1;
    }
    assert!(releases > 0, "no releases in {}", folder.display());
}

/// Checks that the last released file has all services: an element that is in no released file is not protected
/// against changes.
#[test]
fn the_last_release_has_all_services() {
    let version = |path: &Path| -> Vec<u32> {
        let numbers = path.file_stem().and_then(|stem| stem.to_str()).unwrap();
        numbers.split('.').map(|it| it.parse().unwrap()).collect()
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("released");
    let files = fs::read_dir(folder).unwrap();
    let last = files.map(|file| file.unwrap().path());
    let last = last.max_by_key(|path| version(path)).unwrap();
    let released = FileDescriptorSet::decode(fs::read(&last).unwrap().as_slice()).unwrap();
    let released = facts(&released);
    let services = facts(&now()).into_iter().filter(|(_, is)| is == "service");
    let new: Vec<_> = services
        .map(|(service, _)| service)
        .filter(|service| !released.contains_key(service))
        .collect();
    assert!(new.is_empty(), "not in {}: {new:#?}", last.display());
}

/// Returns the message called `name`.
fn message<'a>(set: &'a mut FileDescriptorSet, name: &str) -> &'a mut DescriptorProto {
    let mut messages = set.file.iter_mut().flat_map(|file| &mut file.message_type);
    messages.find(|message| message.name() == name).unwrap()
}

/// Applies `change` to the interface of this build. Returns the elements that it breaks.
fn after(change: impl FnOnce(&mut FileDescriptorSet)) -> String {
    let mut changed = now();
    change(&mut changed);
    broken(&now(), &changed).join("\n")
}

const STOP: &str = "hvprobe/v1/machines.proto: hvprobe.v1.StopRequest";

#[test]
fn what_is_added_breaks_nothing() {
    let report = after(|set| {
        message(set, "StopRequest")
            .field
            .push(FieldDescriptorProto {
                name: Some("later".to_owned()),
                number: Some(1000),
                ..Default::default()
            });
        let file = &mut set.file[0];
        file.message_type.push(DescriptorProto {
            name: Some("New".to_owned()),
            ..Default::default()
        });
        let method = set
            .file
            .iter_mut()
            .find_map(|file| file.service.first_mut());
        let service = method.unwrap();
        let mut more = service.method[0].clone();
        more.name = Some("More".to_owned());
        service.method.push(more);
    });
    assert_eq!(report, "");
}

#[test]
fn what_changes_or_goes_is_reported() {
    let field = |change: fn(&mut FieldDescriptorProto)| {
        after(|set| change(&mut message(set, "StopRequest").field[0]))
    };
    assert_eq!(
        field(|field| field.name = Some("name".to_owned())),
        format!("{STOP} field 1 was `machine TYPE_STRING`, and is `name TYPE_STRING`")
    );
    assert_eq!(
        field(|field| field.number = Some(2)),
        format!("{STOP} field 1 was `machine TYPE_STRING`, and is gone")
    );
    assert_eq!(
        field(|field| field.set_label(Label::Repeated)),
        format!("{STOP} field 1 was `machine TYPE_STRING`, and is `machine repeated TYPE_STRING`")
    );
    assert_eq!(
        field(|field| field.proto3_optional = Some(true)),
        format!("{STOP} field 1 was `machine TYPE_STRING`, and is `machine optional TYPE_STRING`")
    );
    assert_eq!(
        after(|set| message(set, "StopRequest").name = Some("EndRequest".to_owned())),
        format!(
            "{STOP} was `message`, and is gone\n{STOP} field 1 was `machine TYPE_STRING`, and is gone"
        )
    );
}

#[test]
fn changed_values_methods_and_packages_are_reported() {
    let values = after(|set| {
        let mut enums = set.file.iter_mut().flat_map(|file| &mut file.enum_type);
        let state = enums.find(|values| values.name() == "MachineState");
        state.unwrap().value[1].number = Some(9);
    });
    assert_eq!(
        values,
        "hvprobe/v1/machines.proto: hvprobe.v1.MachineState value 1 was \
         `MACHINE_STATE_BOOTING`, and is gone"
    );
    let methods = after(|set| {
        let mut services = set.file.iter_mut().flat_map(|file| &mut file.service);
        let events = services.find(|service| service.name() == "Events").unwrap();
        events.method[0].server_streaming = Some(false);
    });
    let takes = "takes .hvprobe.v1.SubscribeRequest, returns";
    assert_eq!(
        methods,
        format!(
            "hvprobe/v1/events.proto: hvprobe.v1.Events.Subscribe was `{takes} stream of \
             .hvprobe.v1.SubscribeResponse`, and is `{takes} .hvprobe.v1.SubscribeResponse`"
        )
    );
    let packages = after(|set| {
        let file = set
            .file
            .iter_mut()
            .find(|file| file.name().ends_with("host.proto"));
        file.unwrap().options.as_mut().unwrap().go_package = None;
    });
    assert!(
        packages.starts_with("file hvprobe/v1/host.proto was `packages "),
        "{packages}"
    );
    assert!(
        packages.ends_with(r#"["hvprobe.v1", "", "hvprobe.v1"], true`"#),
        "{packages}"
    );
    let one_of = after(|set| message(set, "Actions").oneof_decl[0].name = Some("else".to_owned()));
    assert!(one_of.contains("one of then`, and is `"), "{one_of}");
}
