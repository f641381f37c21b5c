//! The calls and messages of `hvprobe.v1`, as its own descriptors describe them.
//!
//! Invariant: a call without a description counts as a stream.

use std::collections::{BTreeMap, HashMap, HashSet};

use hvprobe_proto::FILE_DESCRIPTOR_SET;
use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// Index of a message type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageType(usize);

/// Type of a field, or of the elements of a repeated field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldType {
    /// A message in a list.
    Element(MessageType),
    /// A message that its parent holds inline.
    Inline(MessageType),
    /// A message of a recursive type, which its parent holds in a box.
    Boxed(MessageType),
    /// `string` or `bytes`.
    Text,
    /// A number, an enumerator or a `bool`.
    Number,
}

/// A call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Method {
    pub(crate) input: MessageType,
    /// Whether the client sends exactly one message.
    pub(crate) asks_once: bool,
    /// Whether the server sends exactly one message.
    pub(crate) answers_once: bool,
    /// Whether the answer can be longer than a few KiB: it has lists, text or bytes.
    pub(crate) is_long: bool,
}

#[derive(Debug, Default)]
struct Described {
    name: String,
    /// Upper bound for the bytes of the generated structure, without its heap data.
    size: usize,
    fields: HashMap<u32, FieldType>,
    has_lists: bool,
}

/// The interface.
#[derive(Debug)]
pub(crate) struct Interface {
    messages: Vec<Described>,
    methods: HashMap<String, Method>,
    /// Unary calls of other interfaces.
    unary: HashSet<&'static str>,
}

/// The only unary call of another interface: the health check. Reflection has only streams.
const CHECK: &str = "/grpc.health.v1.Health/Check";
/// Type of answers that are not long although they have lists: these lists are short, except in the answer of
/// [`BOOT`].
const MACHINE: &str = ".hvprobe.v1.Machine";
/// The call whose answer is a long `Machine`: it lists the probes.
const BOOT: &str = "/hvprobe.v1.Machines/Boot";

impl Interface {
    pub(crate) fn new() -> Self {
        // Decoding cannot fail: the build embeds this set, and reflection serves it.
        let files = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap_or_default();
        let mut all = Vec::new();
        for file in &files.file {
            collect(
                &format!(".{}", file.package()),
                &file.message_type,
                &mut all,
            );
        }
        let descriptors = Descriptors {
            index: all.iter().map(|(name, _)| name.clone()).zip(0..).collect(),
            all: &all,
        };
        let messages: Vec<_> = (0..all.len())
            .map(|index| descriptors.describe(index))
            .collect();
        let mut methods = HashMap::new();
        for file in &files.file {
            for service in &file.service {
                for method in &service.method {
                    let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                    let Some(input) = descriptors.index.get(method.input_type()) else {
                        continue;
                    };
                    let output = descriptors.index.get(method.output_type());
                    let output = output.and_then(|index| messages.get(*index));
                    let is_long = output
                        .is_none_or(|it| it.has_lists && (it.name != MACHINE || path == BOOT));
                    let method = Method {
                        input: MessageType(*input),
                        asks_once: !method.client_streaming(),
                        answers_once: !method.server_streaming(),
                        is_long,
                    };
                    methods.insert(path, method);
                }
            }
        }
        Self {
            messages,
            methods,
            unary: HashSet::from([CHECK]),
        }
    }

    /// Returns the call at `path`, if this interface has it.
    pub(crate) fn method(&self, path: &str) -> Option<Method> {
        self.methods.get(path).copied()
    }

    /// Whether the call at `path` has one request and one answer.
    pub(crate) fn is_unary(&self, path: &str) -> bool {
        let is_unary = |it: Method| it.asks_once && it.answers_once;
        self.unary.contains(path) || self.method(path).is_some_and(is_unary)
    }

    /// Returns an upper bound for the bytes of a decoded message, without its heap data.
    pub(crate) fn size(&self, MessageType(index): MessageType) -> usize {
        self.messages.get(index).map_or(0, |it| it.size)
    }

    /// Returns the type of the field with this number, if the message has one.
    pub(crate) fn field(&self, MessageType(index): MessageType, number: u32) -> Option<FieldType> {
        self.messages.get(index)?.fields.get(&number).copied()
    }
}

/// Adds `messages` and those nested in them to `into`, with their full names.
fn collect(scope: &str, messages: &[DescriptorProto], into: &mut Vec<(String, DescriptorProto)>) {
    for message in messages {
        let name = format!("{scope}.{}", message.name());
        collect(&name, &message.nested_type, into);
        into.push((name, message.clone()));
    }
}

/// All message descriptors, by index and by name.
struct Descriptors<'a> {
    all: &'a [(String, DescriptorProto)],
    index: HashMap<String, usize>,
}

impl Descriptors<'_> {
    fn describe(&self, index: usize) -> Described {
        let Some((name, message)) = self.all.get(index) else {
            return Described::default();
        };
        let fields = message.field.iter().filter_map(|field| {
            let number = u32::try_from(field.number()).ok()?;
            Some((number, self.field_type(index, field)?))
        });
        let is_list = |field: &FieldDescriptorProto| {
            field.label() == Label::Repeated || matches!(field.r#type(), Type::String | Type::Bytes)
        };
        Described {
            name: name.clone(),
            size: self.size(index, &mut Vec::new()),
            fields: fields.collect(),
            has_lists: message.field.iter().any(is_list),
        }
    }

    /// Returns the type of a field of the message `index`.
    fn field_type(&self, index: usize, field: &FieldDescriptorProto) -> Option<FieldType> {
        Some(match field.r#type() {
            Type::String | Type::Bytes => FieldType::Text,
            Type::Message => {
                let inner = *self.index.get(field.type_name())?;
                if field.label() == Label::Repeated {
                    FieldType::Element(MessageType(inner))
                } else if self.reaches(inner, index, &mut HashSet::new()) {
                    FieldType::Boxed(MessageType(inner))
                } else {
                    FieldType::Inline(MessageType(inner))
                }
            }
            _ => FieldType::Number,
        })
    }

    /// Whether a message `from` can contain a message `to`, at any depth. If so, prost boxes each field of type
    /// `from` in `to`.
    fn reaches(&self, from: usize, to: usize, seen: &mut HashSet<usize>) -> bool {
        if from == to {
            return true;
        }
        let Some((_, message)) = self.all.get(from).filter(|_| seen.insert(from)) else {
            return false;
        };
        message.field.iter().any(|field| {
            let inner = self.index.get(field.type_name());
            inner.is_some_and(|inner| self.reaches(*inner, to, seen))
        })
    }

    /// Returns an upper bound for the bytes of the structure that prost generates for the message `index`. `within`
    /// has the messages that contain it.
    fn size(&self, index: usize, within: &mut Vec<usize>) -> usize {
        /// Size of a `Vec`.
        const LIST: usize = 24;
        /// Size of an optional `String`.
        const TEXT: usize = 24;
        /// Size of an optional number, with padding.
        const NUMBER: usize = 16;
        /// Size of a `HashMap`.
        const MAP: usize = 48;
        /// Size of the tag of an `Option` or of a oneof, with padding.
        const TAG: usize = 8;
        /// Size of a `Box`.
        const BOX: usize = 8;
        let Some((_, message)) = self.all.get(index) else {
            return 0;
        };
        within.push(index);
        let mut size = 0;
        // Members of a oneof share their place.
        let mut oneofs = BTreeMap::<i32, usize>::new();
        for field in &message.field {
            let inner = self.index.get(field.type_name()).copied();
            let this = match (field.label(), field.r#type(), inner) {
                (Label::Repeated, Type::Message, Some(inner)) if self.is_map(inner) => MAP,
                (Label::Repeated, ..) => LIST,
                (_, Type::Message, Some(inner)) if within.contains(&inner) => BOX,
                (_, Type::Message, Some(inner)) => TAG + self.size(inner, within),
                (_, Type::String | Type::Bytes, _) => TEXT,
                _ => NUMBER,
            };
            match field.oneof_index {
                Some(oneof) => {
                    let largest = oneofs.entry(oneof).or_default();
                    *largest = this.max(*largest);
                }
                None => size += this,
            }
        }
        within.pop();
        size + oneofs.values().map(|largest| TAG + largest).sum::<usize>()
    }

    fn is_map(&self, index: usize) -> bool {
        let options = self
            .all
            .get(index)
            .and_then(|(_, message)| message.options.as_ref());
        options.is_some_and(|it| it.map_entry())
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_proto::v1;

    use super::*;

    #[test]
    fn unary_calls_are_recognized() {
        let interface = Interface::new();
        for path in [
            "/hvprobe.v1.Machines/Stop",
            "/hvprobe.v1.Machines/ListMachines",
            "/hvprobe.v1.Probes/Unregister",
            "/hvprobe.v1.Host/Report",
            "/grpc.health.v1.Health/Check",
        ] {
            assert!(interface.is_unary(path), "{path}");
        }
        for path in [
            "/hvprobe.v1.Events/Subscribe",
            "/hvprobe.v1.Machines/WatchMachines",
            "/hvprobe.v1.Decisions/Decide",
            "/hvprobe.v1.Sources/UploadDebugInfo",
            "/grpc.health.v1.Health/Watch",
            "/",
        ] {
            assert!(!interface.is_unary(path), "{path}");
        }
    }

    #[test]
    fn long_answers_have_lists_or_bytes() {
        let interface = Interface::new();
        let is_long = |path: &str| interface.method(path).unwrap().is_long;
        for path in [
            "/hvprobe.v1.Machines/Boot",
            "/hvprobe.v1.Machines/ListMachines",
            "/hvprobe.v1.Machines/ReadKernel",
            "/hvprobe.v1.Probes/Register",
            "/hvprobe.v1.Probes/ListProbes",
            "/hvprobe.v1.Symbols/DescribeTypes",
        ] {
            assert!(is_long(path), "{path}");
        }
        for path in [
            "/hvprobe.v1.Machines/GetMachine",
            "/hvprobe.v1.Machines/Wait",
            "/hvprobe.v1.Machines/Stop",
            "/hvprobe.v1.Machines/DeleteMachine",
        ] {
            assert!(!is_long(path), "{path}");
        }
    }

    #[test]
    fn sizes_are_upper_bounds_and_close() {
        let interface = Interface::new();
        for (name, size) in [
            ("Actions", size_of::<v1::Actions>()),
            ("BootRequest", size_of::<v1::BootRequest>()),
            ("Budget", size_of::<v1::Budget>()),
            ("Item", size_of::<v1::Item>()),
            ("DecideRequest", size_of::<v1::DecideRequest>()),
            (
                "DescribeTypesRequest",
                size_of::<v1::DescribeTypesRequest>(),
            ),
            ("HoldRequest", size_of::<v1::HoldRequest>()),
            ("ListProbesRequest", size_of::<v1::ListProbesRequest>()),
            ("ProbeSpec", size_of::<v1::ProbeSpec>()),
            ("RegisterRequest", size_of::<v1::RegisterRequest>()),
            ("SubscribeRequest", size_of::<v1::SubscribeRequest>()),
            (
                "UploadDebugInfoRequest",
                size_of::<v1::UploadDebugInfoRequest>(),
            ),
        ] {
            let described = format!(".hvprobe.v1.{name}");
            let described = interface.messages.iter().find(|it| it.name == described);
            let bound = described.unwrap_or_else(|| panic!("no {name}")).size;
            assert!(
                size <= bound && bound <= 2 * size.max(32),
                "{name}: {size}, {bound}"
            );
        }
    }
}
